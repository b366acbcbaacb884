"""The learning rate of a step: the schedule, and the bound that `algorithm.max_divergence` sets.

The bound keeps trained tokens near the policies that sampled them. Log-probs move in proportion to the learning rate,
and a divergence is quadratic in them. After updates of the rates lr_1 ... lr_n the policy has diverged from the one
before them by about

    (speed * (lr_1 + ... + lr_n))**2    nats a token

Every step measures `speed`, from the log-probs of its stale tokens, which it computes anyway, and the rates of the
steps since they were sampled. The next step may use an equal share of the distance that the bound allows over the
staleness of the tokens, and no more than the steps before it have left. All follows from the learner's inputs: a step
that is trained again is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms.corrections import mismatch_kl
from asyncrl.config.config import Config
from asyncrl.config.training import LearnerConfig
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.distributed import Ranks

SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""Factor of the learning rate as a function of the completed fraction, from 0 to 1, of the steps after the warm-up."""
FIRST = 1 / 16
"""Part of the scheduled rate that an update may use before any speed is known: a divergence of 1/256."""
SLOWER = 0.3
"""Weight of the latest speed when it is lower than the one before; a higher one counts at once."""


def learning_rate(step: int, settings: LearnerConfig, *, steps: int) -> float:
    """Returns the learning rate of step `step` (from 1) of `steps`.

    The rate rises linearly over `warmup_steps`, the last of which has the full rate. It then follows the schedule,
    which reaches 0 only after the last step: no step has rate 0.
    """
    warmup = settings.warmup_steps
    if step <= warmup:
        return settings.lr * step / warmup
    progress = (step - 1 - warmup) / max(steps - warmup, 1)
    return settings.lr * SHAPES[settings.lr_schedule](progress)


class DivergenceBound:
    """The learning rates of the latest steps, and the speed that they had. Without a bound, or where all tokens are of
    the current version, rates are the scheduled ones."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self._ranks = ranks
        self._limit = config.algorithm.max_divergence if config.replay.max_staleness else None
        self._window = config.replay.max_staleness
        self._updates = config.learner.updates
        self.rates: list[float] = []
        """The sum of the rates of the updates of each of the latest steps, at most `max_staleness`; the newest last."""
        self.speed: float | None = None
        self._clear()

    def _clear(self) -> None:
        self._sums, self._oldest = torch.zeros(2, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        """Divergence and squared path of the tokens of the step in progress, and the staleness of the oldest."""
        self._allowed: float | None = None
        """The rate of each of its updates; None before the first."""

    @torch.no_grad()
    def add(self, micro: MicroBatch, logprobs: Tensor, *, version: int) -> None:
        """Counts the action tokens [N] of a micro-batch of a step's first update, which trains `version`."""
        if self._limit is None or not len(logprobs):
            return
        log_ratios, staleness = logprobs - micro.behavior_logprobs, version - micro.versions
        counted = (staleness > 0) & log_ratios.isfinite()  # an update with others is skipped
        since = torch.tensor([0.0, *reversed(self.rates)], dtype=torch.float64, device=staleness.device).cumsum(0)
        path = since[staleness.clamp(0, len(self.rates))]
        parts = torch.stack([mismatch_kl(log_ratios), path.square(), staleness.double()]).where(counted, 0.0)
        # Kept on the device: reading them back would wait for a GPU in each micro-batch.
        self._sums = self._sums.to(parts.device) + parts[:2].sum(dim=1)
        self._oldest = torch.maximum(self._oldest.to(parts.device), parts[2].max())

    def rate(self, scheduled: float) -> float:
        """Returns the rate of an update: the scheduled one, or what the bound leaves of it, which is decided in the
        first update of a step, after its micro-batches were counted. All ranks call it."""
        if self._limit is None:
            return scheduled
        if self._allowed is None:
            kl, path = self._ranks.sum(self._sums).tolist()
            window = max(1, int(self._ranks.max(self._oldest)))
            if path > 0:
                speed = (kl / path) ** 0.5
                before = speed if self.speed is None else self.speed
                self.speed = max(speed, (1 - SLOWER) * before + SLOWER * speed)
            self._allowed = self._allow(self._limit, scheduled, window)
        return min(scheduled, self._allowed)

    def _allow(self, limit: float, scheduled: float, window: int) -> float:
        if self.speed is None:  # no token was stale yet
            return max(FIRST * scheduled, 2 * self.rates[-1] / self._updates) if self.rates else FIRST * scheduled
        if not self.speed:
            return math.inf
        distance = limit**0.5 / self.speed
        spent = sum(self.rates[len(self.rates) - window + 1 :] if window > 1 else [])
        return max(0.0, min(distance / window, distance - spent)) / self._updates

    def end_step(self, rates: list[float], scheduled: float) -> dict[str, float]:
        """Records the rates of a step's updates. Returns its metrics, if there is a bound."""
        if self._limit is None:
            return {}
        self.rates = [*self.rates, sum(rates)][-self._window :]
        self._clear()
        return {"learner/lr_fraction": sum(rates) / (len(rates) * scheduled)} if rates else {}

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {"rates": self.rates, "speed": self.speed}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from what a checkpoint has kept."""
        self.rates, self.speed = state["rates"], state["speed"]
