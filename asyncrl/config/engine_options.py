"""The options of vLLM and DeepSpeed that a config can set, and the reasons why it cannot set others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.util.text import did_you_mean_or_list

ENGINE_OPTIONS = (
    *("max_model_len", "max_num_batched_tokens", "long_prefill_token_threshold", "enable_chunked_prefill"),
    *("enable_prefix_caching", "block_size", "num_gpu_blocks_override", "async_scheduling"),
    *("enforce_eager", "optimization_level", "cudagraph_capture_sizes", "max_cudagraph_capture_size"),
    *("attention_backend", "disable_custom_all_reduce", "load_format", "safetensors_load_strategy", "max_logprobs"),
    *("quantization", "kv_cache_dtype"),
)
"""Options in `generator.engine_options` of the engine "vllm": with these tokens carry the right version and log-prob,
and new weights reach the engine. Of others that is not known."""
QUANTIZATION = "fp8"
"""The quantization that vLLM also applies to new weights."""
ENGINE_KEYS = {
    "model": "it is model.path",
    "dtype": "it is model.dtype",
    "trust_remote_code": "it is model.trust_remote_code",
    "seed": "it follows from seed, the generator and its start",
    "max_num_seqs": "it is generator.max_running_groups times generator.group_size",
    "gpu_memory_utilization": "it is computed from generator.gpu_memory_utilization and the other roles on the GPU",
    "kv_cache_memory_bytes": "it is generator.kv_cache_bytes",
    "tensor_parallel_size": "it is generator.tensor_parallel",
    "data_parallel_size": "the replicas of a run are its generators (launch.generators)",
    "logprobs_mode": "the log-probs of sampled tokens would not be those of the policy that the learner trains",
    "speculative_config": "the draft model would get no new weights",
}
"""Options that have a separate key, or that are often requested, and why they cannot be set."""

TRANSFORMERS_OPTIONS = ("max_model_len", "max_num_batched_tokens")
"""Options in `generator.engine_options` of the engine "transformers"."""

SAMPLING_REFUSED = {
    "n": "it is eval.samples",
    "max_tokens": "it is generator.max_new_tokens",
    "min_tokens": "the engine would sample from another distribution than the learner trains",
    "stop": "it is generator.stop",
    "seed": "it follows from seed",
}
"""Sampling parameters of vLLM that are other keys of a config."""

TEMPLATE_REFUSED = {
    **dict.fromkeys(("conversation", "messages", "tools", "documents"), "it is part of a row"),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message"), "the last message of a chat decides it"),
    **dict.fromkeys(("tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask"), "the run sets it"),
    **dict.fromkeys(("padding", "truncation", "max_length", "tokenizer_kwargs"), "it is data.too_long"),
    "chat_template": "put a chat_template.jinja into the model's folder",
}
"""Arguments of `apply_chat_template` that are not variables of a template."""

DEEPSPEED_REFUSED = {
    "the learner forms its batches (learner.tokens_per_microbatch)": (
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "data_efficiency",
        "curriculum_learning",
    ),
    "it is learner.max_grad_norm": ("gradient_clipping",),
    "it is learner.zero_stage": ("zero_optimization.stage",),
    "it is learner.offload": tuple(f"zero_optimization.{name}" for name in (
        "offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory",
    )),
    "it is learner.lr, learner.lr_schedule and learner.optimizer_options": (
        "optimizer", "scheduler", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    ),
    "it is model.dtype; gradients add up in float32": (
        "bf16", "bfloat16", "fp16", "amp", "torch_autocast", "data_types",
    ),
    "every learner rank holds all layers": ("pipeline", "tensor_parallel"),
    "it is learner.sequence_parallel": ("sequence_parallel_size",),
    "checkpoints are the learner's own": ("checkpoint",),
}  # fmt: skip
"""DeepSpeed's settings that a config cannot set, by the reason."""


def check_engine_options(options: Mapping[str, Any], engine: str) -> None:
    """Raises ValueError naming the first option of the engine that a config cannot set, and why."""
    for name in options:
        if reason := _refusal(name, options[name], engine):
            raise ValueError(f"engine_options.{name} = {options[name]!r}: cannot be set here: {reason}")
    window = options.get("max_model_len")
    if window is not None and (type(window) is not int or window < 2):
        raise ValueError(f"engine_options.max_model_len = {window!r}: must be a number of tokens, at least 2, or null")
    tokens = options.get("max_num_batched_tokens")
    if engine == "transformers" and tokens is not None and (type(tokens) is not int or tokens < 1):
        raise ValueError(f"engine_options.max_num_batched_tokens = {tokens!r}: must be a number of tokens, at least 1")
    for name in ("async_scheduling", "enable_prefix_caching"):
        if type(value := options.get(name, False)) is not bool:
            raise ValueError(f"engine_options.{name} = {value!r}: must be true or false")


def _refusal(name: str, value: Any, engine: str) -> str | None:
    known = {"vllm": ENGINE_OPTIONS, "transformers": TRANSFORMERS_OPTIONS}.get(engine)
    if known is None:
        return None
    if name == "quantization" and value not in (None, QUANTIZATION):
        return f"new weights reach an engine with {QUANTIZATION} only"
    if name in known:
        return None
    if engine == "vllm" and name in ENGINE_KEYS:
        return ENGINE_KEYS[name]
    return f"it is not one of the options that are tested with the engine {engine}{did_you_mean_or_list(name, known)}"


def check_sampling(options: Any) -> None:
    """Raises ValueError naming the first of vLLM's sampling parameters that a config cannot set, and why."""
    for name in options if isinstance(options, Mapping) else ():
        if reason := SAMPLING_REFUSED.get(name):
            raise ValueError(f"{name} = {options[name]!r}: cannot be set here: {reason}")


def check_template_options(options: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first argument that is not an option of a chat template, and why."""
    for name, value in options.items():
        if reason := TEMPLATE_REFUSED.get(name):
            raise ValueError(f"{name} = {value!r}: is not an option of a chat template: {reason}")


def check_deepspeed_options(options: Mapping[str, Any], prefix: str = "") -> None:
    """Raises ValueError naming the first of DeepSpeed's settings that a config cannot set, and why."""
    for name, value in options.items():
        dotted = prefix + name
        if reason := next((reason for reason, names in DEEPSPEED_REFUSED.items() if dotted in names), None):
            raise ValueError(f"deepspeed_options.{dotted} = {value!r}: cannot be set here: {reason}")
        if isinstance(value, Mapping):
            check_deepspeed_options(value, f"{dotted}.")


def merged(settings: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with options over them; nested tables are merged as well."""
    result = dict(settings)
    for name, value in options.items():
        inner = result.get(name)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            result[name] = merged(inner, value)
        else:
            result[name] = value
    return result
