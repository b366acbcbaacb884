"""Measures which losses and corrections hold at which staleness: short runs at a forced staleness, on two tasks.

Every cell (task, candidate, staleness, seed) is an `asyncrl launch` with `replay.min_staleness` at the limit, so that
all tokens are equally old, however fast the machine is. Finished cells are kept in a file: an interrupted benchmark
continues where it stopped, and a candidate can be added.

    python -m benchmarks.stability                                    # all cells, many hours on two cores
    python -m benchmarks.stability --tasks guess --candidates ppo_clip --staleness 2 --seeds 1
    python -m benchmarks.stability --presets                          # the presets at their own limits
    python -m benchmarks.stability --show                             # the tables of the finished cells
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median

from asyncrl.config.load import load_config
from asyncrl.observe.collapse import REWARD, SMOOTHED_STEPS
from benchmarks.demo import launched, rows_of

RUN = "bench-stability"
RESULTS = Path(__file__).parent / "results" / "stability.jsonl"
STALENESS = (0, 1, 2, 4, 8)
SEEDS = 5
CELL_S = 1800.0
"""Deadline of a run."""

FOUR = "learner.minibatches=4"
TASKS: dict[str, list[str]] = {
    "demo": ["demo", "steps=60", "learner.warmup_steps=10", "learner.lr_schedule=constant"],
    "guess": ["guess", "steps=45"],
}
"""The preset of each task, and its overrides."""
CANDIDATES: dict[str, list[str]] = {
    "decoupled_ppo": ["algorithm.loss=decoupled_ppo"],
    "ppo_clip": ["algorithm.loss=ppo_clip"],
    "m2po": ["algorithm.loss=m2po"],
    "dppo": ["algorithm.loss=dppo"],
    "sapo": ["algorithm.loss=sapo"],
    "gspo": ["algorithm.loss=gspo", "algorithm.loss_options={clip_low: 0.2, clip_high: 0.28}"],
    "reinforce_is": ["algorithm.loss=reinforce_is"],
    "cispo": ["algorithm.loss=cispo", "algorithm.loss_options={clip_low: 1.0, clip_high: 4.0}"],
    "topr": ["algorithm.loss=topr"],
    "vespo": ["algorithm.loss=vespo"],
    "decoupled_ppo, token mask": [
        "algorithm.loss=decoupled_ppo", "algorithm.correction={mode: mask, low: 0.5, high: 5.0}",
    ],
    "decoupled_ppo, sequence mask": [
        "algorithm.loss=decoupled_ppo", "algorithm.correction={level: geometric, mode: mask, low: 0.8, high: 1.25}",
    ],
    "decoupled_ppo, mask_delta 0.1": ["algorithm.loss=decoupled_ppo", "algorithm.correction={mask_delta: 0.1}"],
    "decoupled_ppo, max_divergence 0.02": ["algorithm.loss=decoupled_ppo", "algorithm.max_divergence=0.02"],
    "ppo_clip, max_divergence 0.02": ["algorithm.loss=ppo_clip", "algorithm.max_divergence=0.02"],
    "decoupled_ppo, 4 updates": ["algorithm.loss=decoupled_ppo", FOUR],
    "ppo_clip, 4 updates": ["algorithm.loss=ppo_clip", FOUR],
}  # fmt: skip
"""Overrides of each candidate."""
PRESETS = (
    "demo", "guess", "calculator", "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "cispo", "gspo", "ppo_gae",
)  # fmt: skip
"""The presets for a laptop, each a task of its name that is trained at its own limit."""
AS_SHIPPED = "as shipped"
ON_POLICY = {False: "decoupled_ppo", True: "decoupled_ppo, 4 updates"}
"""The candidates that are trained at staleness 0, by whether a step has four updates. The others have the same gradient
there, since all ratios of a first update are 1."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One training."""

    task: str
    candidate: str
    staleness: int
    seed: int


@dataclass(frozen=True, slots=True)
class Result(Cell):
    """The result of a training. Rewards are the metric `reward/mean` of its steps."""

    end: float
    """Mean reward of the last SMOOTHED_STEPS steps."""
    best: float
    """Largest mean reward of as many steps in a row."""
    area: float
    """Mean reward over all steps."""
    divergence: float
    """Largest divergence of a step's tokens from the policy that sampled them, in nats a token."""
    ess: float
    """Smallest effective sample size of a step."""
    seconds: float

    @property
    def collapsed(self) -> bool:
        """True if its reward at the end is below the alarm's fraction of its best."""
        return self.end < REWARD * self.best


def train(cell: Cell) -> Result:
    """Runs a cell. Raises RuntimeError if the run fails."""
    preset, *overrides = TASKS.get(cell.task, [cell.task])
    overrides += [f"replay.{bound}_staleness={cell.staleness}" for bound in ("max", "min")]
    overrides += ["generator.engine=transformers", f"seed={cell.seed}", *CANDIDATES.get(cell.candidate, [])]
    began_s = time.monotonic()
    with launched(RUN, overrides, config=preset) as process:
        if process.wait(CELL_S):
            raise RuntimeError(f"{cell}: asyncrl launch ended with code {process.returncode}; see runs/{RUN}/logs")
    steps = rows_of(RUN)
    rewards = [step["reward/mean"] for step in steps]
    smooth = [fmean(rewards[at : at + SMOOTHED_STEPS]) for at in range(len(rewards) - SMOOTHED_STEPS + 1)]
    figures = {
        "end": smooth[-1],
        "best": max(smooth),
        "area": fmean(rewards),
        "divergence": max(step["correction/behavior_kl"] for step in steps),
        "ess": min(step["correction/ess"] for step in steps),
        "seconds": time.monotonic() - began_s,
    }
    return Result(**asdict(cell), **{name: float(f"{figure:.4g}") for name, figure in figures.items()})


def cells(tasks: Sequence[str], candidates: Sequence[str], staleness: Sequence[int], seeds: int) -> Iterator[Cell]:
    """Yields the cells, a complete seed before the next one."""
    for seed, lag, task, candidate in product(range(seeds), staleness, tasks, candidates):
        if lag or candidate in ON_POLICY.values():
            yield Cell(task, candidate, lag, seed)


def presets(seeds: int) -> Iterator[Cell]:
    """Yields the cells of the presets at their own limits."""
    for seed, name in product(range(seeds), PRESETS):
        yield Cell(name, AS_SHIPPED, load_config(name).replay.max_staleness, seed)


def read(file: Path) -> list[Result]:
    """Returns the results in the file."""
    return [Result(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def run(wanted: Sequence[Cell], file: Path) -> None:
    """Runs the cells one after the other, and appends each result to the file."""
    for number, cell in enumerate(wanted, start=1):
        result = train(cell)
        with file.open("a") as lines:
            lines.write(json.dumps(asdict(result)) + "\n")
        print(f"{number} of {len(wanted)}: {result}", flush=True)


def table(results: Sequence[Result], *, task: str) -> Iterator[str]:
    """Yields the lines of a Markdown table: a row for each candidate, a column for each staleness. A field has the
    median reward at the end and, in brackets, the median area against staleness 0 with the same seed; the largest
    divergence; the smallest effective sample size; and the number of runs that collapsed, if any did."""
    own = [result for result in results if result.task == task and result.candidate != AS_SHIPPED]
    staleness = sorted({result.staleness for result in own})
    yield f"| {task} | " + " | ".join(f"staleness {lag}" for lag in staleness) + " |"
    yield "|---" * (len(staleness) + 1) + "|"
    on_policy = {(r.candidate, r.seed): r for r in own if r.staleness == 0}
    for candidate in CANDIDATES:
        fields = []
        for lag in staleness:
            runs = [r for r in own if (r.candidate, r.staleness) == (candidate, lag)]
            fields.append(_describe(runs, on_policy) if runs else "")
        if any(fields):
            yield f"| {candidate} | " + " | ".join(fields) + " |"


def table_of_presets(results: Sequence[Result]) -> Iterator[str]:
    """Yields the lines of a Markdown table with the presets at their own limits, and fields as in `table`."""
    shipped = [result for result in results if result.candidate == AS_SHIPPED]
    if shipped:
        yield "| preset | staleness | |\n|---|---|---|"
    for name in PRESETS:
        if runs := [result for result in shipped if result.task == name]:
            yield f"| `{name}` | {runs[0].staleness} | {_describe(runs, {})} |"


def _describe(runs: Sequence[Result], on_policy: dict[tuple[str, int], Result]) -> str:
    four = FOUR in CANDIDATES.get(runs[0].candidate, [])
    ratios = [run.area / base.area for run in runs if (base := on_policy.get((ON_POLICY[four], run.seed)))]
    area = f" ({median(ratios):.2f})" if ratios else ""
    collapsed = sum(run.collapsed for run in runs)
    return (
        f"{median(run.end for run in runs):.2f}{area}, {max(run.divergence for run in runs):.2g}, "
        f"{min(run.ess for run in runs):.2f}" + (f", **{collapsed} of {len(runs)}**" if collapsed else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--candidates", nargs="*", default=list(CANDIDATES), choices=list(CANDIDATES))
    parser.add_argument("--staleness", type=int, nargs="*", default=list(STALENESS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--presets", action="store_true", help="the presets at their own limits")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--show", action="store_true", help="print the tables of the finished cells only")
    options = parser.parse_args()
    results = read(options.results)
    if not options.show:
        done = {(result.task, result.candidate, result.staleness, result.seed) for result in results}
        wanted = cells(options.tasks, options.candidates, options.staleness, options.seeds)
        wanted = presets(options.seeds) if options.presets else wanted
        left = [cell for cell in wanted if (cell.task, cell.candidate, cell.staleness, cell.seed) not in done]
        run(left, options.results)
        results = read(options.results)
    for task in dict.fromkeys(result.task for result in results if result.candidate in CANDIDATES):
        print("\n".join(table(results, task=task)), end="\n\n")
    print("\n".join(table_of_presets(results)))


if __name__ == "__main__":
    main()
