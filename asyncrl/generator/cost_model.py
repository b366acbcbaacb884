"""What an engine's steps cost, from how long they took: what the simulator asks of a run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

STEPS_KEPT = 512
"""The latest ones, of each doubling of the sequences that run: costs change with the lengths of what runs, and what a
step of few sequences costs is known for as long as there was any."""
MIN_STEPS = 32


@dataclass(slots=True)
class StepCosts:
    """Least squares over steps, of seconds by sequences that ran, and sequences that began or ended."""

    _steps: dict[int, deque[tuple[float, float, float]]] = field(
        default_factory=dict[int, deque[tuple[float, float, float]]]
    )
    """By the bits of the number that ran: (seconds, running, begun or ended)."""
    _scored: int = 0
    _scored_s: float = 0.0

    def step(self, seconds: float, *, running: int, changed: int) -> None:
        """Counts a step with all that the loop did around it; `changed` sequences began or ended in it."""
        alike = self._steps.setdefault(running.bit_length(), deque(maxlen=STEPS_KEPT))
        alike.append((seconds, running, changed))

    def scored(self, seconds: float) -> None:
        """Counts a group, which was scored so long after its last token."""
        self._scored += 1
        self._scored_s += seconds

    @property
    def reward_s(self) -> float:
        """From the last token of a group until its rewards are there, in the mean."""
        return self._scored_s / max(self._scored, 1)

    def solve(self) -> list[float]:
        """Seconds of a step, of each sequence in it, and of each sequence once, none negative; empty before
        MIN_STEPS steps."""
        steps = [step for alike in self._steps.values() for step in alike]
        if len(steps) < MIN_STEPS:
            return []
        seconds, running, changed = np.array(steps).T
        base_s, sequence_s, change_s = non_negative(np.stack([np.ones_like(running), running, changed], 1), seconds)
        return [base_s, sequence_s, 2 * change_s]


def non_negative(columns: NDArray[np.float64], values: NDArray[np.float64]) -> list[float]:
    """The coefficients [k] of columns [n, k], none negative, with the least squared distance from values [n].

    Tries which of them are 0: the best solution is an unbounded one of those that are not. For few columns.
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
