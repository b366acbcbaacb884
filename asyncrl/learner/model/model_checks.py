"""Two checks that a run computes what it should, which neither the config nor the weights reveal.

check_packing    at the start: the model scores sequences in a packed row as it scores each of them alone
MismatchCheck    in the first steps: engine and learner compute the same log-probs with the same weights
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.config.config import Config
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.learner.batch import MicroBatch, make_batch
from asyncrl.learner.distributed import Ranks, is_lost_rank
from asyncrl.learner.model.attention import PACKED
from asyncrl.learner.model.loading import HOW_TO_FIX, UNFIT
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
log = structlog.get_logger()
LIMITS = {"float32": 0.02, "bfloat16": 0.25}
"""Upper limit of the mean absolute difference of log-probs, in nats. Rounding causes at most 2e-5 in float32 on a CPU,
and 1e-2 on GPUs that round the factors of products. In bfloat16 it causes 0.01 to 0.08, for models with weights far
larger than those of trained models. An engine that computes something else differs by 0.1 to 5."""
ENOUGH_TOKENS = 32
"""Minimum number of compared tokens. In bfloat16 a single token differs by 1 or more if a router chooses another
expert."""
ROUNDING_OPTIONS = ("quantization", "kv_cache_dtype")
"""Keys of `generator.engine_options` that make the engine compute with a lower precision than `model.dtype`."""


def check_packing(model: PreTrainedModel, score: Callable[[MicroBatch], Any], device: torch.device, name: str) -> None:
    """Raises ConfigError unless `score`, which runs `model` on a micro-batch without gradient, computes the same hidden
    states for a packed row as the model's own attention for each sequence alone, and the same in training as in
    evaluation mode.

    `name` is the config's key and value of the model, for the error. Does not change the random state. Costs four
    forward passes of at most 21 tokens. All ranks that share the model's weights call it, and all get the same result.
    """
    together = _group([0, 1], model.config.get_text_config().vocab_size)
    subject = f"{name}: a model of type {model.config.model_type}"
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
            alone = [_hidden_states(model, score, [trajectory], device)[0] for trajectory in together]
        finally:
            model.set_attn_implementation(PACKED)
            model.train(training)
    except (AsyncrlError, torch.OutOfMemoryError):
        raise
    except (*UNFIT, RuntimeError, ValueError) as error:
        if isinstance(error, RuntimeError) and is_lost_rank(error):
            raise
        raise ConfigError(
            f"{subject} cannot be scored in packed rows ({type(error).__name__}: {error}); {HOW_TO_FIX}"
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
            f"{subject} computes sequences in a packed row differently from each sequence alone: hidden states differ "
            f"by {difference:.2g} {rounding}. Its layers mix tokens by more than attention, or use an attention that "
            f"cannot be replaced, or a sliding window that it is not told of; {HOW_TO_FIX}"
        )
    difference = _difference(trained, packed)
    if not difference <= tolerance:
        raise ConfigError(
            f"{subject} computes differently in training and in evaluation: hidden states differ by {difference:.2g} "
            f"{rounding}. It has dropout or random routing that cannot be disabled, which the sampling policy does not "
            "have; use another model (docs/models.md has a table)"
        )


def _group(numbers: list[int], vocabulary: int) -> list[Trajectory]:
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
    captured: list[Tensor] = []

    def set_mode(body: torch.nn.Module, _: Any) -> None:
        body.train(training)  # overrides the evaluation mode that `score` sets

    def keep(_: torch.nn.Module, __: Any, output: Any) -> None:
        captured.append(output.last_hidden_state.detach())

    body = model.base_model
    hooks = [body.register_forward_pre_hook(set_mode), body.register_forward_hook(keep)]
    try:
        score(micro.to(device))
    finally:
        for hook in hooks:
            hook.remove()
    row = captured[0].squeeze(0).float().cpu()[micro.layout.twins]
    return list(row.split([len(trajectory.tokens) for trajectory in trajectories]))


class MismatchCheck:
    """Compares the learner's log-probs with the engine's, once in the life of a process.

    Counts only trajectories whose tokens were all sampled by the learner's own version, so that each token's context
    was also computed with that version's weights. Both log-probs are of the complete distribution at the sampling
    temperature.
    """

    def __init__(self, config: Config, ranks: Ranks, model_type: str) -> None:
        self._ranks = ranks
        settings = config.generator
        self._who = f"model.path = {config.model.path!r}: the engine computes a model of type {model_type}"
        self._dtype = config.model.dtype
        # A temperature below 1 magnifies differences of logits.
        self._limit = LIMITS[self._dtype] / min(settings.temperature, 1.0)
        self._rounds = [
            f"{name}={value}"
            for name in ROUNDING_OPTIONS
            if (value := settings.engine_options.get(name)) not in (None, "auto")
        ]
        self._sums = torch.zeros(2, dtype=torch.float64)
        """Sum of the absolute differences, and number of tokens."""

    def add(self, micro: MicroBatch, logprobs: Tensor, *, version: int) -> None:
        """Adds a micro-batch to the sums, with its `logprobs` [N] under the weights of `version`."""
        stale = torch.zeros(len(micro.names), device=micro.seq.device)
        stale.index_add_(0, micro.seq, (micro.versions != version).float())
        differences = (logprobs - micro.behavior_logprobs).abs().double()
        compared = (stale[micro.seq] == 0) & differences.isfinite()
        sums = torch.stack([torch.where(compared, differences, 0.0).sum(), compared.sum().double()])
        self._sums = self._sums.to(sums.device) + sums  # not read back here: that would wait for the GPU

    def conclude(self, step: int) -> bool:
        """Returns True if enough tokens were counted up to this step, the same on all ranks. All ranks call it.

        Raises ConfigError if engine and learner differ by more than rounding explains. If the engine is configured to
        round more than the learner, a warning is logged instead.
        """
        total, tokens = self._ranks.of_data.gather(self._sums).sum(dim=0).tolist()
        if tokens < ENOUGH_TOKENS:
            return False
        mean = total / tokens
        first = self._ranks.rank == 0
        if mean <= self._limit:
            if first:
                log.info("engine and learner agree", mean_difference_nats=mean, tokens=int(tokens), step=step)
            return True
        text = (
            f"{self._who} differently from the learner: log-probs of {tokens:.0f} tokens with the same weights differ "
            f"by {mean:.2g} nats on average, but rounding in {self._dtype} explains at most {self._limit:.2g}"
        )
        if not self._rounds:
            raise ConfigError(
                f"{text}. Every importance ratio would be wrong; use a family for which engine and learner agree "
                "(docs/models.md has a table)"
            )
        if first:
            log.warning(
                f"{text}; expected with generator.engine_options {', '.join(self._rounds)}, and left to the correction "
                "(correction/mismatch_kl, correction/ess)"
            )
        return True
