"""The turns of simulated episodes, and how long they wait for their environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray


class Turn(NamedTuple):
    """A turn of the policy."""

    tokens: int
    wait_s: float
    """Seconds after it for which the episode waits, without a place in the engine."""


@dataclass(frozen=True, slots=True)
class Episodes:
    """Turns and waits of the trajectories of a workload, [groups, group_size] each."""

    turns: NDArray[np.int32]
    """At least 1."""
    wait_s: NDArray[np.float64]
    """Seconds of waiting after the turns, in all."""
    slow_turns: NDArray[np.int32]
    """Turns among which these seconds are divided; 0 if among all."""

    @classmethod
    def of_shape(cls, shape: tuple[int, int], *, turns: int, wait_s: float, wait_share: float, seed: int) -> Self:
        """Returns episodes of this many turns, with `wait_s` after a `wait_share` of those that another follows."""
        slow = np.random.default_rng(seed).binomial(turns - 1, wait_share, shape).astype(np.int32)
        return cls(np.full(shape, turns, dtype=np.int32), (slow * wait_s).astype(np.float64), slow)

    def take(self, chosen: NDArray[np.int64]) -> Self:
        """Returns groups with these members, [groups, new group size]."""
        names = ("turns", "wait_s", "slow_turns")
        return replace(self, **{name: np.take_along_axis(getattr(self, name), chosen, axis=1) for name in names})

    def without_waits(self) -> Self:
        """Returns the same turns of environments that answer at once."""
        return replace(self, wait_s=np.zeros_like(self.wait_s))

    @property
    def mean_turns(self) -> float:
        """Mean number of turns."""
        return float(self.turns.mean())

    @property
    def wait_per_turn_s(self) -> float:
        """Mean seconds of waiting after a turn."""
        return float(self.wait_s.sum() / self.turns.sum())

    @property
    def slow_fraction(self) -> float:
        """Fraction of the turns with a slow answer."""
        return float(self.slow_turns.sum() / self.turns.sum())

    @property
    def slow_wait_s(self) -> float:
        """Seconds of a slow answer: median over the episodes with one; 0 without any."""
        slow = self.slow_turns > 0
        return float(np.median(self.wait_s[slow] / self.slow_turns[slow])) if slow.any() else 0.0


def turns_of(tokens: int, turns: int, wait_s: float, slow_turns: int, dice: np.random.Generator) -> list[Turn]:
    """Returns an episode of this many tokens, divided evenly among its turns. The waits are after `slow_turns` of the
    turns that another follows, or of all if those are too few."""
    turns = min(turns, tokens)
    each, more = divmod(tokens, turns)
    followed = range(turns - 1 if 0 < slow_turns < turns else turns)
    slow: Sequence[int] = followed
    if 0 < slow_turns < len(followed):
        slow = dice.choice(len(followed), slow_turns, replace=False).tolist()
    waits_s = dict.fromkeys(slow, wait_s / len(slow))
    return [Turn(each + (number < more), waits_s.get(number, 0.0)) for number in range(turns)]
