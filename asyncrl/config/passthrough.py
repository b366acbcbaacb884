"""The options of vLLM and DeepSpeed that a config cannot set, with the reasons, and checks of those that it can."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OF_THE_RUN = "the run sets it"
_IN_PROCESS = "steps are counted and new weights are shown to the engine in one process on one host"
_PARALLEL = f"the engine divides a model by generator.tensor_parallel only: {_IN_PROCESS}"
_VERSIONS = "the run's own scheduler labels each token with its policy version"
_LOGPROBS = "the log-probs of sampled tokens would not be those of the policy that the learner trains"
_WEIGHTS = "the learner sends the weights of model.path, and no others"
_SAME_MODEL = "the learner loads the model and the tokenizer as model.path describes them, and so must the engine"
_DRAFT = "the draft model would get no new weights"
_KEYS_AND_VALUES = "keys and values that are stored elsewhere would be used under other weights"
_PREFETCH = "new weights would not reach layers that are prefetched from host memory"

ENGINE_REFUSED = {
    "model": "it is model.path",
    "model_weights": _WEIGHTS,
    "tokenizer": "it is that of model.path",
    "tokenizer_revision": _SAME_MODEL,
    "revision": _SAME_MODEL,
    "code_revision": _SAME_MODEL,
    "hf_config_path": _SAME_MODEL,
    "hf_overrides": _SAME_MODEL,
    "model_class_overrides": _SAME_MODEL,
    "config_format": _SAME_MODEL,
    "dtype": "it is model.dtype",
    "trust_remote_code": "it is model.trust_remote_code",
    "seed": "it follows from seed, the generator and its start",
    "max_num_seqs": "it is generator.max_running_groups times generator.group_size",
    "gpu_memory_utilization": "it is computed from generator.gpu_memory_utilization and the other roles on the GPU",
    "kv_cache_memory_bytes": "it is generator.kv_cache_bytes",
    "disable_log_stats": _OF_THE_RUN,
    "weight_transfer_config": _OF_THE_RUN,
    "runner": "generators complete texts",
    "convert": "generators complete texts",
    "mm_encoder_only": "generators complete texts",
    "generation_config": "a model's own sampling defaults would change the sampled distribution",
    "override_generation_config": "a model's own sampling defaults would change the sampled distribution",
    "logprobs_mode": _LOGPROBS,
    "logits_processors": _LOGPROBS,
    "watermark_config": _LOGPROBS,
    "diffusion_config": _LOGPROBS,
    "scheduler_cls": _VERSIONS,
    "speculative_config": _DRAFT,
    "spec_method": _DRAFT,
    "spec_model": _DRAFT,
    "spec_tokens": _DRAFT,
    "enable_lora": _WEIGHTS,
    "default_mm_loras": _WEIGHTS,
    "enable_sleep_mode": "the engine runs all the time",
    "worker_cls": _IN_PROCESS,
    "worker_extension_cls": _IN_PROCESS,
    "distributed_executor_backend": "it follows from generator.tensor_parallel",
    "tensor_parallel_size": "it is generator.tensor_parallel",
    "pipeline_parallel_size": _PARALLEL,
    "prefill_context_parallel_size": _PARALLEL,
    "decode_context_parallel_size": _PARALLEL,
    "enable_expert_parallel": _PARALLEL,
    "nnodes": _IN_PROCESS,
    "node_rank": _IN_PROCESS,
    "enable_elastic_ep": _IN_PROCESS,
    "enable_eplb": _IN_PROCESS,
    "kv_transfer_config": _KEYS_AND_VALUES,
    "kv_offloading_size": _KEYS_AND_VALUES,
    "kv_offloading_backend": _KEYS_AND_VALUES,
    "device_ids": "the run gives each generator its GPUs",
}
ENGINE_REFUSED_PREFIXES = {
    "data_parallel_": "the replicas of a run are its generators (launch.generators)",
    "offload_": _PREFETCH,
    "_": "it is none of vLLM's public options",
}

TRANSFORMERS_OPTIONS = ("max_model_len", "max_num_batched_tokens")
"""Options in `generator.engine_options` of the engine "transformers"."""

_KEPT = "the log-prob of each sampled token is all that is kept"
_TEXT = "the engine makes text only to find generator.stop in it"
SAMPLING_REFUSED = {
    "n": "it is eval.samples",
    "max_tokens": "it is generator.max_new_tokens",
    "seed": "it follows from seed",
    "logprobs": _KEPT,
    "prompt_logprobs": _KEPT,
    "logprob_token_ids": _KEPT,
    "flat_logprobs": _KEPT,
    "stop": "it is generator.stop",
    "min_tokens": "it is generator.min_new_tokens",
    "include_stop_str_in_output": _TEXT,
    "detokenize": _TEXT,
    "skip_special_tokens": _TEXT,
    "output_kind": _OF_THE_RUN,
    "skip_clone": _OF_THE_RUN,
}

TEMPLATE_REFUSED = {
    **dict.fromkeys(("conversation", "messages", "tools", "documents"), "it is part of a row"),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message"), "the last message of a chat decides it"),
    **dict.fromkeys(("tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask"), _OF_THE_RUN),
    **dict.fromkeys(("padding", "truncation", "max_length", "tokenizer_kwargs"), "it is data.too_long"),
    "chat_template": "put a chat_template.jinja into the model's folder",
}
"""Arguments of `apply_chat_template` that are no variables of a template."""

DEEPSPEED_REFUSED = {
    "train_batch_size": "the learner forms its batches",
    "train_micro_batch_size_per_gpu": "it is learner.tokens_per_microbatch",
    "gradient_accumulation_steps": "the learner marks the last micro-batch of an update",
    "gradient_clipping": "it is learner.max_grad_norm",
    "zero_allow_untested_optimizer": _OF_THE_RUN,
    "zero_optimization.stage": "it is learner.zero_stage",
    "zero_force_ds_cpu_optimizer": _OF_THE_RUN,
    "zero_optimization.offload_optimizer": "it is learner.offload",
    "zero_optimization.offload_param": "it is learner.offload",
    "zero_optimization.cpu_offload": "it is learner.offload",
    "zero_optimization.cpu_offload_param": "it is learner.offload",
    "zero_optimization.cpu_offload_use_pin_memory": "it is learner.offload",
    "optimizer": "it is learner.optimizer with learner.lr and learner.optimizer_options",
    "scheduler": "it is learner.lr_schedule",
    "bf16": "it is model.dtype",
    "bfloat16": "it is model.dtype",
    "fp16": "it is model.dtype",
    "amp": "it is model.dtype",
    "torch_autocast": "it is model.dtype",
    "data_types": "gradients add up in float32",
    "pipeline": "every learner rank holds all layers",
    "tensor_parallel": "every learner rank holds all layers",
    "sequence_parallel_size": "it is learner.sequence_parallel",
    "checkpoint": "checkpoints are the learner's own",
    "data_efficiency": "the replay queue gives the data",
    "curriculum_learning": "the replay queue gives the data",
}


def check_engine_options(options: Mapping[str, Any], engine: str) -> None:
    """Raises ValueError naming the first option of the engine that a config cannot set, and why."""
    for name in options:
        if reason := _refusal(name, engine):
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


def _refusal(name: str, engine: str) -> str | None:
    """Why the engine cannot have the option; None if it can."""
    if engine == "vllm":
        by_prefix = (why for prefix, why in ENGINE_REFUSED_PREFIXES.items() if name.startswith(prefix))
        return ENGINE_REFUSED.get(name) or next(by_prefix, None)
    if engine == "transformers" and name not in TRANSFORMERS_OPTIONS:
        return f"it is none of those of the engine transformers, {' and '.join(TRANSFORMERS_OPTIONS)}"
    return None


def check_sampling(options: Any) -> None:
    """Raises ValueError naming the first of vLLM's sampling parameters that a config cannot set, and why."""
    for name in options if isinstance(options, Mapping) else ():
        if reason := SAMPLING_REFUSED.get(name):
            raise ValueError(f"{name} = {options[name]!r}: cannot be set here: {reason}")


def check_template_options(options: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first option of the chat template that is none, and why."""
    for name, value in options.items():
        if reason := TEMPLATE_REFUSED.get(name):
            raise ValueError(f"{name} = {value!r}: is no option of a chat template: {reason}")


def check_deepspeed_options(options: Mapping[str, Any], prefix: str = "") -> None:
    """Raises ValueError naming the first of DeepSpeed's settings that a config cannot set, and why."""
    for name, value in options.items():
        dotted = prefix + name
        if reason := DEEPSPEED_REFUSED.get(dotted):
            raise ValueError(f"deepspeed_options.{dotted} = {value!r}: cannot be set here: {reason}")
        if isinstance(value, Mapping):
            check_deepspeed_options(value, f"{dotted}.")


def merged(settings: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with options over them; tables within are merged, too."""
    result = dict(settings)
    for name, value in options.items():
        inner = result.get(name)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            result[name] = merged(inner, value)
        else:
            result[name] = value
    return result
