"""The bottleneck monitor: a simulated verdict every minute of a live run, and one at its end."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from asyncrl.config import Config
from asyncrl.launch.resources.placement import Placement
from asyncrl.plan.levers import goodput_sentence, link_sentence, timeout_sentence
from asyncrl.plan.measured import RecentRun
from asyncrl.plan.verdict import verdict_of
from asyncrl.types import goodput_of

EVERY_S = 60.0
"""Pause between two verdicts: simulating one takes a second or two of a core."""


class BottleneckMonitor:
    """Computes verdicts on one run from its folder, in a thread, so that the caller's supervision never waits."""

    def __init__(self, config: Config, placement: Placement, *, first_s: float = EVERY_S) -> None:
        """The first verdict starts after `first_s`."""
        self._config = config
        self.generators_per_device = generators_per_device(placement)
        self._next_s = time.monotonic() + first_s
        self._run = RecentRun(config, generators_per_device=self.generators_per_device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judge")
        self._begun: Future[dict[str, Any]] | None = None

    def update(self, status: dict[str, Any]) -> str:
        """Returns the bottleneck sentence of a live run when there is a new one, else "". Never blocks."""
        if self._begun is not None and self._begun.done():
            begun, self._begun = self._begun, None
            self._next_s = time.monotonic() + EVERY_S
            return begun.result()["bottleneck"]
        if self._begun is None and status["step"] and time.monotonic() >= self._next_s:
            idle = status["generator_idle"], status["learner_idle"], status["generator_environments"]
            self._begun = self._thread.submit(self._judge, *idle, goodput_of(status["metrics"]), status["links"])
        return ""

    def summary(self, summary: dict[str, Any]) -> dict[str, Any]:
        """The verdict's fields of the summary of an ended run; empty when no step was trained."""
        idle = summary.get("idle")
        if idle is None:
            return {}
        fractions = idle["generator"], idle["learner"], idle["environments"]
        return self._thread.submit(
            self._judge, *fractions, summary.get("goodput", {}), summary.get("links", {})
        ).result()

    def _judge(
        self,
        generator_idle: float,
        learner_idle: float,
        environments: float,
        goodput: dict[str, float],
        links: dict[str, dict[str, float]],
    ) -> dict[str, Any]:
        verdict = verdict_of(
            self._run,
            generator_idle=generator_idle,
            learner_idle=learner_idle,
            max_staleness=self._config.replay.staleness_limit,
            environments=environments,
        )
        sentences = [
            goodput_sentence(
                goodput,
                self._config,
                learner_idle=learner_idle,
                solved=self._run.solved_fraction(),
                environments=environments,
            ),
            timeout_sentence(self._config, self._run.timed_out_fraction()),
            link_sentence(links, self._config),
        ]
        more = " ".join(filter(None, sentences))
        return {
            "bottleneck": f"{verdict.sentence}. {more}" if more else verdict.sentence,
            "simulated_gains": {change.text: change.gain for change in verdict.changes},
            "generators_per_device": self.generators_per_device,
        }


def generators_per_device(placement: Placement) -> int:
    """The largest number of generators that share a core or a GPU."""
    places = Counter((own.host, own.gpus or own.cpus) for own in placement.generators)
    shared = placement.generators[0].gpus
    return max(count if shared else -(-count // len(place)) for (_, place), count in places.items())
