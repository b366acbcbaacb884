"""The simulator's model of a generator's engine with an environment, in which an episode has no place between turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf

from asyncrl.plan.engine_clock import EngineClock
from asyncrl.plan.episodes import Turn
from asyncrl.plan.workload import EngineCost


@dataclass(slots=True)
class _Episode:
    group: int
    turns: Sequence[Turn]
    number: int = 0
    """Number of the current turn."""


@dataclass(slots=True)
class _Group:
    left: int
    """Episodes in progress."""
    ended_tokens: int = 0
    by_version: Counter[int] = field(default_factory=Counter[int])


class TurnsEngine(EngineClock):
    """An engine with environments, of which every end of a turn and of a wait is an event. When more turns wait for a
    place than there are, those of the oldest groups go first. Its public methods are those of `SimulatedEngine`.
    """

    def __init__(self, cost: EngineCost, *, slots: int) -> None:
        super().__init__(cost, slots=slots)
        self._order = count()
        self._running: list[tuple[float, int, float, _Episode]] = []
        """Heap of (clock at its end, order, clock at its start, episode) of each running turn."""
        self._sum_starts = 0.0
        """Sum of the start clocks of the running turns."""
        self._queue: list[tuple[int, int, _Episode]] = []
        """Heap of (group, order, episode) of the turns without a place."""
        self._waits: list[tuple[float, int, _Episode]] = []
        """Heap of (time at its end, order, episode) of each wait."""
        self._groups: dict[int, _Group] = {}
        self._ended_tokens = 0
        """Tokens of the ended turns of unfinished groups."""
        self._ends_turn = False
        """True if the event of the last `next_s` is the end of a turn."""

    def __len__(self) -> int:
        """Number of turns that run or have no place."""
        return len(self._running) + len(self._queue)

    @property
    def num_episodes(self) -> int:
        """Number of episodes in progress."""
        return len(self) + len(self._waits)

    @property
    def tokens(self) -> float:
        """Number of tokens generated for unfinished groups."""
        return max(self._clock * len(self._running) - self._sum_starts, 0.0) + self._ended_tokens

    @property
    def next_s(self) -> float:
        """Time at which the next turn or wait ends, if no other event comes first."""
        wakes_s = self._waits[0][0] if self._waits else inf
        ends_s = inf
        if self._running:
            step_s = self._cost.step_s(len(self._running)) * self.slowdown
            ends_s = max(self._free_s, self._now_s) + (self._running[0][0] - self._clock) * step_s
        self._ends_turn = ends_s <= wakes_s
        return min(ends_s, wakes_s)

    def advance(self, now_s: float) -> None:
        """Decodes until `now_s`, which must not be later than `next_s`."""
        at_s = max(self._free_s, self._now_s)
        self._now_s = now_s
        if now_s <= at_s:
            return
        if self._running:
            self._clock += (now_s - at_s) / (self._cost.step_s(len(self._running)) * self.slowdown)
        elif self._waits:
            self.environments_s += now_s - at_s
        else:
            self.idle_s += now_s - at_s

    def add(self, group: int, episodes: Sequence[Sequence[Turn]]) -> None:
        """Starts the episodes of a group."""
        self._groups[group] = _Group(len(episodes))
        for turns in episodes:
            heappush(self._queue, (group, next(self._order), _Episode(group, turns)))
        self._fill()

    def end_next(self) -> tuple[int, dict[int, int]] | None:
        """Applies the event of the last `next_s`, at that time. Returns the ended group and its tokens by the version
        that sampled them; None if no group ended."""
        if not self._ends_turn:
            _, _, episode = heappop(self._waits)
            return self._go_on(episode)
        end, _, start, episode = heappop(self._running)
        self._clock = end
        self._sum_starts -= start
        group, tokens = self._groups[episode.group], episode.turns[episode.number].tokens
        self._count(group.by_version, start, (tokens,))
        group.ended_tokens += tokens
        self._ended_tokens += tokens
        self._fill()
        wait_s = episode.turns[episode.number].wait_s
        if wait_s > 0.0:
            heappush(self._waits, (self._now_s + wait_s, next(self._order), episode))
            return None
        return self._go_on(episode)

    def _go_on(self, episode: _Episode) -> tuple[int, dict[int, int]] | None:
        """Starts the next turn of the episode, or ends it. Returns its group as `end_next` does."""
        episode.number += 1
        if episode.number < len(episode.turns):
            heappush(self._queue, (episode.group, next(self._order), episode))
            self._fill()
            return None
        group = self._groups[episode.group]
        group.left -= 1
        if group.left:
            return None
        del self._groups[episode.group]
        self._ended_tokens -= group.ended_tokens
        return episode.group, dict(group.by_version)

    def _fill(self) -> None:
        """Starts turns while there are free places."""
        while self._queue and len(self._running) < self._slots:
            _, order, episode = heappop(self._queue)
            end = self._clock + episode.turns[episode.number].tokens
            heappush(self._running, (end, order, self._clock, episode))
            self._sum_starts += self._clock
            self._hold(self._cost.request_s)
