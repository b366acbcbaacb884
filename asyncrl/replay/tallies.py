"""Sums that stay small however long the run is, and whose state goes into the journal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from asyncrl.replay.messages import GroupMeta
from asyncrl.replay.wire import Array

CURVE_POINTS = 4096
BIAS_FRACTION = 0.2
"""Mean lengths that differ by less raise no alarm,"""
BIAS_ERRORS = 3.0
"""nor by fewer standard errors."""


@dataclass(slots=True)
class ExactMean:
    """A mean that is the same in whatever order the values came.

    The sum is kept as floats that do not overlap (Shewchuk 1997), so that nothing of it is rounded away.
    """

    count: int = 0
    partials: list[float] = field(default_factory=list[float])
    not_finite: float = 0.0

    def add(self, values: Iterable[float]) -> None:
        for value in values:
            self.count += 1
            if math.isfinite(value):
                self._add(value)
            else:
                self.not_finite += value

    @property
    def mean(self) -> float:
        return (math.fsum(self.partials) + self.not_finite) / self.count

    def state(self) -> list[Any]:
        return [self.count, list(self.partials), self.not_finite]

    def _add(self, value: float) -> None:
        kept = 0
        for part in self.partials:
            large, small = (value, part) if abs(value) > abs(part) else (part, value)
            value = large + small
            rest = small - (value - large)
            if rest:
                self.partials[kept] = rest
                kept += 1
        self.partials[kept:] = [value]


@dataclass(slots=True)
class Curve:
    """A series as at most CURVE_POINTS sums of neighbors, for its beginning, its end and its latest value."""

    stride: int = 1
    """Values in a point."""
    points: list[list[float]] = field(default_factory=list[list[float]])
    """Sum and count."""
    latest: float | None = None

    def add(self, value: float) -> None:
        self.latest = value
        if self.points and self.points[-1][1] < self.stride:
            self.points[-1][0] += value
            self.points[-1][1] += 1
            return
        self.points.append([value, 1])
        if len(self.points) > CURVE_POINTS:
            self.stride *= 2
            pairs = [self.points[i : i + 2] for i in range(0, len(self.points), 2)]
            self.points = [[sum(one[0] for one in pair), sum(one[1] for one in pair)] for pair in pairs]

    def first_tenth(self) -> float | None:
        """Mean of the first tenth of the values, at least one; None when there is none."""
        return self._tenth(self.points)

    def last_tenth(self) -> float | None:
        return self._tenth(self.points[::-1])

    def state(self) -> list[Any]:
        return [self.stride, [list(point) for point in self.points], self.latest]

    def _tenth(self, points: list[list[float]]) -> float | None:
        wanted = max(1, int(sum(count for _, count in points)) // 10)
        total = counted = 0.0
        for point_sum, count in points:
            if counted >= wanted:
                break
            total, counted = total + point_sum, counted + count
        return total / counted if counted else None


@dataclass(slots=True)
class Moments:
    """Count, mean and variance of numbers that come one after another (Welford)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances from the mean."""

    def add(self, values: Iterable[float]) -> None:
        for value in values:
            self.count += 1
            distance = value - self.mean
            self.mean += distance / self.count
            self.squares += distance * (value - self.mean)

    def merged(self, other: Moments) -> Moments:
        """Of the numbers of both."""
        count = self.count + other.count
        if not count:
            return Moments()
        distance = other.mean - self.mean
        squares = self.squares + other.squares + distance**2 * self.count * other.count / count
        return Moments(count, self.mean + distance * other.count / count, squares)

    @property
    def variance(self) -> float:
        return self.squares / (self.count - 1) if self.count > 1 else 0.0

    def state(self) -> list[float]:
        return [self.count, self.mean, self.squares]


@dataclass(slots=True)
class Outcome:
    """Trajectories that ended in one way: their completion tokens and rewards."""

    tokens: Moments = field(default_factory=Moments)
    rewards: Moments = field(default_factory=Moments)
    """Of the trajectories whose reward could be had."""

    def add(self, meta: GroupMeta, action_mask: Array) -> None:
        self.tokens.add(completion_tokens(meta, action_mask))
        pairs = zip(meta["rewards"], meta["status"], strict=True)
        self.rewards.add(reward for reward, status in pairs if status != "failed")

    def state(self) -> list[list[float]]:
        return [self.tokens.state(), self.rewards.state()]

    @classmethod
    def of_state(cls, state: list[list[float]]) -> Self:
        tokens, rewards = state
        return cls(Moments(int(tokens[0]), *tokens[1:]), Moments(int(rewards[0]), *rewards[1:]))

    def summary(self) -> dict[str, float]:
        return {
            "trajectories": self.tokens.count,
            "tokens_mean": self.tokens.mean,
            "tokens_std": math.sqrt(self.tokens.variance),
            "reward_mean": self.rewards.mean,
            "reward_std": math.sqrt(self.rewards.variance),
        }


def completion_tokens(meta: GroupMeta, action_mask: Array) -> list[int]:
    """Action tokens of each trajectory of a group."""
    starts = np.cumsum([0, *meta["lengths"][:-1]])
    return np.add.reduceat(action_mask.astype(np.int64), starts).tolist()


def bias_alarms(outcomes: dict[str, Outcome]) -> list[str]:
    """A sentence when refunded trajectories are of another length than trained ones.

    Refunds that depend on length change what the policy learns from: if long completions are refunded more often,
    only short ones are ever reinforced, and the policy drifts to short answers with no metric of the loss showing it.
    """
    trained = outcomes.get("trained", Outcome()).tokens
    refunded = Moments()
    for outcome in (outcome for name, outcome in outcomes.items() if name != "trained"):
        refunded = refunded.merged(outcome.tokens)
    if min(trained.count, refunded.count) < 2 or not trained.mean:
        return []
    difference = refunded.mean - trained.mean
    error = math.sqrt(trained.variance / trained.count + refunded.variance / refunded.count)
    if abs(difference) <= max(BIAS_FRACTION * trained.mean, BIAS_ERRORS * error):
        return []
    longer = "longer" if difference > 0 else "shorter"
    reasons = ", ".join(sorted(name for name in outcomes if name != "trained"))
    return [
        f"refunded trajectories ({reasons}) are {abs(difference) / trained.mean:.0%} {longer} than trained ones: "
        f"{refunded.mean:.1f} tokens against {trained.mean:.1f} in the mean, so that training sees too few "
        f"{'long' if difference > 0 else 'short'} completions"
    ]
