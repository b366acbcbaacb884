"""What holds the run back, again and again while it goes on and once it has ended."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from asyncrl.config import Config
from asyncrl.launch.placement import Placement
from asyncrl.plan.measured import RecentRun
from asyncrl.plan.verdict import verdict_of

EVERY_S = 60.0
"""A verdict is simulated: that takes a second or two of a core."""


class BottleneckMonitor:
    """Looks at the folder of one run, in a thread of its own: who asks has roles to supervise."""

    def __init__(self, config: Config, plan: Placement, *, first_s: float = EVERY_S) -> None:
        """The first verdict comes after `first_s`."""
        self._max_staleness = config.replay.staleness_limit
        self.generators_per_device = generators_per_device(plan)
        self._next_s = time.monotonic() + first_s
        self._run = RecentRun(config, generators_per_device=self.generators_per_device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judge")
        self._begun: Future[dict[str, Any]] | None = None

    def update(self, status: dict[str, Any]) -> str:
        """A sentence on a run that goes on, once there is a new one, else empty. Never waits for it."""
        if self._begun is not None and self._begun.done():
            begun, self._begun = self._begun, None
            self._next_s = time.monotonic() + EVERY_S
            return begun.result()["bottleneck"]
        if self._begun is None and status["step"] and time.monotonic() >= self._next_s:
            self._begun = self._thread.submit(self._judge, status["generator_idle"], status["learner_idle"])
        return ""

    def summary(self, summary: dict[str, Any]) -> dict[str, Any]:
        """The part of the summary of a run that has ended; empty when it did not get so far."""
        idle = summary.get("idle")
        if idle is None:
            return {}
        return self._thread.submit(self._judge, idle["generator"], idle["learner"]).result()

    def _judge(self, generator_idle: float, learner_idle: float) -> dict[str, Any]:
        verdict = verdict_of(
            self._run,
            generator_idle=generator_idle,
            learner_idle=learner_idle,
            max_staleness=self._max_staleness,
        )
        return {
            "bottleneck": verdict.sentence,
            "simulated_gains": {change.text: change.gain for change in verdict.changes},
            "generators_per_device": self.generators_per_device,
        }


def generators_per_device(plan: Placement) -> int:
    """Generators that take turns on the core, or the GPU, that has most of them."""
    places = Counter(share.gpus or share.cpus for share in plan.generators)
    return max(count if plan.generators[0].gpus else -(-count // len(place)) for place, count in places.items())
