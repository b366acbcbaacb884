"""What the simulator's models of an engine share: a clock in tokens, and the versions that were loaded on the way."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from asyncrl.plan.workload import EngineCost

ALMOST = 1e-6
"""Tolerance for rounding of the clock, in tokens."""


class EngineClock:
    """Time and progress of an engine with continuous batching. Each step adds one token to every running sequence, so
    a single clock, in tokens, describes the progress of all."""

    __slots__ = (
        "_clock", "_cost", "_free_s", "_mark_clocks", "_mark_versions", "_now_s", "_slots", "environments_s", "idle_s",
        "slowdown", "version",
    )  # fmt: skip

    def __init__(self, cost: EngineCost, *, slots: int) -> None:
        self.version = 0
        self.slowdown = 1.0
        """Factor of all durations while other engines compute on the same device."""
        self.idle_s = 0.0
        """Seconds without a sequence or an episode."""
        self.environments_s = 0.0
        """Seconds in which all episodes wait for their environments."""
        self._cost, self._slots = cost, slots
        self._now_s = self._free_s = 0.0
        """Time up to which the engine is simulated; and time until which prompts or a swap block decoding."""
        self._clock = 0.0
        """Tokens that each sequence would have sampled since the start."""
        self._mark_clocks: list[float] = [0.0]
        """Clock at the start of each loaded version."""
        self._mark_versions: list[int] = [0]
        """Version of the tokens from each of these clocks on."""

    def swap(self, version: int, swap_s: float) -> None:
        """Loads a version, which samples all later tokens."""
        self.version = version
        self._mark_clocks.append(self._clock)
        self._mark_versions.append(version)
        self._hold(swap_s)

    def _hold(self, seconds: float) -> None:
        """Blocks decoding for this time."""
        self._free_s = (self._free_s if self._free_s > self._now_s else self._now_s) + seconds * self.slowdown

    def _count(self, counts: dict[int, int], start: float, lengths: Sequence[int]) -> None:
        """Adds to `counts` the tokens of ended sequences that started at the clock `start`, by the version that
        sampled them."""
        clocks, versions = self._mark_clocks, self._mark_versions
        first = len(clocks) - 1 if start >= clocks[-1] else bisect_right(clocks, start) - 1
        total, before = sum(lengths), 0
        for index in range(first, len(clocks)):
            sampled = total
            if index + 1 < len(clocks):
                most = int(clocks[index + 1] - start + ALMOST)
                sampled = sum([most if most < tokens else tokens for tokens in lengths])
            if sampled > before:
                counts[versions[index]] = counts.get(versions[index], 0) + sampled - before
                before = sampled
            if sampled == total:
                return
