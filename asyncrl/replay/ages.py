"""Where trained tokens got old, and how long their groups were in each state of a ticket."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from asyncrl.replay.messages import GroupMeta

STATES = ("leased", "finished", "taken")
"""Generating, in the queue, with the learner."""


@dataclass(slots=True)
class Ages:
    """Sums over groups that were trained."""

    groups: int = 0
    tokens: int = 0
    in_flight: int = 0
    """Learner steps from the version that sampled a token to the newest of its group, summed over action tokens."""
    in_queue: int = 0
    """Those from the newest version of the group to the one that it was trained at."""
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(STATES))
    """In each state."""

    def add(
        self, meta: GroupMeta, by_version: dict[int, int], *, taken_s: float, trained_s: float, train_version: int
    ) -> None:
        """Counts a group, with its action tokens by version."""
        tokens, newest = sum(by_version.values()), meta["end_version"]
        self.groups += 1
        self.tokens += tokens
        self.in_flight += sum((newest - version) * count for version, count in by_version.items())
        self.in_queue += (train_version - newest) * tokens
        ends_s = meta["started_s"], meta["finished_s"], taken_s, trained_s
        for index, _ in enumerate(STATES):
            self.seconds[index] += ends_s[index + 1] - ends_s[index]

    def join(self, other: Ages) -> None:
        """Takes in the sums of other groups."""
        self.groups += other.groups
        self.tokens += other.tokens
        self.in_flight += other.in_flight
        self.in_queue += other.in_queue
        self.seconds = [mine + its for mine, its in zip(self.seconds, other.seconds, strict=True)]

    @property
    def staleness(self) -> dict[str, float]:
        """Means over action tokens, in learner steps; they add up to that of the staleness."""
        tokens = max(self.tokens, 1)
        return {"in_flight": self.in_flight / tokens, "in_queue": self.in_queue / tokens}

    @property
    def states_s(self) -> dict[str, float]:
        """Mean seconds of a group in each state."""
        return {name: seconds / max(self.groups, 1) for name, seconds in zip(STATES, self.seconds, strict=True)}

    def state(self) -> list[float]:
        return [self.groups, self.tokens, self.in_flight, self.in_queue, *self.seconds]

    @classmethod
    def of_state(cls, values: list[float]) -> Self:
        groups, tokens, in_flight, in_queue, *seconds = values
        return cls(int(groups), int(tokens), int(in_flight), int(in_queue), seconds)
