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

LIMITS_STEPS, QUICK_LIMITS_STEPS = (1, 2, 4, 8), (4,)
"""Values of `max_staleness` beside 0, in learner steps."""
OVERLAPPED = 4
STEPS, QUICK_STEPS = 4, 2
WARM_STEPS, QUICK_WARM_STEPS = 2, 1
TIMEOUT_S = 400.0


def trained_tokens_per_s(model: str, max_staleness: int, *, steps: int, warm: int) -> float:
    """Of a run's steps after the first ones."""
    run = f"bench-overlap-{max_staleness}"
    shutil.rmtree(Path("runs") / run, ignore_errors=True)
    with launched(run, settings(model, steps=warm + steps, max_staleness=max_staleness)) as process:
        if process.wait(TIMEOUT_S):
            raise CannotRun(f"asyncrl launch ended with code {process.returncode}; see runs/{run}/logs")
    rows = rows_of(run)
    tokens = sum(row["learner/tokens"] for row in rows[warm:])
    return tokens / (rows[-1]["time/elapsed_s"] - rows[warm - 1]["time/elapsed_s"])


def measure(quick: bool) -> Iterator[Round]:
    model = prepare_long_tail()
    steps, warm = (QUICK_STEPS, QUICK_WARM_STEPS) if quick else (STEPS, WARM_STEPS)
    while True:
        control = synchronous(steps, settings(model, steps=steps, max_staleness=0))
        sides = [control["generator tokens/s"], control["learner tokens/s"]]
        possible = sum(1 / side for side in sides) * min(sides)
        synchronous_rate = trained_tokens_per_s(model, 0, steps=steps, warm=warm)
        rates = {
            limit: trained_tokens_per_s(model, limit, steps=steps, warm=warm)
            for limit in (QUICK_LIMITS_STEPS if quick else LIMITS_STEPS)
        }
        yield {
            "of the slower side": rates[OVERLAPPED] / min(sides),
            **{f"S={limit} of possible": rate / synchronous_rate / possible for limit, rate in rates.items()},
            "S=0 of a plain loop": synchronous_rate / control["tokens/s"],
            "possible": possible,
            **{f"S={limit} tokens/s": rate for limit, rate in {0: synchronous_rate, **rates}.items()},
            **{name if " " in name else f"plain loop {name}": rate for name, rate in control.items()},
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
)
