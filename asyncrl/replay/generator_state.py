"""What a generator has told of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from asyncrl.replay.bounds import MAX_NUMBER
from asyncrl.stopwatch import ACTIVITIES, fractions
from asyncrl.types import NO_VERSION

TIMES = tuple(f"{name}_s" for name in ACTIVITIES)
SUMS = ("tokens", *TIMES, "rewards_failed")


@dataclass(slots=True)
class GeneratorState:
    """What a generator has told of itself, summed over its sessions."""

    session: str = ""
    heard_s: float | None = None
    """None while it is not up."""
    version: int = NO_VERSION
    tokens: int = 0
    waiting_s: float = 0.0
    working_s: float = 0.0
    syncing_s: float = 0.0
    writing_s: float = 0.0
    rewards_failed: int = 0
    before: list[float] = field(default_factory=lambda: [0] * len(SUMS))
    """The sums when the session began."""
    stalls: int = 0
    stall_ms_sum: float = 0.0
    stall_ms_max: float = 0.0
    costs: list[float] = field(default_factory=list[float])
    """Of its latest steps, as `client.GeneratorStats` has them; empty while not known."""

    def hear(self, session: str, version: int, stats: dict[str, Any], now_s: float) -> None:
        if session != self.session:
            self.session, self.before = session, [getattr(self, name) for name in SUMS]
        self.heard_s, self.version, self.costs = now_s, version, stats["costs"]
        for name, before in zip(SUMS, self.before, strict=True):
            setattr(self, name, min(before + stats[name], MAX_NUMBER))
        for stall_ms in stats["stall_ms"]:
            self.stalls += 1
            self.stall_ms_sum += stall_ms
            self.stall_ms_max = max(self.stall_ms_max, stall_ms)

    @property
    def idle(self) -> float:
        return fractions(self.seconds)["waiting"]

    @property
    def seconds(self) -> dict[str, float]:
        """Of every activity."""
        return {name: getattr(self, f"{name}_s") for name in ACTIVITIES}

    def state(self) -> list[Any]:
        """Made of what msgpack can carry; of when it was heard only whether it is up."""
        sums = [getattr(self, name) for name in SUMS]
        stalls = [self.stalls, self.stall_ms_sum, self.stall_ms_max]
        return [self.session, self.heard_s is not None, self.version, *sums, list(self.before), *stalls, self.costs]

    @classmethod
    def of_state(cls, values: list[Any], now_s: float | None) -> Self:
        """Who was up counts as heard at `now_s`; nobody does when it is None."""
        session, up, *others = values
        return cls(session, now_s if up else None, *others)
