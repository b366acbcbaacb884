"""Checks at the start, on the trained model itself, that it scores sequences in a packed row as it scores each of them
alone. The model's config does not reveal this."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.collate import make_batch
from asyncrl.learner.distributed import is_lost_rank
from asyncrl.learner.model.loading import HOW_TO_FIX, UNFIT
from asyncrl.learner.model.packed_attention import PACKED
from asyncrl.types import NO_VERSION, Group, Trajectory

TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Upper limit of the distance between a sequence's hidden states in a packed row and alone, relative to the norm of the
latter. Rounding causes 3e-6 in float32. In bfloat16 it causes 2^-8 per operation and 0.03 after the layers of most
models, and more if a router chooses another expert for one of the tokens. A leak between sequences causes 0.3 to 1.5 in
both dtypes."""
LENGTHS = (12, 9)
COMMON_TOKENS = 3
"""Length of the sequences' common prefix, which a packed row computes once."""
WINDOW = 4
"""Sliding windows during the check, so that the sequences are longer."""


def check_packing(model: PreTrainedModel, score: Callable[[MicroBatch], Any], device: torch.device, name: str) -> None:
    """Raises ConfigError unless `score`, which runs `model` on a micro-batch without gradient, computes the same hidden
    states for a packed row as the model's own attention for each sequence alone, and the same in training as in
    evaluation mode.

    `name` is the config's key and value of the model, for the error. Does not change the random state. Costs four
    forward passes of at most 21 tokens. All ranks that share the model's weights call it, and all get the same result.
    """
    together = _group([0, 1], model.config.get_text_config().vocab_size)
    what = f"{name}: a model of type {model.config.model_type}"
    training = model.training
    windows = _windows(model)
    try:
        for owner, _ in windows:
            owner.sliding_window = WINDOW
        packed = _hidden_states(model, score, together, device)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            trained = _hidden_states(model, score, together, device, training=True)
        model.set_attn_implementation("eager")
        try:
            alone = [_hidden_states(model, score, [one], device)[0] for one in together]
        finally:
            model.set_attn_implementation(PACKED)
            model.train(training)
    except (AsyncrlError, torch.OutOfMemoryError):
        raise
    except (*UNFIT, RuntimeError, ValueError) as error:
        if isinstance(error, RuntimeError) and is_lost_rank(error):
            raise
        raise ConfigError(
            f"{what} cannot be scored in packed rows ({type(error).__name__}: {error}); {HOW_TO_FIX}"
        ) from error
    finally:
        for owner, window in windows:
            owner.sliding_window = window
    tolerance = TOLERANCES[model.dtype]
    rounding = (
        f"of their norm, but rounding in {str(model.dtype).removeprefix('torch.')} explains at most {tolerance:g}"
    )
    difference = _difference(packed, alone)
    if not math.isfinite(difference):
        raise ConfigError(f"{name}: bad weights: {_not_finite(model)}; save or download the model again")
    if not difference <= tolerance:
        raise ConfigError(
            f"{what} computes sequences in a packed row differently from each sequence alone: hidden states differ by "
            f"{difference:.2g} {rounding}. Its layers mix tokens by more than attention, or use an attention that "
            f"cannot be replaced, or a sliding window that it is not told of; {HOW_TO_FIX}"
        )
    difference = _difference(trained, packed)
    if not difference <= tolerance:
        raise ConfigError(
            f"{what} computes differently in training and in evaluation: hidden states differ by {difference:.2g} "
            f"{rounding}. It has dropout or random routing that cannot be disabled, which the sampling policy does not "
            "have; use another model (docs/models.md has a table)"
        )


def _group(numbers: list[int], vocabulary: int) -> list[Trajectory]:
    """Returns trajectories whose tokens are spread over the vocabulary, with a common prefix."""
    trajectories: list[Trajectory] = []
    for number in numbers:
        index = np.arange(LENGTHS[number])
        index[COMMON_TOKENS:] += sum(LENGTHS[:number])
        action_mask = index > 0
        trajectories.append(
            Trajectory(
                tokens=((7919 * index * index + 104729 * index + 11) % vocabulary).astype(np.int32),
                action_mask=action_mask,
                behavior_logprobs=np.zeros(len(index), dtype=np.float32),
                versions=np.where(action_mask, 0, NO_VERSION).astype(np.int32),
                status="completed",
                reward=0.0,
            )
        )
    return trajectories


def _windows(model: PreTrainedModel) -> list[tuple[Any, int]]:
    """Returns the owners of sliding windows: the layers, which pass theirs to attention, and the configs, from which
    the model makes masks for its own attention."""
    configs = {id(config): config for part in model.modules() if (config := getattr(part, "config", None)) is not None}
    owners = [*model.modules(), *configs.values()]
    named = [(owner, getattr(owner, "sliding_window", None)) for owner in owners]
    return [(owner, window) for owner, window in named if isinstance(window, int) and window > 0]


def _not_finite(model: PreTrainedModel) -> str:
    for name, parameter in model.named_parameters():
        if not getattr(parameter, "ds_tensor", parameter).isfinite().all():
            return f"{name} has values that are not finite"
    return "hidden states are not finite"


def _difference(one: list[Tensor], other: list[Tensor]) -> float:
    """Returns the largest difference of two tensors at the same place, relative to the norm; NaN if one has NaN."""
    return float(torch.stack([(a - b).norm() / b.norm() for a, b in zip(one, other, strict=True)]).max())


def _hidden_states(
    model: PreTrainedModel,
    score: Callable[[MicroBatch], Any],
    trajectories: list[Trajectory],
    device: torch.device,
    *,
    training: bool = False,
) -> list[Tensor]:
    """Returns the last hidden states [length, size] of each trajectory in one packed row, float32 on the CPU."""
    group = Group(0, 0, 0, 0, "", 0, 0, trajectories)
    (micro,) = make_batch([group], tokens_per_microbatch=sum(LENGTHS)).micro_batches
    kept: list[Tensor] = []

    def set_mode(body: torch.nn.Module, _: Any) -> None:
        body.train(training)  # overrides the evaluation mode that `score` sets

    def keep(_: torch.nn.Module, __: Any, output: Any) -> None:
        kept.append(output.last_hidden_state.detach())

    body = model.base_model
    hooks = [body.register_forward_pre_hook(set_mode), body.register_forward_hook(keep)]
    try:
        score(micro.to(device))
    finally:
        for hook in hooks:
            hook.remove()
    row = kept[0].squeeze(0).float().cpu()[micro.layout.twins]
    return list(row.split([len(trajectory.tokens) for trajectory in trajectories]))
