"""Computes the GPU memory of learner and critic ranks.

Activations are measured on the meta device (`learner.model.memory_trace`); what DeepSpeed keeps follows from the
sources of its version 0.19. `tests/learner/test_predicted_memory.py` compares the sums with measured memory on a CPU.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from asyncrl.config import Config
from asyncrl.launch.resources.shape import Shape, empty_model_of

if TYPE_CHECKING:
    from asyncrl.learner.model.memory_trace import Trace

GIB = 1 << 30
PROCESS_BYTES = 2 * GIB
"""CUDA context, workspaces of cuBLAS and cuDNN, NCCL's channels, and fragmentation of the allocator."""
BUCKET_ELEMENTS = 50_000_000
"""Gradients that the ranks exchange at a time from ZeRO stage 1 on (`learner.model.settings`)."""
PLAIN_BUCKET_ELEMENTS = 500_000_000
"""The same without ZeRO: DeepSpeed's default."""
STEP_ELEMENTS = 1_000_000_000
"""Weights that the optimizer updates at a time with ZeRO stage 3: DeepSpeed's default."""
Parts = dict[str, int]
"""Bytes by use of the memory."""


def item_bytes(dtype: str) -> int:
    """Returns the size of one element in bytes."""
    return {"float32": 4, "bfloat16": 2}[dtype]


def trained_parts(config: Config, shape: Shape, ranks: int, *, of: str = "", on_gpu: bool = True) -> Parts:
    """Returns the memory of one rank for a trained model: weights, optimizer and gradients, partitioned by ZeRO,
    without those of `host_parts`."""
    parts = _states(config, shape, ranks, in_host=False)
    if _stage(config) == 3:
        parts["bucket of gradients"] = _bucket_bytes(shape.trained, on_gpu=on_gpu)
    return {f"{of}{name}": num_bytes for name, num_bytes in parts.items()}


def host_parts(config: Config, shape: Shape, ranks: int) -> Parts:
    """Returns what one rank keeps in host memory of a trained model, by `learner.offload`."""
    return _states(config, shape, ranks, in_host=True)


def _states(config: Config, shape: Shape, ranks: int, *, in_host: bool) -> Parts:
    size, total, stage = item_bytes(config.model.dtype), shape.trained, _stage(config)
    sharded = -(-total // ranks)
    weights = shape.parameters + shape.adapters
    parts = {
        "weights": size * (-(-weights // ranks) if stage == 3 else weights),
        "float32 copy of the weights": 4 * sharded if stage else 0,
        "optimizer states": optimizer_bytes(config, shape, sharded if stage else total),
        "gradients": 4 * (sharded if stage >= 2 else total),
    }
    offload = config.learner.offload
    moved = {"none": (), "optimizer": tuple(parts)[1:], "all": tuple(parts)}[offload]
    return {name: num_bytes for name, num_bytes in parts.items() if (name in moved) == in_host}


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
    sends: bool,
    on_gpu: bool = True,
) -> Parts:
    """Returns the memory of one learner rank. `critic` is the critic trained in this process, if any; `sends` is True
    if the rank sends its share of the weights from the GPU: a copy of it, unless `weights.staging` is buckets. With
    adapters the reference policy is the policy without them."""
    ranks, size = config.launch.learners, item_bytes(config.model.dtype)
    parts = trained_parts(config, shape, ranks, on_gpu=on_gpu)
    passes = _passes(config, shape, ranks, on_gpu=on_gpu)
    if critic is not None:
        parts |= trained_parts(config, critic, ranks, of="critic: ", on_gpu=on_gpu)
        others = _passes(config, critic, ranks, values=True, on_gpu=on_gpu)
        passes = max(passes, others, key=lambda one: sum(one.values()))
    if reference is not None and not shape.adapters:
        count = -(-reference.parameters // ranks) if config.learner.zero_stage == 3 else reference.parameters
        parts["reference"] = size * count
    if sends and config.weights.staging != "buckets":
        parts["weights to send"] = size * -(-shape.trained // ranks)
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
        "exchange of gradients": _exchange_bytes(config, trace, shape.trained, ranks, on_gpu=on_gpu),
    }
    sharded = -(-shape.trained // ranks)
    copies = 4 * (min(sharded, STEP_ELEMENTS) if stage == 3 else sharded) if stage else 0
    if config.learner.offload != "none":
        copies = 0
    if copies > sum(passes.values()):
        passes = {"gradients in the optimizer": copies}
    gathered = 0
    if stage == 3 and (ranks > 1 or config.learner.offload == "all"):
        # Two layers, and the output layer or the embeddings.
        gathered = size * min(shape.parameters, 2 * shape.layer + shape.vocabulary * shape.hidden)
    return passes | {"gathered weights": gathered, "process": PROCESS_BYTES if on_gpu else 0}


def _exchange_bytes(config: Config, trace: Trace, parameters: int, ranks: int, *, on_gpu: bool) -> int:
    """Returns what the exchange of gradients adds to the peak of a forward and backward pass. The first exchange is
    when a bucket is full: then a part of the activations is free, and with small models all of them."""
    full, stage, passes = min(BUCKET_ELEMENTS, parameters), _stage(config), trace.peak_bytes
    if stage == 0:
        return max(0, 4 * min(PLAIN_BUCKET_ELEMENTS, parameters) - passes)
    buckets, done = _bucket_bytes(parameters, on_gpu=on_gpu), full / parameters
    if stage == 3:
        return max(0, 8 * full - round(passes * done))
    # On a GPU the exchange overlaps with the backward pass, for which there are two buckets.
    buckets *= 2 if on_gpu else 1
    if config.learner.offload != "none":
        return max(0, 4 * full + buckets - round(passes * done))
    if stage == 2 and item_bytes(config.model.dtype) == 2:
        # Buckets in bfloat16, each of which is added to the sum of the gradients after a copy in float32.
        copies = 4 * full + buckets // 2
    else:
        # Memory for all reduced gradients of the rank, in addition to the sum of those of earlier micro-batches.
        copies = 4 * -(-parameters // ranks) + buckets
    layer = trace.layers_bytes - trace.forward_bytes
    left = 0 if done == 1 else round(trace.forward_bytes * (1 - done)) + layer
    return max(0, copies + left - passes)


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
        sequence_parallel=config.learner.sequence_parallel,
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
    sequence_parallel: int,
) -> Trace:
    from asyncrl.learner.model.memory_trace import trace, typical_micro_batch  # imports torch

    model = empty_model_of(folder, trust_remote_code, values=values, dtype=dtype, checkpointing=checkpointing)
    return trace(
        model,
        typical_micro_batch(*tokens),
        entropy_gradient=entropy_gradient,
        on_gpu=on_gpu,
        exchanged=exchanged,
        sequence_parallel=sequence_parallel,
    )


def _stage(config: Config) -> int:
    """Returns DeepSpeed's ZeRO stage: in bfloat16 at least 1."""
    return max(config.learner.zero_stage, 1) if item_bytes(config.model.dtype) == 2 else config.learner.zero_stage


def longest_tokens(config: Config) -> int:
    """Returns the maximum length of a trajectory that the config allows, in tokens."""
    longest = config.generator.max_new_tokens + (config.data.max_prompt_tokens or 0)
    return min(longest, config.generator.max_model_tokens or longest)
