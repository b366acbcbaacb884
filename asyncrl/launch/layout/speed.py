"""Tokens per second of a layout by roofline, with the constants of `asyncrl.plan.hardware`; nothing is measured."""

from __future__ import annotations

from asyncrl.config.config import Config
from asyncrl.launch.layout.cells import Generation, Training
from asyncrl.launch.memory import Shape, item_bytes, longest_tokens
from asyncrl.plan.hardware import Gpu, Job, ModelShape, generation_rate

RECOMPUTED_FLOPS = 2
"""FLOPs a token and weight of the second forward pass with checkpointing."""
MEAN_LENGTH = 0.5
"""Mean length of a completion, of the longest."""


def generated_per_s(config: Config, shape: Shape, gpu: Gpu, generation: Generation, fitting_sequences: int) -> float:
    """Returns the tokens that all engines generate per second and that are trained later. An engine decodes at once
    what fits its cache, what it may take, and what admission allows, of whose batches one is being trained."""
    model, job = _model(shape), _job(config)
    of_engine = generation.groups * config.generator.group_size
    batch = config.replay.groups_per_step * config.generator.group_size
    admitted = max(1, config.replay.max_staleness) * batch / generation.engines
    sequences = min(of_engine, fitting_sequences, admitted)
    parallel = generation.tensor_parallel
    return generation.engines * parallel * generation_rate(model, gpu, job, tp=parallel, sequences=sequences)


def trained_per_s(config: Config, shape: Shape, gpu: Gpu, training: Training) -> float:
    """Returns the tokens that all learner ranks train per second. With ZeRO stage 2 ranks exchange the gradients of
    each micro-batch, and with stage 3 they gather the weights twice. Ranks that share sequences exchange queries, keys,
    values and outputs of their part in each pass; nothing overlaps."""
    model = _model(shape)
    flops = gpu.train_flops if training.checkpointing else gpu.train_flops - RECOMPUTED_FLOPS
    mfu = gpu.moe_mfu if model.is_moe else gpu.dense_mfu
    compute_s = training.tokens * flops * shape.active / (gpu.flops * mfu)
    gathered = 2 * item_bytes(config.model.dtype) if training.stage == 3 else 0
    exchanged = gathered + (4 if training.stage >= 2 else 0)
    exchange_s = exchanged * shape.trained / gpu.reduce_bytes_per_s if training.ranks > 1 else 0.0
    if training.parallel > 1:
        passes = 3 if training.checkpointing else 2
        sent = passes * shape.layers * 2 * (shape.query + shape.key_value) * item_bytes(config.model.dtype)
        exchange_s += sent * training.tokens / training.parallel / gpu.reduce_bytes_per_s
    return training.ranks / training.parallel * training.tokens / (compute_s / training.parallel + exchange_s)


def _job(config: Config) -> Job:
    prompt = config.data.max_prompt_tokens or 0
    answer = MEAN_LENGTH * (longest_tokens(config) - prompt)
    return Job(answer_tokens=max(answer, 1), prompt_tokens=prompt)


def _model(shape: Shape) -> ModelShape:
    return ModelShape(
        parameters=shape.parameters, active=shape.active, layers=shape.layers,
        hidden=shape.hidden, kv_heads=shape.key_value_heads, head_size=shape.key_value // shape.key_value_heads,
    )  # fmt: skip
