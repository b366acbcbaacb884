"""Computes the GPU memory of generators and of the reward model.

The formulas are derived from the sources of vLLM 0.32 and this project. Varying quantities count with their largest
value.
"""

from __future__ import annotations

from asyncrl.config import Config
from asyncrl.generator.transformers_backend.setup import STEP_TOKENS
from asyncrl.generator.vllm_backend.setup import LORA_RANKS, uses_adapter
from asyncrl.launch.resources.memory import GIB, PROCESS_BYTES, Parts, item_bytes, longest_tokens
from asyncrl.launch.resources.shape import Shape

ENGINE_STEP_TOKENS = 16384
"""Tokens of one step of the engine: the largest default of vLLM's `LLM`, which `build_engine` takes."""
CPU_STEP_TOKENS = 4096
"""The same on a CPU."""
GRAPH_BYTES = 2 * GIB
"""CUDA graphs and workspaces of an engine."""
STAGING_MARGIN_BYTES = GIB
"""NCCL's channels between learner and generators, and the allocator's rounding."""


STAGING_BUCKET_BYTES = 64 << 20
"""Size of the buckets in which weights are sent (`weights.buckets.BUCKET_BYTES`); a larger matrix has one of its own,
except for those of the vocabulary."""


def engine_parts(config: Config, shape: Shape, *, on_gpu: bool = True) -> Parts:
    """Returns the memory of an engine on each of its devices, with the smallest key-value cache that it can start
    with. On a CPU vLLM has a second copy of all matrices, packed for its products."""
    size, parallel = item_bytes(config.model.dtype), config.generator.tensor_parallel
    window = config.generator.max_model_tokens or shape.window or longest_tokens(config)
    options = config.generator.engine_options
    given = options.get("max_num_batched_tokens")
    default = ENGINE_STEP_TOKENS if on_gpu else CPU_STEP_TOKENS
    is_eager = config.generator.engine == "transformers"
    if is_eager:
        default = STEP_TOKENS["cuda" if on_gpu else "cpu"]
    step_tokens = given if isinstance(given, int) else default
    sequences = config.generator.max_running_groups * config.generator.group_size
    cache, of = cache_bytes(config, shape, window), f"keys and values of {window} tokens"
    if config.generator.kv_cache_bytes:
        cache, of = config.generator.kv_cache_bytes // parallel, "key-value cache"
    matrices = shape.layers * shape.layer + 2 * shape.vocabulary * shape.hidden
    step = 2 * shape.intermediate // parallel + 6 * shape.hidden
    return {
        "weights": size * shape.parameters // parallel,
        "packed weights": 0 if on_gpu or is_eager else size * matrices // parallel,
        f"a step of {step_tokens} tokens": step_tokens * size * step,
        f"logits of {sequences} sequences": sequences * (5 if is_eager else 3) * 4 * shape.vocabulary,
        "adapter": _adapter_bytes(config, shape),
        "CUDA graphs": GRAPH_BYTES if on_gpu and not is_eager else 0,
        of: cache,
    }


def cache_bytes(config: Config, shape: Shape, tokens: int) -> int:
    """Returns the memory of the keys and values of `tokens` tokens on each device of an engine. With more devices than
    key-value heads each device has one head."""
    heads = -(-shape.key_value_heads // config.generator.tensor_parallel)
    head_size = shape.key_value // shape.key_value_heads
    return tokens * 2 * shape.layers * heads * head_size * item_bytes(config.model.dtype)


def staging_parts(config: Config, shape: Shape, *, on_gpu: bool) -> Parts:
    """Returns the GPU memory of a generator in addition to its engine: with NCCL the complete next version of the
    weights, or two buckets of them, with ipc two buckets, otherwise, and where adapters are merged, one tensor at a
    time from host memory. Adapters are staged alone."""
    size, weights, lora = item_bytes(config.model.dtype), config.weights, config.learner.lora
    if lora.rank:
        one = size * shape.vocabulary * shape.hidden
        staging = size * shape.adapters + (one if lora.load == "merged" else 0)
    elif not on_gpu:
        staging = size * shape.vocabulary * shape.hidden
    elif config.hands_over or weights.staging in ("host", "buckets") or config.generator.tensor_parallel > 1:
        staging = 2 * max(STAGING_BUCKET_BYTES, size * shape.intermediate * shape.hidden)
    else:
        staging = size * shape.parameters
    return {"staged weights": staging, "process": STAGING_MARGIN_BYTES}


def engine_host_parts(config: Config, shape: Shape) -> Parts:
    """Returns what a generator keeps in host memory: the base weights that adapters are merged into."""
    lora = config.learner.lora
    is_merged = lora.rank and lora.load == "merged"
    return {"base weights": item_bytes(config.model.dtype) * shape.parameters} if is_merged else {}


def _adapter_bytes(config: Config, shape: Shape) -> int:
    """Returns the memory of an adapter that is not merged; vLLM makes room for the next larger of its ranks, and keeps
    the matrices as they came."""
    lora, size = config.learner.lora, item_bytes(config.model.dtype)
    if not uses_adapter(config):
        return 0
    if config.generator.engine == "transformers":
        return size * shape.adapters
    room = next((rank for rank in LORA_RANKS if rank >= lora.rank), lora.rank)
    return size * (shape.adapters + shape.adapters * room // lora.rank)


def reward_model_parts(shape: Shape, *, dtype: str, tokens: int) -> Parts:
    """Returns the memory of the reward model's process with batches of `tokens` tokens."""
    size = item_bytes(dtype)
    return {
        "weights": size * shape.parameters,
        f"activations of {tokens} tokens": tokens * size * (3 * shape.intermediate + 8 * shape.hidden),
        "process": PROCESS_BYTES,
    }
