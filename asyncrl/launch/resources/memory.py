"""Estimates the GPU memory of a role from the shape of its model.

The formulas are derived from the sources of DeepSpeed 0.19, vLLM 0.32 and this project; none was measured on a GPU.
Varying quantities count with their largest value.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.generator.transformers_backend.setup import STEP_TOKENS
from asyncrl.util.files import read_tensor_descriptions

GIB = 1 << 30
PROCESS_BYTES = 2 * GIB
"""CUDA context, workspaces of cuBLAS and cuDNN, NCCL's channels, and fragmentation of the allocator."""
BUCKET_BYTES = 2 * 50_000_000 * 4
"""Two buckets of float32 gradients for the exchange between ranks."""
LIVE_ELEMENTS = 1_000_000_000
"""Number of weights that ZeRO stage 3 keeps gathered (DeepSpeed's `stage3_max_live_parameters`)."""
HEAD_BYTES = 3 * GIB
"""Logits of a chunk of tokens in the learner, with their copies."""
BUCKET_PADDING = 4 / 3
"""Upper bound of padded over actual tokens in the buckets of attention."""
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


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder model."""

    parameters: int
    """Parameters of the complete model, tied ones once."""
    layers: int
    hidden: int
    intermediate: int
    """Feed-forward size for one token; in a mixture of experts, the sum over the experts of the token."""
    query: int
    """Heads times head size."""
    key_value: int
    """Key-value heads times head size."""
    vocabulary: int
    window: int | None

    @classmethod
    def of(cls, settings: dict[str, Any], parameters: int) -> Shape | None:
        """Returns the shape in a model's `config.json`; None if the sizes are missing."""
        settings = settings.get("text_config") or settings
        found = {
            key: number
            for key, names in NAMES.items()
            if isinstance(number := next((settings[n] for n in names if n in settings), None), int)
        }
        if found.keys() != NAMES.keys():
            return None
        head = settings.get("head_dim") or found["hidden"] // found["heads"]
        experts, each = settings.get("num_experts_per_tok"), settings.get("moe_intermediate_size")
        dense = settings.get("intermediate_size") or settings.get("ffn_dim") or settings.get("n_inner")
        return cls(
            parameters=parameters,
            layers=found["layers"],
            hidden=found["hidden"],
            intermediate=experts * each if experts and each else dense or 4 * found["hidden"],
            query=found["heads"] * head,
            key_value=(settings.get("num_key_value_heads") or found["heads"]) * head,
            vocabulary=found["vocabulary"],
            window=settings.get("max_position_embeddings"),
        )

    @classmethod
    def read(cls, folder: str) -> Shape | None:
        """Returns the shape of the model in a folder, from its `config.json` and the headers of its safetensors files.
        Raises ConfigError for a file that is not complete."""
        settings = json.loads((Path(folder) / "config.json").read_text())
        headers = (read_tensor_descriptions(file) for file in sorted(Path(folder).glob("*.safetensors")))
        return cls.of(settings, sum(math.prod(tensor["shape"]) for header in headers for tensor in header.values()))


def item_bytes(dtype: str) -> int:
    """Returns the size of one element in bytes."""
    return {"float32": 4, "bfloat16": 2}[dtype]


def trained_parts(config: Config, shape: Shape, ranks: int, *, of: str = "") -> Parts:
    """Returns the memory of one rank for a trained model: weights, optimizer and gradients, partitioned by ZeRO."""
    size, total = item_bytes(config.model.dtype), shape.parameters
    sharded = -(-total // ranks)
    stage = max(config.learner.zero_stage, 1) if size == 2 else config.learner.zero_stage
    parts = {
        "weights": size * (sharded if stage == 3 else total),
        "float32 copy of the weights": 4 * sharded if size == 2 or stage in (1, 2) else 0,
        "optimizer states": optimizer_bytes(config, shape, sharded if stage else total),
        "gradients": 4 * (sharded if stage >= 2 else total),
        "buckets": BUCKET_BYTES if ranks > 1 or stage else 0,
    }
    return {f"{of}{name}": num_bytes for name, num_bytes in parts.items()}


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


def activation_bytes(config: Config, shape: Shape, tokens: int) -> int:
    """Returns the bytes of activations of a micro-batch of `tokens` tokens: those stored by the forward pass, and those
    added by the backward pass."""
    size = item_bytes(config.model.dtype)
    norms = 2 * shape.hidden * (4 + 2 * size)
    # In float32, attention on a GPU repeats keys and values for every head.
    key_value = shape.query if size == 4 else shape.key_value
    attention = size * (BUCKET_PADDING * 2 * (shape.query + key_value) + shape.query)
    layer = norms + attention + 4 * size * shape.intermediate
    kept = shape.layers * size * shape.hidden + layer if config.learner.gradient_checkpointing else shape.layers * layer
    ends = shape.hidden * (4 + 3 * size)
    backward = size * (2 * shape.intermediate + 4 * shape.hidden)
    return round(tokens * (kept + ends + backward))


def learner_parts(config: Config, shape: Shape, *, reference: Shape | None, critic: Shape | None, packs: bool) -> Parts:
    """Returns the memory of one learner rank. `critic` is the critic trained in this process, if any; `packs` is True
    for the rank that sends weights."""
    ranks, size = config.launch.learners, item_bytes(config.model.dtype)
    parts = trained_parts(config, shape, ranks)
    if critic is not None:
        parts |= trained_parts(config, critic, ranks, of="critic: ")
    if reference is not None:
        count = -(-reference.parameters // ranks) if config.learner.zero_stage == 3 else reference.parameters
        parts["reference"] = size * count
    if packs:
        parts["weights to send"] = size * shape.parameters
    return parts | _passes(config, shape, ranks)


def critic_parts(config: Config, shape: Shape) -> Parts:
    """Returns the memory of one critic rank in a separate process."""
    return trained_parts(config, shape, config.critic.ranks) | _passes(config, shape, config.critic.ranks)


def _passes(config: Config, shape: Shape, ranks: int) -> Parts:
    """Returns the transient memory of a step: micro-batches, or the optimizer's copy of the gradients if larger."""
    tokens = max(config.learner.tokens_per_microbatch, longest_tokens(config))
    size = item_bytes(config.model.dtype)
    passes = {
        f"activations of {tokens} tokens": activation_bytes(config, shape, tokens),
        "output layer": HEAD_BYTES + 4 * shape.vocabulary * shape.hidden,
    }
    sharded = -(-shape.parameters // ranks)
    copies = 4 * (min(sharded, LIVE_ELEMENTS) if config.learner.zero_stage == 3 else sharded)
    if copies > sum(passes.values()):
        passes = {"gradients in the optimizer": copies}
    gathered = size * min(shape.parameters, LIVE_ELEMENTS) if config.learner.zero_stage == 3 else 0
    return passes | {"gathered weights": gathered, "process": PROCESS_BYTES}


def longest_tokens(config: Config) -> int:
    """Returns the maximum length of a trajectory that the config allows, in tokens."""
    longest = config.generator.max_new_tokens + (config.data.max_prompt_tokens or 0)
    return min(longest, config.generator.max_model_tokens or longest)


def engine_parts(config: Config, shape: Shape) -> Parts:
    """Returns the memory of one engine with the smallest key-value cache that it can start with."""
    size = item_bytes(config.model.dtype)
    window = config.generator.max_model_tokens or shape.window or longest_tokens(config)
    options = config.generator.engine_options
    given = options.get("max_num_batched_tokens")
    default = 2 * ENGINE_STEP_TOKENS if options.get("performance_mode") == "throughput" else ENGINE_STEP_TOKENS
    is_eager = config.generator.engine == "transformers"
    if is_eager:
        default = STEP_TOKENS["cuda"]
    step_tokens = given if isinstance(given, int) else default
    sequences = config.generator.max_running_groups * config.generator.group_size
    cache = config.generator.kv_cache_bytes or window * 2 * shape.layers * shape.key_value * size
    return {
        "weights": size * shape.parameters,
        f"a step of {step_tokens} tokens": step_tokens * size * (2 * shape.intermediate + 6 * shape.hidden),
        f"logits of {sequences} sequences": sequences * (5 if is_eager else 3) * 4 * shape.vocabulary,
        "CUDA graphs": 0 if is_eager else GRAPH_BYTES,
        "key-value cache" if config.generator.kv_cache_bytes else f"keys and values of {window} tokens": cache,
    }


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
