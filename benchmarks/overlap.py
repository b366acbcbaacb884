"""Measures trained tokens/s of complete launches on a long-tailed workload, with a generator and a learner on one core
each.

Each launch is compared with the slower of its two sides, which is an upper bound: the engine with all slots busy and
the trainer on complete batches, both at the same time on a core each. The launch is held (SIGSTOP) after every second
step while the sides are measured, so that a machine that becomes slower or faster in the meantime does so for both. The
time of a launch is that in which it was not held.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.demo import launched, rows_of
from benchmarks.frame import CannotRun, Limit, Round, Row
from benchmarks.long_tail import prepare_long_tail, settings
from benchmarks.synchronous import Measured
from benchmarks.worker import Worker

LIMITS_STEPS = (1, 2, 4, 8)
"""Values of `max_staleness`, in learner steps."""
STEPS = 24
"""Number of measured steps. With fewer steps the result depends on the initial contents of the queue."""
WARM_STEPS = 3
SIDES_S = 2.0
"""Duration of each measurement of the two sides."""
BLOCK_STEPS = 2
"""Steps of the launch between two of them."""
LOGGED_S = 0.05
"""Time after the metrics of a step at which the launch is held: neither inside a commit, nor between it and them."""
POLL_S, TIMEOUT_S = 0.05, 600.0
ROLES = ("generator", "learner")


class Alone:
    """The engine on the first core and the trainer on the last, in processes that wait while the launch runs."""

    def __init__(self, model: str, *, stack: ExitStack) -> None:
        cores = sorted(os.sched_getaffinity(0))
        options = settings(model, steps=1, max_staleness=0)
        self._engine, self._learner = (
            Worker("benchmarks.synchronous", *options, cores=[core], stack=stack) for core in (cores[0], cores[-1])
        )

    def sides(self) -> list[Measured]:
        """Measures engine and trainer at the same time."""
        self._engine.tell(["engine", SIDES_S])
        self._learner.tell(["learner", SIDES_S])
        return [self._engine.answer(), self._learner.answer()]


@dataclass(slots=True)
class Hold:
    """A time in which the launch was held, after this number of steps."""

    steps: int
    seconds: float
    sides: list[Measured]


def run(model: str, limit: int, alone: Alone) -> Round:
    """Returns the figures of a launch with this staleness limit."""
    name = f"bench-overlap-{limit}"
    # The last steps train the contents of the queue after generation has ended.
    overrides = settings(model, steps=WARM_STEPS + STEPS + limit, max_staleness=limit)
    with launched(name, overrides) as process:
        holds = list(_holds(process, Path("runs") / name, alone, WARM_STEPS + STEPS))
        if process.wait(TIMEOUT_S):
            raise CannotRun(f"asyncrl launch ended with code {process.returncode}; see runs/{name}/logs")
    rows = rows_of(name)
    inside = [hold for hold in holds if WARM_STEPS <= hold.steps < WARM_STEPS + STEPS]
    rates = [sum(hold.sides[side]["tokens"] for hold in inside) / _seconds(inside, side) for side in (0, 1)]
    rate = tokens_per_s(rows[WARM_STEPS - 1 : WARM_STEPS + STEPS], sum(hold.seconds for hold in inside))
    return {
        f"S={limit} of the slower side": rate / min(rates),
        f"S={limit} tokens/s": rate,
        **{f"S={limit} {role} alone tokens/s": alone_rate for role, alone_rate in zip(ROLES, rates, strict=True)},
    }


def tokens_per_s(rows: list[dict[str, float]], held_s: float) -> float:
    """Returns the rate after the first of these steps, without the time in which the launch was held: the lower of the
    trained and the generated one, since a queue that drains or fills in the meantime increases one of them."""
    first, *counted = rows
    trained = sum(row["learner/tokens"] for row in counted)
    generated = counted[-1]["generator/tokens"] - first["generator/tokens"]
    return min(trained, generated) / (counted[-1]["time/elapsed_s"] - first["time/elapsed_s"] - held_s)


def _seconds(holds: list[Hold], side: int) -> float:
    return sum(hold.sides[side]["seconds"] for hold in holds)


def _holds(process: subprocess.Popen[bytes], folder: Path, alone: Alone, until: int) -> Iterator[Hold]:
    """Holds the launch after every few steps up to step `until`, and yields the measurements of that time."""
    seen, deadline_s = 0, time.monotonic() + TIMEOUT_S
    while seen < until and process.poll() is None:
        if time.monotonic() > deadline_s:
            raise CannotRun(f"asyncrl launch was not done after {TIMEOUT_S:g} s; see {folder}/logs")
        time.sleep(POLL_S)
        if _steps(folder) >= max(seen + BLOCK_STEPS, WARM_STEPS):
            time.sleep(LOGGED_S)
            seen = _steps(folder)
            yield hold(process.pid, seen, alone.sides)


def hold(launcher: int, steps: int, sides: Callable[[], list[Measured]]) -> Hold:
    """Holds a launcher and all that it started while `sides` measures."""
    top = psutil.Process(launcher)
    tree = [top, *top.children(recursive=True)]
    began_s = time.monotonic()
    _signal(tree, signal.SIGSTOP)
    try:
        measured = sides()
    finally:
        _signal(tree, signal.SIGCONT)
    return Hold(steps, time.monotonic() - began_s, measured)


def _signal(tree: list[psutil.Process], number: int) -> None:
    for process in tree:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:  # a worker that has ended
            continue


def _steps(folder: Path) -> int:
    """Returns the number of steps whose metrics are written."""
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def measure(_: bool) -> Iterator[Round]:
    model = prepare_long_tail()
    with ExitStack() as stack:
        alone = Alone(model, stack=stack)
        alone.sides()  # the first steps are slower
        while True:
            figures: Round = {}
            for limit in LIMITS_STEPS:
                figures |= run(model, limit, alone)
            yield figures


ROW = Row(
    what="tokens/s of asyncrl launch, long-tailed lengths, a generator and a learner on a core each",
    against="the slower side alone, the other core busy as well, in alternated blocks",
    limits={
        f"S={limit} of the slower side": Limit(0.93 if limit >= 4 else 0.9, never_above=1.03) for limit in LIMITS_STEPS
    },
    measure=measure,
    timeout_s=5400.0,
    long=True,
)
