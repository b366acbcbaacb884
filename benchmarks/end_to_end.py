"""Trains two workloads in `asyncrl launch` and in TRL's GRPOTrainer, on both cores each.

demo: seconds and generated tokens until the policy has a reward of 0.85 on all prompts, by the same scorer
(`snapshots.py`). Model, data, group size, batch, learning rate and schedule are the same; what becomes of groups with
equal rewards is each side's own: TRL trains them.

long-tailed: trained tokens/s with the lengths of `long_tail.py`; rewards are artificial, and both sides train every
group.

Start-up does not count: the clocks start with the first generation. Round n has seed n on both sides.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from benchmarks import demo
from benchmarks.demo import DATA, launched, prepare, rows_of
from benchmarks.frame import SEED, CannotRun, Limit, Round, Row
from benchmarks.long_tail import prepare_long_tail, settings
from benchmarks.snapshots import (
    EVERY_STEPS,
    QUICK_SAMPLES,
    SAMPLES,
    Point,
    Scorer,
    Snapshot,
    of_run,
    overrides,
    reach,
)
from benchmarks.trl_side import Job, Step
from benchmarks.trl_side import run as run_trl

RUN = "bench-end-to-end"
REWARD, QUICK_REWARD = 0.85, 0.3
STEPS, QUICK_STEPS = 300, 20
"""Steps of the demo. The learning rate falls to 0 with the last one, in a quick run as well, which ends earlier."""
LONG_STEPS, QUICK_LONG_STEPS, LONG_WARM_STEPS = 12, 3, 3
"""Steps of the long-tailed workload that count, and those before them."""
TIMEOUT_S = 600.0


def launch(settings: list[str], steps: int) -> list[Step]:
    """Runs `asyncrl launch` for `steps` steps, and returns them."""
    with launched(RUN, [*settings, f"steps={steps}"]) as process:
        if process.wait(TIMEOUT_S):
            raise CannotRun(f"asyncrl launch ended with code {process.returncode}; see runs/{RUN}/logs")
    return [{"seconds": row["time/elapsed_s"], "tokens": row["learner/tokens"]} for row in rows_of(RUN)]


def to_reward(seed: int, scorer: Scorer, *, quick: bool) -> Round:
    """Returns the figures of the demo."""
    own = _reach(_ours(seed, quick=quick), scorer, "asyncrl launch", quick=quick)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            [f"steps={STEPS}", *demo.OVERRIDES], seed, stop_after=QUICK_STEPS if quick else 0, snapshots=folder,
            every=EVERY_STEPS,
        )  # fmt: skip
        theirs = _reach(_of_trl(run_trl(job), Path(folder)), scorer, "TRL", quick=quick)
    return {
        "seconds of TRL, demo": own.seconds / theirs.seconds,
        "generated tokens of TRL, demo": own.tokens / theirs.tokens,
        "seconds to reward": own.seconds,
        "TRL seconds to reward": theirs.seconds,
        "tokens to reward": own.tokens,
        "TRL tokens to reward": theirs.tokens,
        "steps to reward": own.step,
        "TRL steps to reward": theirs.step,
    }


def _ours(seed: int, *, quick: bool) -> list[Snapshot]:
    """Returns the snapshots of a launch. A quick one ends early by a schedule that does not fall to 0."""
    schedule = ["learner.lr_schedule=constant"] if quick else []
    launch([f"seed={seed}", *overrides(), *schedule], QUICK_STEPS if quick else STEPS)
    return of_run(RUN)


def _of_trl(steps: list[Step], folder: Path) -> list[Snapshot]:
    found, tokens = [], 0.0
    for number, step in enumerate(steps, 1):
        tokens += step["tokens"]
        if (folder / str(number)).exists():
            found.append(Snapshot(number, step["seconds"], tokens, folder / str(number)))
    return found


def _reach(snapshots: list[Snapshot], scorer: Scorer, side: str, *, quick: bool) -> Point:
    reward = QUICK_REWARD if quick else REWARD
    if (point := reach(scorer.points(snapshots), reward)) is None:
        raise CannotRun(f"{side} did not reach a reward of {reward} in {snapshots[-1].step if snapshots else 0} steps")
    return point


def long_tailed(model: str, seed: int, *, quick: bool) -> Round:
    """Returns the figures of the long-tailed workload, with the demo's staleness limit."""
    from asyncrl.config.load import load_config

    steps = LONG_WARM_STEPS + (QUICK_LONG_STEPS if quick else LONG_STEPS)
    limit = load_config("demo").replay.staleness_limit
    # The last steps train the contents of the queue after generation has ended.
    options = [*settings(model, steps=steps + limit, max_staleness=limit, quick=quick), f"seed={seed}"]
    own = tokens_per_s(launch(options, steps + limit)[:steps])
    theirs = tokens_per_s(run_trl(Job([*options, *demo.OVERRIDES], seed, stop_after=steps)))
    return {"tokens/s of TRL, long-tailed": own / theirs, "tokens/s": own, "TRL tokens/s": theirs}


def tokens_per_s(steps: list[Step]) -> float:
    """Returns the trained tokens/s after the first steps."""
    seconds = steps[-1]["seconds"] - steps[LONG_WARM_STEPS - 1]["seconds"]
    return sum(step["tokens"] for step in steps[LONG_WARM_STEPS:]) / seconds


def measure(quick: bool) -> Iterator[Round]:
    from asyncrl.rewards.builtin import exact

    if importlib.util.find_spec("trl") is None:
        raise CannotRun("TRL is not installed: pip install -e .[bench]")
    model, long_model = prepare(), prepare_long_tail()
    scorer = Scorer(DATA, model, exact, max_new_tokens=6, samples=QUICK_SAMPLES if quick else SAMPLES)
    for seed in count():
        yield to_reward(seed, scorer, quick=quick) | long_tailed(long_model, seed, quick=quick) | {SEED: seed}


ROW = Row(
    what=f"seconds and tokens to a reward of {REWARD} on the demo; trained tokens/s with long-tailed lengths",
    against="TRL's GRPOTrainer with the same model, data, batch and learning rate on both cores",
    limits={"seconds of TRL, demo": Limit(0.6, at_most=True), "tokens/s of TRL, long-tailed": Limit(3.0)},
    measure=measure,
    timeout_s=5400.0,
    rounds=3,
    long=True,
)
