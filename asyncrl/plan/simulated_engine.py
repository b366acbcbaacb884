"""The model of one generator: continuous batching, in which all running sequences decode together."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Sequence
from math import inf

from asyncrl.plan.workload import EngineCost

ALMOST = 1e-6
"""Of a token: rounding of the clock."""


class SimulatedEngine:
    """Each step gives every running sequence one token, so that a single clock, in tokens, tells where all of them
    are. Sequences beyond the slots wait for one to get free.

    Ends of sequences matter to others when something waits for a place; else only ends of groups do, and those before
    them are made up for when the engine is looked at.
    """

    __slots__ = (
        "_begun", "_clock", "_cost", "_ended_tokens", "_expected", "_free_s", "_lasts", "_left", "_mark_clocks",
        "_mark_versions", "_now_s", "_running", "_slots", "_sum_starts", "_waiting", "idle_s", "slowdown", "version",
    )  # fmt: skip

    def __init__(self, cost: EngineCost, *, slots: int) -> None:
        self.version = 0
        self.slowdown = 1.0
        """How many times longer everything takes now: others compute on the same device."""
        self.idle_s = 0.0
        """Without a running sequence."""
        self._cost, self._slots = cost, slots
        self._now_s = self._free_s = 0.0
        """Until when it has been simulated; and until when prompts or a swap hold decoding up."""
        self._clock = 0.0
        self._running: list[tuple[float, float, int]] = []
        """(clock at its end, clock at its start, its group), in this order."""
        self._sum_starts = 0.0
        """Of the clocks at which those that run have started."""
        self._lasts: list[tuple[float, int]] = []
        """(clock at the end of its last member, group) of the groups that run as a whole, in this order."""
        self._waiting: deque[tuple[int, int]] = deque()
        """(group, tokens)."""
        self._left: Counter[int] = Counter()
        """Members of each group that have not ended; kept while something waits."""
        self._begun: dict[int, list[tuple[float, Sequence[int]]]] = {}
        """Of each group: clocks, and the lengths of the members that started at each."""
        self._ended_tokens = 0.0
        """Of members of groups that have not ended."""
        self._expected = (inf, 0.0)
        """What `next_s` gave last, and the clock then."""
        self._mark_clocks: list[float] = [0.0]
        self._mark_versions: list[int] = [0]
        """From which clock on tokens are of which version."""

    def __len__(self) -> int:
        """Sequences that run or wait."""
        return len(self._running) + len(self._waiting)

    @property
    def tokens(self) -> float:
        """That groups have so far which have not ended."""
        return self._clock * len(self._running) - self._sum_starts + self._ended_tokens

    @property
    def next_s(self) -> float:
        """When the next group ends, or the next sequence if one waits, unless something else happens before."""
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
        """Decodes until then; what happens before it at the latest is what `next_s` tells of.

        After `add`, `swap` and a change of `slowdown`, `next_s` is to be asked before it is advanced to a later time.
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
        """Begins the sequences of a group, or has them wait."""
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
        """Ends what `next_s` told of, at that time: gives the group and its tokens by the version that sampled them;
        None when it was a single sequence."""
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
                    place += 1  # of another group that ends now, too
        begun = self._begun.pop(group)
        self._ended_tokens -= sum(sum(lengths) for _, lengths in begun)
        return group, self._by_version(begun)

    def swap(self, version: int, swap_s: float) -> None:
        """Tokens from now on are of this version."""
        self.version = version
        self._mark_clocks.append(self._clock)
        self._mark_versions.append(version)
        self._hold(swap_s)

    def _by_version(self, begun: Sequence[tuple[float, Sequence[int]]]) -> dict[int, int]:
        clocks, versions = self._mark_clocks, self._mark_versions
        found: dict[int, int] = {}
        for start, lengths in begun:
            first = len(clocks) - 1 if start >= clocks[-1] else bisect_right(clocks, start) - 1
            total, before = sum(lengths), 0
            for index in range(first, len(clocks)):
                sampled = total
                if index + 1 < len(clocks):
                    most = int(clocks[index + 1] - start + ALMOST)
                    sampled = sum([most if most < tokens else tokens for tokens in lengths])
                if sampled > before:
                    found[versions[index]] = found.get(versions[index], 0) + sampled - before
                    before = sampled
                if sampled == total:
                    break
        return found

    def _begin_waiting(self) -> None:
        """One that waits takes the free place; when none waits any more, groups run as a whole."""
        group, tokens = self._waiting.popleft()
        insort(self._running, (self._clock + tokens, self._clock, group))
        self._sum_starts += self._clock
        self._begun[group].append((self._clock, (tokens,)))
        self._hold(self._cost.request_s)
        if not self._waiting:
            last = {group: end for end, _, group in self._running}
            self._lasts = sorted((end, group) for group, end in last.items())

    def _skip_to(self, clock: float) -> None:
        """All that ends before it has ended."""
        running = self._running
        place = bisect_left(running, (clock, 0.0, 0))
        for end, start, _ in running[:place]:
            self._sum_starts -= start
            self._ended_tokens += end - start
        del running[:place]
        self._clock = clock

    def _end(self, place: int) -> int:
        """Ends the sequence at this place of those that run; gives its group."""
        end, start, group = self._running.pop(place)
        self._clock = end
        self._sum_starts -= start
        self._ended_tokens += end - start
        return group

    def _hold(self, seconds: float) -> None:
        self._free_s = (self._free_s if self._free_s > self._now_s else self._now_s) + seconds * self.slowdown
