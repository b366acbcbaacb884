"""Estimates the GPU memory of a role from the shape of its model.

The formulas are derived from the sources of DeepSpeed 0.19, vLLM 0.32 and this project; none was measured on a GPU.
Varying quantities count with their largest value.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config import Config

if TYPE_CHECKING:
    from asyncrl.learner.model.memory_trace import Trace

GIB = 1 << 30
PROCESS_BYTES = 2 * GIB
"""CUDA context, workspaces of cuBLAS and cuDNN, NCCL's channels, and fragmentation of the allocator."""
BUCKET_ELEMENTS = 50_000_000
"""Gradients that the ranks exchange at a time from ZeRO stage 1 on, in float32 (`learner.model.engine`)."""
PLAIN_BUCKET_ELEMENTS = 500_000_000
"""The same without ZeRO: DeepSpeed's default."""
LIVE_ELEMENTS = 1_000_000_000
"""Number of weights that ZeRO stage 3 keeps gathered (DeepSpeed's `stage3_max_live_parameters`)."""
ENGINE_STEP_TOKENS = 16384
"""Tokens of one step of the engine: the largest default of vLLM's `LLM`, which `build_engine` takes."""
GRAPH_BYTES = 2 * GIB
"""CUDA graphs and workspaces of an engine."""
STAGING_MARGIN_BYTES = GIB
"""NCCL's channels between learner and generators, and the allocator's rounding."""

Parts = dict[str, int]
"""Bytes by use of the memory."""

NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
}

EXPERTS = ".experts."
"""In the names of parameters of which a token uses those of a few experts."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder model."""

    folder: str
    """The folder with its `config.json`."""
    parameters: int
    """Parameters of the complete model, tied ones once."""
    active: int
    """Parameters that one token uses."""
    layers: int
    hidden: int
    intermediate: int
    """Feed-forward size for one token; in a mixture of experts, the sum over the experts of the token."""
    query: int
    """Heads times head size."""
    key_value: int
    """Key-value heads times head size."""
    heads: int
    key_value_heads: int
    vocabulary: int
    window: int | None

    @classmethod
    def of(cls, settings: dict[str, Any], folder: str, sizes: dict[str, int]) -> Shape | None:
        """Returns the shape of a model with these `config.json` and numbers of elements by parameter; None if sizes are
        missing in the former."""
        settings = settings.get("text_config") or settings
        found = {
            key: number
            for key, names in NAMES.items()
            if isinstance(number := next((settings[n] for n in names if n in settings), None), int)
        }
        if found.keys() != NAMES.keys():
            return None
        head = settings.get("head_dim") or found["hidden"] // found["heads"]
        dense = settings.get("intermediate_size") or settings.get("ffn_dim") or settings.get("n_inner")
        each = settings.get("moe_intermediate_size") or dense or 4 * found["hidden"]
        experts = settings.get("num_experts_per_tok")
        share = (
            experts / (settings.get("num_experts") or settings.get("num_local_experts") or experts) if experts else 1
        )
        key_value_heads = settings.get("num_key_value_heads") or found["heads"]
        return cls(
            folder=folder,
            parameters=sum(sizes.values()),
            active=round(sum(n * share if EXPERTS in name else n for name, n in sizes.items())),
            layers=found["layers"],
            hidden=found["hidden"],
            intermediate=experts * each if experts else dense or 4 * found["hidden"],
            query=found["heads"] * head,
            key_value=key_value_heads * head,
            heads=found["heads"],
            key_value_heads=key_value_heads,
            vocabulary=found["vocabulary"],
            window=settings.get("max_position_embeddings"),
        )

    @classmethod
    def read(cls, folder: str, *, trust_remote_code: bool = False, values: bool = False) -> Shape | None:
        """Returns the shape of the model in a folder, from its `config.json` alone; with `values`, of a critic with its
        layers. Raises ConfigError if transformers cannot build the model."""
        settings = json.loads((Path(folder) / "config.json").read_text())
        model = _empty(folder, trust_remote_code, values=values)
        return cls.of(settings, folder, {name: parameter.numel() for name, parameter in model.named_parameters()})


def _empty(folder: str, trust_remote_code: bool, *, values: bool, **options: Any) -> Any:
    from asyncrl.learner.model.memory_trace import empty_model, read_model_config  # imports torch

    model_config = read_model_config(folder, trust_remote_code=trust_remote_code)
    return empty_model(model_config, values=values, trust_remote_code=trust_remote_code, **options)


def item_bytes(dtype: str) -> int:
    """Returns the size of one element in bytes."""
    return {"float32": 4, "bfloat16": 2}[dtype]


def trained_parts(config: Config, shape: Shape, ranks: int, *, of: str = "", on_gpu: bool = True) -> Parts:
    """Returns the memory of one rank for a trained model: weights, optimizer and gradients, partitioned by ZeRO."""
    size, total, stage = item_bytes(config.model.dtype), shape.parameters, _stage(config)
    sharded = -(-total // ranks)
    parts = {
        "weights": size * (sharded if stage == 3 else total),
        "float32 copy of the weights": 4 * sharded if stage else 0,
        "optimizer states": optimizer_bytes(config, shape, sharded if stage else total),
        "gradients": 4 * (sharded if stage >= 2 else total),
        "bucket of gradients": _bucket_bytes(total, on_gpu=on_gpu) if stage == 3 else 0,
    }
    return {f"{of}{name}": num_bytes for name, num_bytes in parts.items()}


def _bucket_bytes(parameters: int, *, on_gpu: bool) -> int:
    """Returns the memory of the buffer in which gradients are collected. On a CPU only the used pages count."""
    return 4 * (BUCKET_ELEMENTS if on_gpu else min(BUCKET_ELEMENTS, parameters))


def optimizer_bytes(config: Config, shape: Shape, parameters: int) -> int:
    """Returns the bytes of the optimizer's states for `parameters` of the model's parameters: two numbers for each
    with AdamW; with Muon one for each in the layers; with Adafactor one for each row and column of a matrix."""
    vectors = shape.hidden * (4 * shape.layers + 1)
    if config.learner.optimizer == "muon":
        ends = min(2 * shape.vocabulary * shape.hidden + vectors, parameters)
        return 4 * (parameters - ends) + 8 * ends
    if config.learner.optimizer == "adafactor":
        return 4 * (2 * parameters // min(shape.hidden, shape.key_value) + vectors)
    return 8 * parameters


def learner_parts(
    config: Config,
    shape: Shape,
    *,
    reference: Shape | None,
    critic: Shape | None,
    packs: bool,
    on_gpu: bool = True,
) -> Parts:
    """Returns the memory of one learner rank. `critic` is the critic trained in this process, if any; `packs` is True
    for the rank that sends weights."""
    ranks, size = config.launch.learners, item_bytes(config.model.dtype)
    parts = trained_parts(config, shape, ranks, on_gpu=on_gpu)
    passes = _passes(config, shape, ranks, on_gpu=on_gpu)
    if critic is not None:
        parts |= trained_parts(config, critic, ranks, of="critic: ", on_gpu=on_gpu)
        others = _passes(config, critic, ranks, values=True, on_gpu=on_gpu)
        passes = max(passes, others, key=lambda one: sum(one.values()))
    if reference is not None:
        count = -(-reference.parameters // ranks) if config.learner.zero_stage == 3 else reference.parameters
        parts["reference"] = size * count
    if packs:
        parts["weights to send"] = size * shape.parameters
    return parts | passes


def critic_parts(config: Config, shape: Shape) -> Parts:
    """Returns the memory of one critic rank in a separate process."""
    ranks = config.critic.ranks
    return trained_parts(config, shape, ranks) | _passes(config, shape, ranks, values=True)


def _passes(config: Config, shape: Shape, ranks: int, *, values: bool = False, on_gpu: bool = True) -> Parts:
    """Returns the transient memory of a step: a micro-batch, or the optimizer's copy of the gradients if larger."""
    tokens = max(config.learner.tokens_per_microbatch, longest_tokens(config))
    size, stage = item_bytes(config.model.dtype), _stage(config)
    trace = trace_micro_batch(config, shape, tokens, values=values, on_gpu=on_gpu)
    passes = {
        f"activations of {tokens} tokens": trace.forward_bytes,
        "output layer and backward pass": trace.peak_bytes - trace.forward_bytes,
        "exchange of gradients": _exchange_bytes(trace.peak_bytes, shape.parameters, stage, on_gpu=on_gpu),
    }
    sharded = -(-shape.parameters // ranks)
    copies = 4 * (min(sharded, LIVE_ELEMENTS) if stage == 3 else sharded) if stage else 0
    if copies > sum(passes.values()):
        passes = {"gradients in the optimizer": copies}
    gathered = size * min(shape.parameters, LIVE_ELEMENTS) if stage == 3 and ranks > 1 else 0
    return passes | {"gathered weights": gathered, "process": PROCESS_BYTES if on_gpu else 0}


def _exchange_bytes(passes: int, parameters: int, stage: int, *, on_gpu: bool) -> int:
    """Returns what the exchange of gradients adds to the peak `passes` of a forward and backward pass. The first
    exchange is when a bucket is full; a part of the activations is free by then, and with small models all of them."""
    full = min(BUCKET_ELEMENTS, parameters)
    if stage == 0:
        return max(0, 4 * min(PLAIN_BUCKET_ELEMENTS, parameters) - passes)
    copies = 8 * full if stage == 3 else 4 * full + _bucket_bytes(parameters, on_gpu=on_gpu)
    return max(0, copies - round(passes * full / parameters))


def trace_micro_batch(config: Config, shape: Shape, tokens: int, *, values: bool, on_gpu: bool) -> Trace:
    """Returns the measured memory of a micro-batch (`learner.model.memory_trace`); for the critic with `values`."""
    return _traced(
        shape.folder,
        config.model.trust_remote_code,
        config.model.dtype,
        config.learner.gradient_checkpointing,
        config.algorithm.entropy_coef > 0,
        (tokens, longest_tokens(config)),
        values=values,
        on_gpu=on_gpu,
        exchanged=_stage(config) > 0,
    )


@functools.cache
def _traced(
    folder: str,
    trust_remote_code: bool,
    dtype: str,
    checkpointing: bool,
    entropy_gradient: bool,
    tokens: tuple[int, int],
    *,
    values: bool,
    on_gpu: bool,
    exchanged: bool,
) -> Trace:
    from asyncrl.learner.model.memory_trace import trace, typical_micro_batch  # imports torch

    model = _empty(folder, trust_remote_code, values=values, dtype=dtype, checkpointing=checkpointing)
    micro = typical_micro_batch(*tokens)
    return trace(model, micro, entropy_gradient=entropy_gradient, on_gpu=on_gpu, exchanged=exchanged)


def _stage(config: Config) -> int:
    """Returns DeepSpeed's ZeRO stage: in bfloat16 at least 1."""
    return max(config.learner.zero_stage, 1) if item_bytes(config.model.dtype) == 2 else config.learner.zero_stage


def longest_tokens(config: Config) -> int:
    """Returns the maximum length of a trajectory that the config allows, in tokens."""
    longest = config.generator.max_new_tokens + (config.data.max_prompt_tokens or 0)
    return min(longest, config.generator.max_model_tokens or longest)


def engine_parts(config: Config, shape: Shape) -> Parts:
    """Returns the memory of one vLLM engine with the smallest key-value cache that it can start with."""
    size = item_bytes(config.model.dtype)
    window = config.generator.max_model_tokens or shape.window or longest_tokens(config)
    options = config.generator.engine_options
    given = options.get("max_num_batched_tokens")
    default = 2 * ENGINE_STEP_TOKENS if options.get("performance_mode") == "throughput" else ENGINE_STEP_TOKENS
    step_tokens = given if isinstance(given, int) else default
    sequences = config.generator.max_running_groups * config.generator.group_size
    cache, of = cache_bytes(config, shape, window), f"keys and values of {window} tokens"
    if config.generator.kv_cache_bytes:
        cache, of = config.generator.kv_cache_bytes, "key-value cache"
    return {
        "weights": size * shape.parameters,
        f"a step of {step_tokens} tokens": step_tokens * size * (2 * shape.intermediate + 6 * shape.hidden),
        f"logits of {sequences} sequences": sequences * 3 * 4 * shape.vocabulary,
        "CUDA graphs": GRAPH_BYTES,
        of: cache,
    }


def cache_bytes(config: Config, shape: Shape, tokens: int) -> int:
    """Returns the memory of the keys and values of `tokens` tokens in an engine."""
    return tokens * 2 * shape.layers * shape.key_value * item_bytes(config.model.dtype)


def staging_parts(config: Config, shape: Shape, *, on_gpu: bool) -> Parts:
    """Returns the GPU memory of a generator in addition to its engine: the complete next version of the weights with
    NCCL, otherwise one tensor at a time from host memory."""
    size = item_bytes(config.model.dtype)
    staging = size * shape.parameters if on_gpu else size * shape.vocabulary * shape.hidden
    return {"staged weights": staging, "process": STAGING_MARGIN_BYTES}


def reward_model_parts(shape: Shape, *, dtype: str, tokens: int) -> Parts:
    """Returns the memory of the reward model's process with batches of `tokens` tokens."""
    size = item_bytes(dtype)
    return {
        "weights": size * shape.parameters,
        f"activations of {tokens} tokens": tokens * size * (3 * shape.intermediate + 8 * shape.hidden),
        "process": PROCESS_BYTES,
    }
