"""Console output of `asyncrl simulate` and `asyncrl plan`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.plan.measured import Measured, read_run
from asyncrl.plan.simulation import Prediction, simulate
from asyncrl.plan.verdict import bottleneck_of, search
from asyncrl.plan.workload import Setup, SyntheticJob
from asyncrl.types import mean_staleness

ROWS = 12
"""Maximum number of rows in the table of a plan."""
TITLES = (
    "generators", "learners", "max\nstaleness", "signal\ntokens/s", "goodput", "idle\ngen.", "idle\nlearn.",
    "mean\nstaleness",
)  # fmt: skip


def show_simulation(
    console: Console, run: Path | None, numbers: Sequence[str], changes: dict[str, Any], *, seed: int = 0
) -> Prediction:
    """Simulates the job of a run, or the synthetic one of `KEY=VALUE` numbers, with changed settings, and prints the
    prediction. Raises ConfigError for invalid options and DataError for a run that cannot be read."""
    max_tokens = changes.pop("max_new_tokens", None)
    measured = None
    if run is not None:
        if numbers:
            raise ConfigError(f"{numbers[0]}: is read from the run of --from; leave one of them out")
        measured = read_run(run)
        workload, before = measured.workload, measured.setup
        if measured.collapse:
            console.print(f"{run} {measured.collapse}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    else:
        job = SyntheticJob.parse(numbers)
        before = Setup(
            generators=1, learners=1, max_staleness=1, groups_per_step=32, group_size=changes.get("group_size", 8),
            max_running_groups=64, steps=200,
        )  # fmt: skip
        workload = job.workload(before.group_size)
    if max_tokens is not None:
        workload = replace(workload, lengths=workload.lengths.cut(max_tokens))
    setup = replace(before, **changes)
    prediction = simulate(workload, setup, seed=seed)
    unchanged = measured if setup == before and max_tokens is None else None
    _print_prediction(console, prediction, unchanged, has_episodes=workload.lengths.episodes is not None)
    return prediction


def _print_prediction(
    console: Console, prediction: Prediction, measured: Measured | None, *, has_episodes: bool
) -> None:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column()
    table.add_column("simulated", justify="right")
    if measured is not None:
        table.add_column("measured", justify="right")
    histogram, real = (measured.staleness, measured.goodput) if measured is not None else ([], {})
    lines: list[tuple[str, str, float, float]] = [
        ("trained tokens/s", ",.0f", prediction.tokens_per_s, measured.tokens_per_s if measured else 0.0),
        *(
            ("goodput" if name == "total" else f"  {name}", ".3f", value, real.get(name, math.nan))
            for name, value in prediction.goodput.items()
        ),
        ("generators idle", ".1%", prediction.generator_idle, measured.generator_idle if measured else 0.0),
        *(
            [("generators in environments", ".1%", prediction.environments, measured.environments if measured else 0.0)]
            if has_episodes
            else []
        ),
        ("learners idle", ".1%", prediction.learner_idle, measured.learner_idle if measured else 0.0),
        ("staleness, mean", ".2f", prediction.staleness_mean, mean_staleness(histogram)),
        ("staleness, max", ".0f", prediction.staleness_max, max(len(histogram) - 1, 0)),
    ]
    for name, form, simulated, own in lines:
        own_text = "-" if math.isnan(own) else f"{own:{form}}"
        table.add_row(name, f"{simulated:{form}}", *([own_text] if measured is not None else []))
    setup = prediction.setup
    hidden = {"generators_per_device", *(["max_episodes"] if setup.max_episodes is None else [])}
    title = ", ".join(f"{name} {getattr(setup, name)}" for name in setup.__slots__ if name not in hidden)
    console.print(title, highlight=False, soft_wrap=True)
    console.print(table)
    total = max(sum(prediction.staleness), 1)
    shares = ", ".join(f"{staleness}: {tokens / total:.1%}" for staleness, tokens in enumerate(prediction.staleness))
    console.print(f"tokens by staleness  {shares}", highlight=False, soft_wrap=True)
    console.print(f"bottleneck           {bottleneck_of(prediction)}", highlight=False)


def show_plan(console: Console, run: Path, *, devices: int, max_staleness: int) -> list[Prediction]:
    """Prints the best splits of the devices for the job of a run, with limits at which it does not collapse. Raises
    ConfigError for invalid options and DataError for a run that cannot be read."""
    measured = read_run(run)
    if (highest := measured.highest_staleness) is not None:
        max_staleness = min(max_staleness, highest)
        why = f"only limits up to {highest} are tried" if highest >= 0 else "no limit is below 0: change that first"
        console.print(
            f"{run} {measured.collapse}\n{why}", style="yellow", highlight=False, markup=False, soft_wrap=True
        )
        if highest < 0:
            return []
    predictions = search(measured.workload, measured.setup, devices=devices, max_staleness=max_staleness)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for title in TITLES:
        table.add_column(title, justify="right")
    table.add_column("bottleneck")
    for p in predictions[:ROWS]:
        cells: tuple[Any, ...] = (
            p.setup.generators, p.setup.learners, p.setup.max_staleness, f"{p.signal_tokens_per_s:,.0f}",
            f"{p.goodput['total']:.0%}", f"{p.generator_idle:.0%}", f"{p.learner_idle:.0%}", f"{p.staleness_mean:.2f}",
            bottleneck_of(p),
        )  # fmt: skip
        table.add_row(*map(str, cells))
    console.print(
        f"{devices} devices, predicted from {run}; {len(predictions)} setups tried", highlight=False, soft_wrap=True
    )
    console.print(table)
    best = predictions[0].setup
    changed = ""
    config = (run if run.is_dir() else run.parent) / "config.yaml"
    if load_config(config).replay.min_staleness > best.max_staleness:
        changed = f" replay.min_staleness={best.max_staleness}"
    console.print(
        f"asyncrl launch --config {config} --generators {best.generators} --learners {best.learners} "
        f"--max-staleness {best.max_staleness}{changed}",
        style="bold",
        highlight=False,
        soft_wrap=True,
    )
    return predictions
