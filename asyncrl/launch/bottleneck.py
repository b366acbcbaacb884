"""The bottleneck monitor: a simulated verdict every minute of a live run, and one at its end."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from asyncrl.config.config import Config
from asyncrl.errors import observing
from asyncrl.launch.placement import Placement
from asyncrl.observe.collapse import read_rollbacks
from asyncrl.plan.measured import RecentRun
from asyncrl.plan.verdict import (
    MOST_OF_RATE,
    Idle,
    after_collapse,
    brakes,
    goodput_sentence,
    verdict_of,
)
from asyncrl.types import goodput_of

EVERY_S = 60.0
"""Pause between two verdicts: simulating one takes a second or two of a core."""
LAST_S = 30.0
"""Time for the verdict at the end."""

Result = TypeVar("Result")


class Background(Generic[Result]):
    """Calls functions in a daemon thread, one at a time, so that supervision neither waits for what only observes nor
    ends with it."""

    def __init__(self, what: str) -> None:
        """`what` names the observer in warnings."""
        self._what = what
        self._thread: threading.Thread | None = None
        self._results: list[Result] = []

    def start(self, call: Callable[[], Result]) -> None:
        """Starts the call, unless one is in progress."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, args=[call], name=self._what, daemon=True)
            self._thread.start()

    def poll(self) -> Result | None:
        """Returns the result of a call that has ended, once; None without one."""
        return self._results.pop(0) if self._results else None

    def join(self, timeout_s: float) -> None:
        """Waits for the call in progress."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, call: Callable[[], Result]) -> None:
        with observing(self._what):
            self._results.append(call())


class BottleneckMonitor:
    """Computes verdicts on one run from its folder, in a thread, so that the caller's supervision never waits."""

    def __init__(self, config: Config, placement: Placement, *, first_s: float = EVERY_S) -> None:
        """The first verdict starts after `first_s`."""
        self._config = config
        self.generators_per_device = generators_per_device(placement)
        self._has_gpus = bool(placement.generators[0].gpus)
        self._next_s = time.monotonic() + first_s
        self._background = Background[dict[str, Any]]("bottleneck")

    def update(self, status: dict[str, Any]) -> str:
        """Returns the bottleneck sentence of a live run when there is a new one, else "". Never blocks."""
        if (verdict := self._background.poll()) is not None:
            self._next_s = time.monotonic() + EVERY_S
            return verdict["bottleneck"]
        if status["step"] and time.monotonic() >= self._next_s:
            idle = Idle(status["generator_idle"], status["learner_idle"], status["generator_environments"])
            goodput = goodput_of(status["metrics"])
            self._background.start(partial(self._judge, idle, goodput, status["collapse"]))
        return ""

    def summary(self, summary: dict[str, Any]) -> dict[str, Any]:
        """The verdict's fields of the summary of an ended run; empty when no step was trained."""
        if "idle" not in summary:
            return {}
        self._background.join(LAST_S)
        self._background.poll()
        goodput, collapse = (summary.get(name, {}) for name in ("goodput", "collapse"))
        self._background.start(partial(self._judge, Idle(**summary["idle"]), goodput, collapse))
        self._background.join(LAST_S)
        return self._background.poll() or {"bottleneck": "not known; see logs/launcher.jsonl"}

    def _judge(self, idle: Idle, goodput: dict[str, float], collapse: dict[str, Any]) -> dict[str, Any]:
        run = RecentRun(self._config, generators_per_device=self.generators_per_device)
        verdict = verdict_of(run, idle, max_staleness=self._config.replay.max_staleness)
        engine_cpu = run.recent("generator/engine_cpu_fraction", 0.0) if self._has_gpus else 0.0
        rate = run.recent("learner/lr_fraction", 1.0)
        may_be_older = not read_rollbacks(self._config.run_dir) and rate > MOST_OF_RATE
        verdict = after_collapse(verdict, collapse, may_be_older=may_be_older)
        sentences = [
            goodput_sentence(goodput, self._config, idle, solved=run.solved_fraction(), may_be_older=may_be_older),
            *brakes(self._config, lr_fraction=rate, timed_out=run.timed_out_fraction(), engine_cpu=engine_cpu),
        ]
        more = " ".join(filter(None, sentences)) if verdict.bound != "collapse" else ""
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
