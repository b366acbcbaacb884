"""Console output of `asyncrl simulate` and `asyncrl plan`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.plan.measured import Measured, read_run
from asyncrl.plan.simulation import Prediction, simulate
from asyncrl.plan.verdict import Candidate, bottleneck_of, predict, search
from asyncrl.plan.workload import (
    CHOICES,
    TURNS,
    EngineCost,
    Episodes,
    LearnerCost,
    Lengths,
    Setup,
    SyncCost,
    Workload,
    ZeroVariance,
)
from asyncrl.types import mean_staleness
from asyncrl.util.model_files import replayed_routers

QUEUE_GROUP_S, QUEUE_BYTE_S = 0.56e-3, 1.22e-9
"""Time of the replay queue's core for a group and for each of its bytes: 0.7 ms at 118 KB and 2.8 ms at 1.84 MB."""
TOKEN_BYTES = 13
"""Bytes of a token in a group."""
ROWS = 12
"""Maximum number of rows in the table of a plan."""
MAX_TOKENS = 2.0**27
"""Maximum length of a completion or prompt, since the lengths of a group and their sums are 32-bit numbers."""
RANGES = {
    "mean_tokens": (1.0, MAX_TOKENS),
    "max_tokens": (1.0, MAX_TOKENS),
    "prompt_tokens": (0.0, MAX_TOKENS),
    "sigma": (0.0, 10.0),
    "refunded_fraction": (0.0, 1.0),
    "episode_turns": (1.0, 1e4),
    "turn_wait_share": (0.0, 1.0),
}
"""Range of each option of a synthetic workload. Options without a range here are times of at least 0."""
TITLES = (
    "generators", "learners", "max\nstaleness", "signal\ntokens/s", "goodput", "idle\ngen.", "idle\nlearn.",
    "mean\nstaleness",
)  # fmt: skip
CHOICE_TITLES = (
    "replay.\nzero_variance", "steps/s", "signal\ntokens/s", "signal\ntokens a step", "goodput", "idle\ngen.",
    "idle\nlearn.",
)  # fmt: skip


def show_simulation(
    console: Console,
    run: Path | None,
    numbers: dict[str, float],
    changes: dict[str, Any],
    *,
    turns: float | None = None,
    seed: int = 0,
) -> Prediction:
    """Simulates the job of a run, or a synthetic job, with changed settings, and prints the prediction. Raises
    ConfigError for invalid options and DataError for a run that cannot be read."""
    max_tokens = changes.pop("max_new_tokens", None)
    turns = TURNS if turns is None else turns
    if run is not None:
        given = [name for name in numbers if numbers[name] is not None]
        if given:
            raise ConfigError(f"--{given[0].replace('_', '-')}: is read from the run of --from; leave one of them out")
        measured = read_run(run, turns=turns)
        workload, before = measured.workload, measured.setup
        if measured.collapse:
            console.print(f"{run} {measured.collapse}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    else:
        measured = None
        workload, before = made_up(numbers, changes)
        workload = replace(workload, turns=turns)
    if max_tokens is not None:
        workload = replace(workload, lengths=workload.lengths.cut(max_tokens))
    setup = replace(before, **changes)
    found = simulate(workload, setup, seed=seed)
    unchanged = measured if setup == before and max_tokens is None else None
    _print_prediction(console, found, unchanged, has_episodes=workload.lengths.episodes is not None)
    routing_bytes = _routing_of(run) if run is not None else round(numbers.get("routing_bytes", 0))
    _print_queue(console, found, workload.lengths, routing_bytes)
    return found


def made_up(numbers: dict[str, float], changes: dict[str, int]) -> tuple[Workload, Setup]:
    """Returns a synthetic workload from the options of `asyncrl simulate`, and a default setup."""
    missing = [name for name in ("mean_tokens", "engine_base_ms", "learner_token_us") if numbers.get(name) is None]
    if missing:
        raise ConfigError(
            f"--{missing[0].replace('_', '-')}: is missing; use --from runs/NAME, or --mean-tokens, --engine-base-ms "
            "and --learner-token-us at least"
        )
    n = {name: value for name, value in numbers.items() if value is not None}
    for name, value in n.items():
        check_number(name, value)
    setup = Setup(
        generators=1, learners=1, max_staleness=1, groups_per_step=32, group_size=8, max_running_groups=64, steps=200
    )
    lengths = Lengths.log_normal(
        mean_tokens=n["mean_tokens"],
        sigma=n.get("sigma", 1.0),
        max_tokens=round(n.get("max_tokens", min(8 * n["mean_tokens"], MAX_TOKENS))),
        group_size=changes.get("group_size", setup.group_size),
        prompt_tokens=round(n.get("prompt_tokens", 0)),
        refunded_fraction=n.get("refunded_fraction", 0.0),
    )
    if any(name in n for name in ("episode_turns", "turn_wait_s", "turn_wait_share")):
        lengths = replace(lengths, episodes=_episodes(lengths, n))
    workload = Workload(
        lengths,
        EngineCost(
            n["engine_base_ms"] / 1e3, n.get("engine_sequence_us", 0.0) / 1e6, n.get("engine_request_ms", 0.0) / 1e3
        ),
        LearnerCost(n.get("learner_base_s", 0.0), n["learner_token_us"] / 1e6),
        SyncCost(n.get("broadcast_s", 0.0), 0.0, n.get("swap_ms", 0.0) / 1e3),
        n.get("reward_s", 0.0),
    )
    return workload, replace(setup, group_size=lengths.group_size)


def _episodes(lengths: Lengths, numbers: dict[str, float]) -> Episodes:
    """Returns the episodes of a synthetic workload. Raises ConfigError for a wait that can never come."""
    turns = round(numbers.get("episode_turns", 1))
    if turns == 1:
        raise ConfigError("--episode-turns: is missing or 1: an episode waits after the turns that another follows")
    return Episodes.of_shape(
        lengths.completions.shape,
        turns=turns,
        wait_s=numbers.get("turn_wait_s", 0.0),
        wait_share=numbers.get("turn_wait_share", 1.0),
        seed=0,
    )


def check_number(name: str, value: float) -> None:
    """Raises ConfigError for an option of a synthetic workload that is out of range."""
    least, most = RANGES.get(name, (0.0, float("inf")))
    if not (math.isfinite(value) and least <= value <= most):
        upper = f", at most {most:,.10g}" if math.isfinite(most) else ""
        raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be at least {least:g}{upper}")


def _print_prediction(console: Console, found: Prediction, measured: Measured | None, *, has_episodes: bool) -> None:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column()
    table.add_column("simulated", justify="right")
    if measured is not None:
        table.add_column("measured", justify="right")
    histogram, real = (measured.staleness, measured.goodput) if measured is not None else ([], {})
    lines: list[tuple[str, str, float, float]] = [
        ("trained tokens/s", ",.0f", found.tokens_per_s, measured.tokens_per_s if measured else 0.0),
        *(
            ("goodput" if name == "total" else f"  {name}", ".3f", value, real.get(name, math.nan))
            for name, value in found.goodput.table().items()
        ),
        ("generators idle", ".1%", found.generator_idle, measured.generator_idle if measured else 0.0),
        *(
            [("generators in environments", ".1%", found.environments, measured.environments if measured else 0.0)]
            if has_episodes
            else []
        ),
        ("learners idle", ".1%", found.learner_idle, measured.learner_idle if measured else 0.0),
        ("staleness, mean", ".2f", found.staleness_mean, mean_staleness(histogram)),
        ("staleness, max", ".0f", found.staleness_max, max(len(histogram) - 1, 0)),
    ]
    for name, form, simulated, own in lines:
        own_text = "-" if math.isnan(own) else f"{own:{form}}"
        table.add_row(name, f"{simulated:{form}}", *([own_text] if measured is not None else []))
    table.add_row("tokens in flight, mean", f"{found.tokens_in_flight:,.0f}")
    table.add_row("groups in flight, mean", f"{found.groups_in_flight:,.1f}")
    table.add_row("seconds from lease to training", f"{found.life_s:.2f}")
    setup = found.setup
    hidden = {"generators_per_device", *(["max_episodes"] if setup.max_episodes is None else [])}
    title = ", ".join(f"{name} {getattr(setup, name)}" for name in setup.__slots__ if name not in hidden)
    console.print(title, highlight=False, soft_wrap=True)
    console.print(table)
    total = max(sum(found.staleness), 1)
    shares = ", ".join(f"{staleness}: {tokens / total:.1%}" for staleness, tokens in enumerate(found.staleness))
    console.print(f"tokens by staleness  {shares}", highlight=False, soft_wrap=True)
    console.print(f"bottleneck           {bottleneck_of(found)}", highlight=False)


def _routing_of(run: Path) -> int:
    """Returns the bytes of a token's routing in a run; 0 without `algorithm.routing_replay`."""
    config = load_config((run if run.is_dir() else run.parent) / "config.yaml")
    model = config.model
    routers = replayed_routers(config.algorithm.routing_replay, model.path, trust_remote_code=model.trust_remote_code)
    return 0 if routers is None else routers.token_bytes


def _print_queue(console: Console, found: Prediction, lengths: Lengths, routing_bytes: int) -> None:
    """Prints the bytes that go through the replay queue, and how busy it is."""
    tokens = float((lengths.completions.sum(axis=1) + lengths.group_size * lengths.prompts).mean())
    groups_per_s, group_bytes = found.leased_groups / found.wall_s, (TOKEN_BYTES + routing_bytes) * tokens
    routing = f", of a token {routing_bytes} for its routing" if routing_bytes else ""
    console.print(
        f"replay queue         {groups_per_s * group_bytes / 1e6:,.3g} MB/s{routing}, busy for "
        f"{groups_per_s * (QUEUE_GROUP_S + QUEUE_BYTE_S * group_bytes):.2g} of its one core (estimated)",
        highlight=False,
        soft_wrap=True,
    )


def show_plan(console: Console, run: Path, *, devices: int, max_staleness: int) -> list[Candidate]:
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
    found = search(measured.workload, measured.setup, devices=devices, max_staleness=max_staleness)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for title in TITLES:
        table.add_column(title, justify="right")
    table.add_column("bottleneck")
    for candidate in found[:ROWS]:
        p = candidate.prediction
        cells: tuple[Any, ...] = (
            p.setup.generators, p.setup.learners, p.setup.max_staleness, f"{p.signal_tokens_per_s:,.0f}",
            f"{p.goodput.total:.0%}", f"{p.generator_idle:.0%}", f"{p.learner_idle:.0%}", f"{p.staleness_mean:.2f}",
            candidate.bottleneck,
        )  # fmt: skip
        table.add_row(*map(str, cells))
    console.print(
        f"{devices} devices, predicted from {run}; {len(found)} setups tried", highlight=False, soft_wrap=True
    )
    console.print(table)
    best = found[0].prediction.setup
    comparison = compare_choices(measured.workload, best)
    changed = ""
    if comparison is not None:
        _print_comparison(console, comparison)
        changed = f" replay.zero_variance={RECOMMENDED}" if best.zero_variance != RECOMMENDED else ""
    config = (run if run.is_dir() else run.parent) / "config.yaml"
    if load_config(config).replay.min_staleness > best.max_staleness:
        changed += f" replay.min_staleness={best.max_staleness}"
    console.print(
        f"asyncrl launch --config {config} --generators {best.generators} --learners {best.learners} "
        f"--max-staleness {best.max_staleness}{changed}",
        style="bold",
        highlight=False,
        soft_wrap=True,
    )
    return found


def _print_comparison(console: Console, comparison: Comparison) -> None:
    """Prints the consequences of each choice with the best split, and the recommended one."""
    console.print(
        f"\n{comparison.without_signal:.0%} of the groups have no signal; the first split with each "
        "replay.zero_variance:",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for title in CHOICE_TITLES:
        table.add_column(title, justify="left" if title == CHOICE_TITLES[0] else "right")
    for choice, p in comparison.predictions.items():
        table.add_row(
            choice, f"{p.steps_per_s:.3g}", f"{p.signal_tokens_per_s:,.0f}",
            f"{p.signal_tokens_per_s / p.steps_per_s:,.0f}", f"{p.goodput.total:.0%}", f"{p.generator_idle:.0%}",
            f"{p.learner_idle:.0%}",
        )  # fmt: skip
    console.print(table)
    console.print(
        f"use {RECOMMENDED}: what a step learns is not simulated, and in the measured workloads (docs/staleness.md) no "
        "other choice had a higher reward after equal time.",
        highlight=False,
        soft_wrap=True,
    )


FEW = 0.02
"""Fraction of groups without signal below which the choice makes no difference."""
RECOMMENDED: ZeroVariance = "refund"
"""The choice with the highest reward after equal time in the measured workloads (docs/staleness.md)."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The simulator's prediction of each choice."""

    without_signal: float
    """Fraction of the groups that have no signal."""
    predictions: dict[ZeroVariance, Prediction]


def compare_choices(workload: Workload, setup: Setup) -> Comparison | None:
    """Returns the comparison for a workload with this setup; None if nearly all groups have a signal.

    The simulator knows how often a step comes and what it is made of, but not how much the policy learns from it. So
    the recommendation is the measured one, and does not depend on the predictions.
    """
    without = float((~workload.lengths.signal & ~workload.lengths.failed).mean())
    if without < FEW:
        return None
    return Comparison(without, {choice: predict(workload, replace(setup, zero_variance=choice)) for choice in CHOICES})
