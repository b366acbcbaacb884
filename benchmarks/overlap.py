"""Trained tokens/s of whole launches on a long-tailed workload, one generator and one learner on a core each.

Asynchronous runs are measured against the slower of the two sides alone, and against the synchronous run
(`max_staleness` 0), which is measured against a hand-written synchronous loop.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks.demo import launched, rows_of
from benchmarks.frame import CannotRun, Limit, Round, Row
from benchmarks.long_tail import prepare_long_tail, settings
from benchmarks.synchronous import synchronous

LIMITS_STEPS = (1, 2, 4, 8)
"""Values of `max_staleness` beside 0, in learner steps."""
OVERLAPPED = 4
"""The one of a quick bench, and of the comparison with the slower side."""
STEPS, QUICK_STEPS = 4, 3
WARM_STEPS = 2
TIMEOUT_S = 400.0


def trained_tokens_per_s(model: str, max_staleness: int, *, quick: bool) -> float:
    """Of a run's steps after the first ones."""
    run, steps = f"bench-overlap-{max_staleness}", QUICK_STEPS if quick else STEPS
    shutil.rmtree(Path("runs") / run, ignore_errors=True)
    overrides = settings(model, steps=WARM_STEPS + steps, max_staleness=max_staleness, quick=quick)
    with launched(run, overrides) as process:
        if process.wait(TIMEOUT_S):
            raise CannotRun(f"asyncrl launch ended with code {process.returncode}; see runs/{run}/logs")
    rows = rows_of(run)
    tokens = sum(row["learner/tokens"] for row in rows[WARM_STEPS:])
    return tokens / (rows[-1]["time/elapsed_s"] - rows[WARM_STEPS - 1]["time/elapsed_s"])


def measure(quick: bool) -> Iterator[Round]:
    model = prepare_long_tail()
    steps = QUICK_STEPS if quick else STEPS
    while True:
        plain = synchronous(steps, settings(model, steps=steps, max_staleness=0, quick=quick))
        limits = (OVERLAPPED,) if quick else (0, *LIMITS_STEPS)
        rates = {limit: trained_tokens_per_s(model, limit, quick=quick) for limit in limits}
        sides = plain["generator tokens/s"], plain["learner tokens/s"]
        yield {
            "of the slower side": rates[OVERLAPPED] / min(sides),
            **({} if quick else of_synchronous(rates, plain["tokens/s"], sides)),
            **{f"S={limit} tokens/s": rate for limit, rate in rates.items()},
            **{name if " " in name else f"plain loop {name}": rate for name, rate in plain.items()},
        }


def of_synchronous(rates: dict[int, float], plain: float, sides: tuple[float, float]) -> Round:
    """Speed-ups over the synchronous run, as parts of what the sides make possible; that run against the plain loop."""
    possible = sum(1 / side for side in sides) * min(sides)
    return {
        **{f"S={limit} of possible": rates[limit] / rates[0] / possible for limit in LIMITS_STEPS},
        "S=0 of a plain loop": rates[0] / plain,
        "possible": possible,
    }


ROW = Row(
    what="trained tokens/s of asyncrl launch, long-tailed lengths, a generator and a learner on a core each",
    against="the slower side alone; what the sides let S = 0 gain; for S = 0, a hand-written synchronous loop",
    limits={
        "of the slower side": Limit(0.93),
        **{f"S={limit} of possible": Limit(0.9) for limit in LIMITS_STEPS},
        "S=0 of a plain loop": Limit(1.0),
    },
    measure=measure,
    timeout_s=3600.0,
    long=True,
)
