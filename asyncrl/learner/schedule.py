"""The learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Callable

from asyncrl.config import LearnerConfig

SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""Factor on the learning rate by the part of the steps after the warm-up that is done, from 0 to 1."""


def learning_rate(step: int, settings: LearnerConfig, *, steps: int) -> float:
    """Learning rate of optimizer step `step` (from 1) of `steps`.

    Rises linearly over `warmup_steps`, whose last step has the full rate, then follows the shape, which reaches
    0 when the last step is done: no step has rate 0.
    """
    warmup = settings.warmup_steps
    if step <= warmup:
        return settings.lr * step / warmup
    progress = (step - 1 - warmup) / max(steps - warmup, 1)
    return settings.lr * SHAPES[settings.lr_schedule](progress)
