"""Compares policies that were trained with and without the book of prompts (`data.selection`), after equal time.

Equal time is what a user pays for: the book skips prompts, so that steps differ in their cost. The learning rate is
constant after its warm-up, so that no side is further on a schedule. The policies of both are scored on all rows by the
same scorer (`snapshots.py`), never by the rewards that they trained on: those are of harder prompts under selection. A
second pair of runs trains on half of the rows and is scored on the other half. Round n has seed n in all runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

from benchmarks.demo import DATA, prepare, train_for
from benchmarks.frame import SEED, CannotRun, Limit, Round, Row
from benchmarks.snapshots import QUICK_SAMPLES, SAMPLES, Scorer, Snapshot, at, of_run, overrides

RUN = "bench-selection"
TRAINED, HELD_OUT = DATA.with_name("trained-half.parquet"), DATA.with_name("held-out-half.parquet")
SECONDS, QUICK_SECONDS = 45.0, 8.0
"""Time from the first generation at which policies are compared."""
MARGIN_S = 8.0
"""Time after it in which the next policy is saved."""
EVERY_STEPS = 5
LIMITS = {
    f"reward with the book, {rows}": Limit(0.0, least_of=f"reward without, {rows}")
    for rows in ("all rows", "held-out half")
}


def halves() -> None:
    """Writes the two halves of the rows, which are in a random order, if they do not exist."""
    import pyarrow.parquet as pq

    rows = pq.read_table(DATA)
    half = rows.num_rows // 2
    for path, first in ((TRAINED, 0), (HELD_OUT, half)):
        if not path.exists():
            pq.write_table(rows.slice(first, half), path)


def reward_after(seconds: float, selection: str, data: Path, scorer: Scorer, seed: int) -> float:
    """Returns the reward of the policy that trained on `data` for this time."""
    options = [
        f"data.selection={selection}", f"data.train={data}", f"seed={seed}", *overrides(EVERY_STEPS),
    ]  # fmt: skip
    train_for(RUN, seconds + MARGIN_S, options)
    points = list(scorer.points(around(of_run(RUN), seconds)))
    try:
        return at(points, seconds).reward
    except ValueError as error:
        raise CannotRun(f"{error} in runs/{RUN}; it was too slow to be compared") from None


def around(snapshots: list[Snapshot], seconds: float) -> list[Snapshot]:
    """Returns the last snapshot before a time, and the first after it."""
    after = next((index for index, one in enumerate(snapshots) if one.seconds >= seconds), len(snapshots))
    return snapshots[max(after - 1, 0) : after + 1]


def measure(quick: bool) -> Iterator[Round]:
    from asyncrl.rewards.builtin import exact

    model, seconds = prepare(), QUICK_SECONDS if quick else SECONDS
    halves()
    samples = QUICK_SAMPLES if quick else SAMPLES
    kinds = {"all rows": (DATA, DATA), "held-out half": (TRAINED, HELD_OUT)}
    for seed in count():
        one: Round = {}
        for rows, (trained, scored) in kinds.items():
            scorer = Scorer(scored, model, exact, max_new_tokens=6, samples=samples)
            for name, selection in (("without", "off"), ("with the book", "on")):
                one[f"reward {name}, {rows}"] = reward_after(seconds, selection, trained, scorer, seed)
            one[f"difference, {rows}"] = one[f"reward with the book, {rows}"] - one[f"reward without, {rows}"]
        yield one | {SEED: seed}


ROW = Row(
    what=f"reward after {SECONDS:g} s of training, on all rows and on a half that was not trained",
    against="the same without the book of prompts, in equal time",
    limits=LIMITS,
    measure=measure,
    timeout_s=3600.0,
    rounds=3,
    long=True,
)
