"""The cost model of an engine's steps, fitted to measured times; an input of the simulator."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

STEPS_KEPT = 512
"""Steps kept for each power of two of running sequences. Only the latest count, since costs change with lengths; one
list per power keeps the cost of steps with few sequences known."""
MIN_STEPS = 32
"""Steps needed for a fit."""


@dataclass(slots=True)
class StepCosts:
    """Least-squares fit of a step's seconds to its running sequences and its sequences that started or ended."""

    _steps: dict[int, deque[tuple[float, float, float]]] = field(
        default_factory=dict[int, deque[tuple[float, float, float]]]
    )
    """Bit length of the number of running sequences -> (seconds, running, started or ended) of each step."""
    _scored: int = 0
    _scored_s: float = 0.0

    def step(self, seconds: float, *, running: int, changed: int) -> None:
        """Adds a step with the loop's work around it; `changed` sequences started or ended in it."""
        alike = self._steps.setdefault(running.bit_length(), deque(maxlen=STEPS_KEPT))
        alike.append((seconds, running, changed))

    def scored(self, seconds: float) -> None:
        """Adds a group that was scored `seconds` after its last token."""
        self._scored += 1
        self._scored_s += seconds

    @property
    def reward_s(self) -> float:
        """Mean seconds from the last token of a group to its rewards."""
        return self._scored_s / max(self._scored, 1)

    def solve(self) -> list[float]:
        """Seconds per step, per sequence and step, and per sequence, none negative; empty before MIN_STEPS steps."""
        steps = [step for alike in self._steps.values() for step in alike]
        if len(steps) < MIN_STEPS:
            return []
        seconds, running, changed = np.array(steps).T
        base_s, sequence_s, change_s = non_negative(np.stack([np.ones_like(running), running, changed], 1), seconds)
        return [base_s, sequence_s, 2 * change_s]


def non_negative(columns: NDArray[np.float64], values: NDArray[np.float64]) -> list[float]:
    """The non-negative coefficients [k] of columns [n, k] with the least squared distance from values [n].

    Tries every subset of coefficients as the non-zero ones, so use it for few columns: the best solution is the
    unconstrained one of its non-zero coefficients.
    """
    best, least = [0.0] * columns.shape[1], float(values @ values)
    for size in range(1, columns.shape[1] + 1):
        for chosen in combinations(range(columns.shape[1]), size):
            found = np.linalg.lstsq(columns[:, chosen], values)[0]
            distance = float(np.square(columns[:, chosen] @ found - values).sum())
            if found.min() >= 0.0 and distance < least:
                best, least = [0.0] * columns.shape[1], distance
                for column, coefficient in zip(chosen, found, strict=True):
                    best[column] = float(coefficient)
    return best
