"""The simulator's model of a generator's engine: continuous batching, where all running sequences decode together."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Sequence
from math import inf

from asyncrl.plan.engine_clock import EngineClock
from asyncrl.plan.workload import EngineCost


class SimulatedEngine(EngineClock):
    """An engine without environments. If all slots are in use, further sequences wait for a free slot.

    While sequences wait, every end of a sequence is an event. Otherwise only ends of groups are events, and the ends of
    single sequences are applied when the engine is advanced.
    """

    __slots__ = (
        "_begun", "_ended_tokens", "_expected", "_lasts", "_left", "_running", "_sum_starts", "_waiting",
    )  # fmt: skip

    def __init__(self, cost: EngineCost, *, slots: int) -> None:
        super().__init__(cost, slots=slots)
        self._running: list[tuple[float, float, int]] = []
        """(clock at its end, clock at its start, group) of each running sequence, sorted."""
        self._sum_starts = 0.0
        """Sum of the start clocks of the running sequences."""
        self._lasts: list[tuple[float, int]] = []
        """(clock at the end of its last member, group) of each group, sorted; valid only while no sequence waits."""
        self._waiting: deque[tuple[int, int]] = deque()
        """(group, tokens) of each waiting sequence."""
        self._left: Counter[int] = Counter()
        """Number of unfinished members of each group; valid only while sequences wait."""
        self._begun: dict[int, list[tuple[float, Sequence[int]]]] = {}
        """(clock, lengths of the members that started at that clock), by group."""
        self._ended_tokens = 0.0
        """Tokens of ended members of unfinished groups."""
        self._expected = (inf, 0.0)
        """The last result of `next_s`, and the clock at that time."""

    def __len__(self) -> int:
        """Number of running and waiting sequences."""
        return len(self._running) + len(self._waiting)

    @property
    def tokens(self) -> float:
        """Number of tokens generated for unfinished groups."""
        return self._clock * len(self._running) - self._sum_starts + self._ended_tokens

    @property
    def next_s(self) -> float:
        """Time at which the next group ends (while sequences wait: the next sequence) if no other event comes first."""
        running = self._running
        at_s = self._free_s if self._free_s > self._now_s else self._now_s
        if not running:
            self._expected = inf, 0.0
            return inf
        until = running[0][0] if self._waiting else self._lasts[0][0]
        clock, count, base_s, sequence_s = self._clock, len(running), self._cost.base_s, self._cost.sequence_s
        steps_s = 0.0
        for end, _, _ in running:
            if end > clock:
                steps_s += (end - clock) * (base_s + sequence_s * count)
                clock = end
            if end >= until:
                break
            count -= 1
        next_s = at_s + steps_s * self.slowdown
        self._expected = next_s, until
        return next_s

    def advance(self, now_s: float) -> None:
        """Decodes until `now_s`, which must not be later than `next_s`.

        After `add`, `swap` and a change of `slowdown`, read `next_s` before advancing to a later time.
        """
        at_s = self._free_s if self._free_s > self._now_s else self._now_s
        self._now_s = now_s
        if now_s <= at_s:
            return
        running = self._running
        if now_s == self._expected[0] and not self._waiting:
            self._skip_to(self._expected[1])
            return
        base_s, sequence_s, slowdown, count = self._cost.base_s, self._cost.sequence_s, self.slowdown, len(running)
        last = -inf if self._waiting or not running else self._lasts[0][0]
        clock, place = self._clock, 0
        while place < count:
            end, start, _ = running[place]
            step_s = (base_s + sequence_s * (count - place)) * slowdown
            end_s = at_s + (end - clock) * step_s
            if end_s > now_s or end >= last:
                clock = min(clock + (now_s - at_s) / step_s, end)
                break
            self._sum_starts -= start
            self._ended_tokens += end - start
            clock, at_s, place = end, end_s, place + 1
        else:
            self.idle_s += now_s - at_s
        self._clock = clock
        del running[:place]

    def add(self, group: int, lengths: Sequence[int]) -> None:
        """Starts the sequences of a group, or queues them."""
        places, clock = self._slots - len(self._running), self._clock
        begun = lengths if len(lengths) <= places else lengths[:places]
        self._running += [(clock + tokens, clock, group) for tokens in begun]
        self._running.sort()
        self._sum_starts += clock * len(begun)
        self._begun[group] = [(clock, begun)]
        self._hold(self._cost.request_s * len(begun))
        if begun is lengths:
            insort(self._lasts, (clock + max(lengths), group))
            return
        if not self._waiting:
            self._left = Counter(group for _, _, group in self._running)
        self._left[group] = len(lengths)
        self._waiting += [(group, tokens) for tokens in lengths[places:]]

    def end_next(self) -> tuple[int, dict[int, int]] | None:
        """Applies the event of `next_s`, at that time. Returns the ended group and its tokens by the version that
        sampled them; None if only a sequence ended."""
        if self._waiting:
            group = self._end(0)
            self._left[group] -= 1
            self._begin_waiting()
            if self._left[group]:
                return None
        else:
            last, group = self._lasts.pop(0)
            place = 0
            while place < len(self._running) and self._running[place][0] <= last:
                if self._running[place][0] < last or self._running[place][2] == group:
                    self._end(place)
                else:
                    place += 1  # belongs to another group that also ends now
        begun = self._begun.pop(group)
        self._ended_tokens -= sum(sum(lengths) for _, lengths in begun)
        by_version: dict[int, int] = {}
        for start, lengths in begun:
            self._count(by_version, start, lengths)
        return group, by_version

    def _begin_waiting(self) -> None:
        """Starts a waiting sequence in the free slot. If no other sequence waits, only ends of groups are events
        afterwards."""
        group, tokens = self._waiting.popleft()
        insort(self._running, (self._clock + tokens, self._clock, group))
        self._sum_starts += self._clock
        self._begun[group].append((self._clock, (tokens,)))
        self._hold(self._cost.request_s)
        if not self._waiting:
            last = {group: end for end, _, group in self._running}
            self._lasts = sorted((end, group) for group, end in last.items())

    def _skip_to(self, clock: float) -> None:
        """Moves the clock forward and applies the ends of sequences before it."""
        running = self._running
        place = bisect_left(running, (clock, 0.0, 0))
        for end, start, _ in running[:place]:
            self._sum_starts -= start
            self._ended_tokens += end - start
        del running[:place]
        self._clock = clock

    def _end(self, place: int) -> int:
        """Ends the running sequence at this index; returns its group."""
        end, start, group = self._running.pop(place)
        self._clock = end
        self._sum_starts -= start
        self._ended_tokens += end - start
        return group
