"""Synthetic run folders, as `asyncrl launch` writes them, with known costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.observe.trace import OF_EPISODE, SCHEMA
from asyncrl.plan.workload import EngineCost, LearnerCost, SyncCost
from tests.helpers.replay import small_config

ENGINE, LEARNER = EngineCost(0.01, 2e-4, 5e-3), LearnerCost(0.05, 1e-4, 0.02)
SYNC = SyncCost(0.1, 0.01, 0.004)
REWARD_S, WRITE_S = 0.03, 0.01
GROUP_SIZE, GROUPS_PER_STEP, PROMPT_TOKENS = 2, 4, 3


def make_run(folder: Path, *, steps: int = 12, rewards: float = 0.5, seed: int = 0, **summary: Any) -> Path:
    """Writes config, metrics, trace and summary of a run in which every fourth group was refunded."""
    dice = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    config = small_config(
        run=folder.name, replay__groups_per_step=GROUPS_PER_STEP, generator__group_size=GROUP_SIZE, steps=steps
    )
    (folder / "config.yaml").write_text(config.to_yaml())
    rows: list[dict[str, Any]] = []
    trace: list[dict[str, Any]] = []
    now_s = 1.0
    for step in range(1, steps + 1):
        lengths = dice.integers(5, 60, (GROUPS_PER_STEP, GROUP_SIZE))
        tokens = int(lengths.sum()) + GROUPS_PER_STEP * GROUP_SIZE * PROMPT_TOKENS
        step_s = LEARNER.base_s - WRITE_S + LEARNER.token_s * tokens
        taken_s, now_s = now_s + 0.1, now_s + 0.1 + LEARNER.take_s + step_s + WRITE_S
        for own in [*lengths, dice.integers(5, 60, GROUP_SIZE)]:
            trained = len(trace) % (GROUPS_PER_STEP + 1) < GROUPS_PER_STEP
            trace.append(_row(len(trace), own.tolist(), trained, step, taken_s, now_s))
        rows.append(_metrics(step, int(lengths.sum()), step_s, now_s, rewards))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(trace, schema=SCHEMA), folder / "trace.parquet")
    told = {
        "status": "finished", "tokens_per_s": 100.0, "reward_last": rewards,
        "staleness": {"mean": 1.0, "max": 1, "limit": 2, "histogram": [5, 5]},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(told | summary))
    return folder


def append_log(folder: Path, rows: pa.Table, *, rows_per_message: int = 1000) -> None:
    """Appends rows to the log of a live run, as its trace writer does."""
    file = folder / "trace.arrow"
    with file.open("ab") as log:
        if not log.tell():
            log.write(SCHEMA.serialize())
        for batch in rows.cast(SCHEMA).to_batches(max_chunksize=rows_per_message):
            log.write(batch.serialize())


def _row(ticket: int, completion: list[int], trained: bool, step: int, taken_s: float, now_s: float) -> dict[str, Any]:
    return {
        "ticket": ticket, "attempt": 0, "generator": ticket % 2, "row": ticket, "data_source": "test",
        "outcome": "trained" if trained else "zero_variance",
        "start_version": max(step - 2, 0), "end_version": step - 1,
        "train_version": step - 1 if trained else -1, "started_s": taken_s - 0.5, "finished_s": taken_s - 0.1,
        "taken_s": taken_s if trained else float("nan"), "trained_s": now_s if trained else float("nan"),
        "prompt_tokens": [PROMPT_TOKENS] * len(completion), "completion_tokens": completion,
        "rewards": [0.0] * len(completion), "signal": trained, "reward_s": REWARD_S,
        "members": list(range(len(completion))), "turns": [],
        **{name: [] for name in OF_EPISODE},
    }  # fmt: skip


def _metrics(step: int, tokens: int, step_s: float, now_s: float, reward: float) -> dict[str, Any]:
    return {
        "step": step, "learner/loss": 0.1, "learner/tokens": tokens, "learner/step_s": step_s, "learner/wait_s": 0.1,
        "learner/sync_s": SYNC.hold_s, "learner/write_s": WRITE_S, "weights/broadcasts": float(step),
        "weights/broadcast_s": step * SYNC.broadcast_s, "weights/wait_s": 0.0, "weights/stall_ms": SYNC.swap_s * 1e3,
        "generator/step_base_s": ENGINE.base_s, "generator/step_sequence_s": ENGINE.sequence_s,
        "generator/request_s": ENGINE.request_s, "generator/reward_s": REWARD_S, "generator/idle_fraction": 0.25,
        "throughput/trained_tokens_per_s": 100.0, "time/elapsed_s": now_s, "reward/mean": reward,
        "correction/ess": 0.9, "goodput/total": 0.38, "goodput/engine": 0.95, "goodput/admitted": 1.0,
        "goodput/signal": 0.4, "goodput/trained": 1.0, "goodput/bare_tokens_per_s": 900.0,
    }  # fmt: skip
