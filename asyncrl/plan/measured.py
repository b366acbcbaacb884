"""What a run has shown of its job: the workload and the setup for the simulator, and what came out of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from asyncrl.config import Config, load_config
from asyncrl.errors import DataError
from asyncrl.observe.report import read_metrics
from asyncrl.plan.trace import read_trace
from asyncrl.plan.workload import TURNS, EngineCost, LearnerCost, Lengths, Setup, SyncCost, Workload, slowdown
from asyncrl.replay.measure import COSTS

GROUPS_AT_MOST = 16384
"""Whose lengths are kept."""
STEPS_AT_LEAST = 3
WARM_STEPS = 2
"""First steps whose times are left out, where there are others: what is compiled or allocated once is in them."""
SPREAD_AT_LEAST = 0.1
"""Of the tokens of the steps, relative to their mean: below it the time of a step is all counted by its tokens."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A run as the simulator sees it."""

    workload: Workload
    setup: Setup
    tokens_per_s: float
    generator_idle: float
    learner_idle: float
    staleness: list[int]
    """Trained action tokens by staleness, in learner steps."""


def read_run(path: Path, *, generators_per_device: int | None = None, turns: float = TURNS) -> Measured:
    """From the folder of a run, or the `trace.parquet` in it; the run may go on. How many of its generators took turns
    on a device is in the summary of one that has ended, unless it is given; `turns` is the workload's.

    Raises DataError when something of it is missing, is not whole, or tells of fewer than STEPS_AT_LEAST steps.
    """
    folder = path if path.is_dir() else path.parent
    trace = read_trace(path)
    for name in ("config.yaml", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise DataError(f"{folder / name}: no such file; a trace is read with what its run wrote beside it")
    config, rows = load_config(folder / "config.yaml"), read_metrics(folder / "metrics.jsonl")
    steps = _steps(trace)
    rows = [row for row in rows if row["step"] in steps]
    if len(rows) < STEPS_AT_LEAST:
        raise DataError(
            f"{folder}: tells of {len(rows)} steps, at least {STEPS_AT_LEAST} are needed; let it run longer"
        )
    missing = [name for name in COSTS if name not in rows[-1]]
    if missing:
        raise DataError(
            f"{folder / 'metrics.jsonl'}: has no {missing[0]}; it is of an earlier version, run the job again"
        )
    summary = _summary(folder)
    if generators_per_device is not None:
        summary["generators_per_device"] = generators_per_device
    return _measure(config, trace, rows, steps, summary, turns)


@dataclass(frozen=True, slots=True)
class _Step:
    tokens: int
    """Prompts among them."""
    span_s: float
    """From the take of its batch to its commit."""


def _steps(trace: pa.Table) -> dict[int, _Step]:
    """By number."""
    trained = trace.filter(trace.column("train_version").to_numpy() >= 0)
    steps = trained.column("train_version").to_numpy() + 1
    tokens = _sums(trained, "prompt_tokens") + _sums(trained, "completion_tokens")
    spans_s = trained.column("trained_s").to_numpy() - trained.column("taken_s").to_numpy()
    numbers, first, inverse = np.unique(steps, return_index=True, return_inverse=True)
    totals = np.bincount(inverse, weights=tokens, minlength=len(numbers))
    return {int(n): _Step(int(t), float(spans_s[i])) for n, t, i in zip(numbers, totals, first, strict=True)}


def _sums(table: pa.Table, column: str) -> NDArray[np.int64]:
    """Of each row's list."""
    lists = table.column(column).combine_chunks()
    values, offsets = lists.values.to_numpy(), lists.offsets.to_numpy()
    ends = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return ends[offsets[1:]] - ends[offsets[:-1]]


def _measure(
    config: Config,
    trace: pa.Table,
    rows: list[dict[str, float]],
    steps: dict[int, _Step],
    summary: dict[str, Any],
    turns: float,
) -> Measured:
    last, learners = rows[-1], config.launch.learners
    each = summary.get("generators_per_device", 1)
    slowed = slowdown(each, turns)
    base_s, sequence_s, request_s, reward_s = (last[name] for name in COSTS)
    workload = Workload(
        lengths=_lengths(trace, config.generator.group_size),
        # Generators that take turns measure each other's time, too.
        engine=EngineCost(base_s / slowed, sequence_s / slowed, request_s / slowed),
        learner=_learner_cost(rows, steps, learners),
        sync=_sync_cost(rows),
        reward_s=reward_s,
        turns=turns,
    )
    setup = Setup(
        generators=config.launch.generators,
        learners=learners,
        max_staleness=config.replay.staleness_limit,
        groups_per_step=config.replay.groups_per_step,
        group_size=config.generator.group_size,
        max_running_groups=config.generator.max_running_groups,
        steps=len(rows),
        generators_per_device=each,
    )
    waited_s = sum(row["learner/wait_s"] + row["learner/sync_s"] for row in rows[1:])
    first_s = rows[0]["time/elapsed_s"]
    waited_s += max(0.0, min(rows[0]["learner/wait_s"], first_s - rows[0]["learner/step_s"]))
    return Measured(
        workload=workload,
        setup=setup,
        tokens_per_s=last["throughput/trained_tokens_per_s"],
        generator_idle=last["generator/idle_fraction"],
        learner_idle=waited_s / last["time/elapsed_s"],
        staleness=summary.get("staleness", {}).get("histogram", []),
    )


def _lengths(trace: pa.Table, group_size: int) -> Lengths:
    """Of groups from all of the run."""
    trace = trace.take(np.arange(0, len(trace), -(-len(trace) // GROUPS_AT_MOST)))
    offsets = trace.column("completion_tokens").combine_chunks().offsets.to_numpy()
    whole = trace.filter(np.diff(offsets) == group_size)
    completions = whole.column("completion_tokens").combine_chunks().values.to_numpy().reshape(-1, group_size)
    prompts = whole.column("prompt_tokens").combine_chunks().values.to_numpy().reshape(-1, group_size)[:, 0]
    refunded = [outcome not in ("trained", "in_flight") for outcome in whole.column("outcome").to_pylist()]
    return Lengths(np.maximum(completions, 1), prompts, np.array(refunded))


def _learner_cost(rows: list[dict[str, float]], steps: dict[int, _Step], learners: int) -> LearnerCost:
    rows = rows[WARM_STEPS:] if len(rows) >= WARM_STEPS + STEPS_AT_LEAST else rows
    tokens = np.array([steps[int(row["step"])].tokens / learners for row in rows])
    step_s = np.array([row["learner/step_s"] for row in rows])
    write_s = float(np.mean([row["learner/write_s"] for row in rows]))
    span_s = float(np.mean([steps[int(row["step"])].span_s for row in rows]))
    base_s, token_s = 0.0, float(step_s.sum() / tokens.sum())
    if tokens.std() > SPREAD_AT_LEAST * tokens.mean():
        slope = float(np.cov(tokens, step_s, bias=True)[0, 1] / tokens.var())
        token_s = min(max(slope, 0.0), token_s)
        base_s = float(step_s.mean() - token_s * tokens.mean())
    return LearnerCost(base_s + write_s, token_s, max(0.0, span_s - float(step_s.mean()) - write_s))


def _sync_cost(rows: list[dict[str, float]]) -> SyncCost:
    last = rows[-1]
    syncs, sync_s = max(last.get("weights/syncs", 0.0), 1.0), [row["learner/sync_s"] for row in rows[1:]]
    waited_s = last.get("weights/wait_s", 0.0) / syncs
    return SyncCost(
        broadcast_s=last.get("weights/broadcast_s", 0.0) / syncs,
        hold_s=max(0.0, float(np.mean(sync_s)) - waited_s),
        swap_s=last.get("weights/stall_ms", 0.0) / 1e3,
    )


def _summary(folder: Path) -> dict[str, Any]:
    """Of a run that has ended; else empty."""
    file = folder / "summary.json"
    return json.loads(file.read_text()) if file.is_file() else {}
