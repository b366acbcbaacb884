"""Compares the simulator, calibrated on one real run, with other real runs.

Runs the long-tailed workload at several staleness limits with one and two generators, alternately, and prints the
median result of each setup's runs next to the simulated result. The workload is read from one run of the first setup,
in which generators drain at every step, so that it contains the cost of steps with few and with many sequences. The
cost of two engines sharing a core cannot be read from a run with one engine: it is measured separately, in every round
(`benchmarks/turns.py`).

    python -m benchmarks.simulated --steps 20 --rounds 3
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median

from asyncrl.plan.measured import Measured, read_run
from asyncrl.plan.simulation import simulate
from asyncrl.plan.workload import Workload
from benchmarks.demo import launched
from benchmarks.frame import CannotRun
from benchmarks.long_tail import GROUP_SIZE, RUNNING_GROUPS, prepare_long_tail, settings
from benchmarks.turns import measure

LIMITS, GENERATORS = (0, 2, 8), (1, 2)
"""The first of each is the setup on which the simulator is calibrated."""
SEEDS = 5
"""Number of simulations of each run, whose mean is compared, since the drawn lengths are random."""
TIMEOUT_S = 1200.0
TURNS_BLOCKS = 61


@dataclass(frozen=True, slots=True)
class Compared:
    max_staleness: int
    generators: int
    tokens_per_s: float
    simulated_tokens_per_s: float
    generator_idle: float
    simulated_generator_idle: float
    learner_idle: float
    simulated_learner_idle: float
    every_tokens_per_s: list[float]
    """Throughput of each run."""
    oldest: int
    """Highest staleness of a trained token in the real runs."""

    @property
    def error(self) -> float:
        """Relative error of the simulated throughput."""
        return self.simulated_tokens_per_s / self.tokens_per_s - 1


def run_folder(max_staleness: int, generators: int, number: int) -> Path:
    return Path("runs") / f"simulated-s{max_staleness}-g{generators}-{number}"


def run(model: str, max_staleness: int, generators: int, number: int, steps: int) -> None:
    folder = run_folder(max_staleness, generators, number)
    overrides = settings(model, steps=steps, max_staleness=max_staleness, quick=False)
    with launched(folder.name, [*overrides, f"launch.generators={generators}"]) as process:
        if process.wait(TIMEOUT_S):
            raise CannotRun(f"asyncrl launch ended with code {process.returncode}; see {folder}/logs")


def compare(runs: list[Measured], workload: Workload) -> Compared:
    """Returns the comparison of one setup's runs with its simulations."""
    setup = runs[0].setup
    simulated = [simulate(workload, setup, seed=seed) for seed in range(SEEDS)]

    def real(name: str) -> float:
        return median(getattr(one, name) for one in runs)

    def predicted(name: str) -> float:
        return fmean(getattr(one, name) for one in simulated)

    return Compared(
        setup.max_staleness,
        setup.generators,
        real("tokens_per_s"),
        predicted("tokens_per_s"),
        real("generator_idle"),
        predicted("generator_idle"),
        real("learner_idle"),
        predicted("learner_idle"),
        [one.tokens_per_s for one in runs],
        max(len(one.staleness) for one in runs) - 1,
    )


def show(rows: Iterable[Compared]) -> None:
    titles = ("max_staleness", "generators", "tokens/s", "least to largest", "simulated", "", "generators idle")
    print(f"| {' | '.join(titles)} | simulated | learner idle | simulated | oldest token |\n{'|---' * 11}|")
    for row in rows:
        print(
            f"| {row.max_staleness} | {row.generators} | {row.tokens_per_s:,.0f} | "
            f"{min(row.every_tokens_per_s):,.0f} to {max(row.every_tokens_per_s):,.0f} | "
            f"{row.simulated_tokens_per_s:,.0f} | {row.error:+.1%} | "
            f"{row.generator_idle:.3f} | {row.simulated_generator_idle:.3f} | "
            f"{row.learner_idle:.3f} | {row.simulated_learner_idle:.3f} | {row.oldest} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1, help="Number of runs of every setup.")
    parser.add_argument(
        "--again", type=float, metavar="TURNS", help="Only compare existing runs; TURNS is the value that they printed."
    )
    parser.add_argument("--json", type=Path, help="File to write the figures to.")
    options = parser.parse_args()
    model, turns = prepare_long_tail(), [] if options.again is None else [options.again]
    # Setups that differ only in their generators run in sequence, since the speed of the machine varies over hours.
    setups = [(limit, generators) for limit in LIMITS for generators in GENERATORS]
    for number in range(options.rounds if options.again is None else 0):
        _, ratios = measure(model, running=RUNNING_GROUPS * GROUP_SIZE, blocks=TURNS_BLOCKS)
        turns.append(median(ratios) / 2)
        for limit, generators in setups:
            run(model, limit, generators, number, options.steps)
    found = [[read_run(run_folder(*setup, number)) for number in range(options.rounds)] for setup in setups]
    first = sorted(found[0], key=lambda one: one.tokens_per_s)
    workload = replace(first[len(first) // 2].workload, turns=median(turns))
    print(f"turns: {median(turns):.3f} ({', '.join(f'{one:.3f}' for one in turns)})")
    rows = [compare(runs, workload) for runs in found]
    show(rows)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
