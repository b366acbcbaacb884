"""Measures trained tokens/s of complete launches on a long-tailed workload, with a generator and a learner on one core
each.

Each launch is compared with the slower of its two sides, which is an upper bound: the engine with all slots busy and
the trainer on complete batches, both at the same time on a core each, directly before and after the launch.
Synchronous training (`max_staleness` 0) is measured against a hand-written synchronous loop.
"""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.demo import launched, rows_of
from benchmarks.frame import CannotRun, Limit, Round, Row
from benchmarks.long_tail import prepare_long_tail, settings
from benchmarks.worker import Worker

LIMITS_STEPS = (1, 2, 4, 8)
"""Values of `max_staleness` in addition to 0, in learner steps."""
QUICK_LIMIT_STEPS = 4
STEPS, QUICK_STEPS = 24, 6
"""Number of measured steps. With fewer steps the result depends on the initial contents of the queue."""
WARM_STEPS = 3
SIDES_S, QUICK_SIDES_S = 15.0, 3.0
"""Duration of each measurement of the two sides."""
LOOP_STEPS, QUICK_LOOP_STEPS = 8, 2
TIMEOUT_S = 400.0


def tokens_per_s(model: str, max_staleness: int, *, quick: bool) -> float:
    """Returns tokens/s of a launch after its first steps: the lower of the trained and the generated rate, since a
    queue that drains or fills in the meantime increases one of them."""
    run, steps = f"bench-overlap-{max_staleness}", QUICK_STEPS if quick else STEPS
    shutil.rmtree(Path("runs") / run, ignore_errors=True)
    # The last steps train the contents of the queue after generation has ended.
    overrides = settings(model, steps=WARM_STEPS + steps + max_staleness, max_staleness=max_staleness, quick=quick)
    with launched(run, overrides) as process:
        if process.wait(TIMEOUT_S):
            raise CannotRun(f"asyncrl launch ended with code {process.returncode}; see runs/{run}/logs")
    rows = rows_of(run)
    first, *counted = rows[WARM_STEPS - 1 : WARM_STEPS + steps]
    last = counted[-1]
    trained = sum(row["learner/tokens"] for row in counted)
    generated = last["generator/tokens"] - first["generator/tokens"]
    return min(trained, generated) / (last["time/elapsed_s"] - first["time/elapsed_s"])


class Alone:
    """The engine on the first core and the trainer on the last, in processes that wait while a launch is measured."""

    def __init__(self, model: str, *, quick: bool, stack: ExitStack) -> None:
        self._seconds = QUICK_SIDES_S if quick else SIDES_S
        self._loop_steps = QUICK_LOOP_STEPS if quick else LOOP_STEPS
        cores = sorted(os.sched_getaffinity(0))
        options = settings(model, steps=1, max_staleness=0, quick=quick)
        self._engine, self._learner = (
            Worker("benchmarks.synchronous", *options, cores=[core], stack=stack) for core in (cores[0], cores[-1])
        )

    def sides(self) -> tuple[float, float]:
        """Returns tokens/s of engine and trainer, measured at the same time."""
        self._engine.tell(["engine", self._seconds])
        self._learner.tell(["learner", self._seconds])
        return self._engine.answer(), self._learner.answer()

    def loop(self) -> float:
        """Returns tokens/s of the synchronous loop on the first core."""
        self._engine.tell(["loop", self._loop_steps])
        return self._engine.answer()


def measure(quick: bool) -> Iterator[Round]:
    model = prepare_long_tail()
    limits = (QUICK_LIMIT_STEPS,) if quick else LIMITS_STEPS
    with ExitStack() as stack:
        alone = Alone(model, quick=quick, stack=stack)
        alone.sides()  # the first steps are slower
        while True:
            one: Round = {}
            blocks = [alone.sides()]
            for limit in limits:
                rate = tokens_per_s(model, limit, quick=quick)
                blocks.append(alone.sides())
                one[f"S={limit} of the slower side"] = rate / statistics.mean(map(min, blocks[-2:]))
                one[f"S={limit} tokens/s"] = rate
            if not quick:
                one |= synchronous(model, alone)
            engines, learners = zip(*blocks, strict=True)
            one["generator alone tokens/s"] = statistics.mean(engines)
            one["learner alone tokens/s"] = statistics.mean(learners)
            yield one


def synchronous(model: str, alone: Alone) -> Round:
    """Returns the figures of S = 0 against the hand-written loop, measured directly before and after it."""
    before, rate, after = alone.loop(), tokens_per_s(model, 0, quick=False), alone.loop()
    loop = (before + after) / 2
    return {"S=0 of a plain loop": rate / loop, "S=0 tokens/s": rate, "plain loop tokens/s": loop}


ROW = Row(
    what="tokens/s of asyncrl launch, long-tailed lengths, a generator and a learner on a core each",
    against="the slower side alone, the other core busy as well; for S = 0, a hand-written synchronous loop",
    limits={
        **{f"S={limit} of the slower side": Limit(0.93 if limit == 4 else 0.9, bound=True) for limit in LIMITS_STEPS},
        "S=0 of a plain loop": Limit(1.0),
    },
    measure=measure,
    timeout_s=5400.0,
    long=True,
)
