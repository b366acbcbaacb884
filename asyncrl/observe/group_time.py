"""The time of a group in each state, from its lease to the commit of the step that trains it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa

SLOWEST = 0.95
"""Groups from this quantile of the total time on have a row of their own."""
MIN_GROUPS = 40
"""Trained groups needed for that row."""


def group_times(trace: pa.Table) -> list[dict[str, Any]]:
    """Rows of the trained groups: "role" names the groups, "seconds" is their mean time, and "activities" has
    [part, fraction of it]. Empty without trained groups, and for a trace that does not say how long rewards took.

    "environment" is the mean over the group's episodes, and "engine" the rest of its time in the generator: also that
    in which its first completions wait for its last.
    """
    trained = trace.filter(trace.column("train_version").to_numpy() >= 0)
    if not len(trained) or trained.column("reward_s").null_count:
        return []
    started_s, finished_s, taken_s, trained_s, reward_s = (
        trained.column(name).to_numpy() for name in ("started_s", "finished_s", "taken_s", "trained_s", "reward_s")
    )
    waited_s = list_sums(trained, "reset_s") + list_sums(trained, "wait_s")
    environment_s = waited_s / np.maximum(num_members(trained), 1)
    parts_s = {
        "engine": np.maximum(finished_s - started_s - reward_s - environment_s, 0.0),
        "environment": environment_s,
        "reward": reward_s,
        "queue": np.maximum(taken_s - finished_s, 0.0),
        "learner": np.maximum(trained_s - taken_s, 0.0),
    }
    if not environment_s.any():
        del parts_s["environment"]
    total_s = trained_s - started_s
    rows = [_row(f"{len(trained):,} groups", parts_s, np.ones(len(trained), dtype=np.bool_))]
    if len(trained) >= MIN_GROUPS:
        rows.append(_row("slowest 5 %", parts_s, total_s >= np.quantile(total_s, SLOWEST)))
    return rows


def _row(name: str, parts_s: dict[str, NDArray[np.float64]], of: NDArray[np.bool_]) -> dict[str, Any]:
    means = {part: float(seconds[of].mean()) for part, seconds in parts_s.items()}
    total_s = sum(means.values())
    shares = [[part, seconds / total_s if total_s else 0.0] for part, seconds in means.items()]
    return {"role": name, "seconds": total_s, "activities": shares}


def list_sums(table: pa.Table, column: str) -> NDArray[np.float64]:
    """Sum of the list in each row."""
    lists = table.column(column).combine_chunks()
    ends = np.concatenate([[0.0], np.cumsum(lists.values.to_numpy().astype(np.float64))])
    offsets = lists.offsets.to_numpy()
    return ends[offsets[1:]] - ends[offsets[:-1]]


def num_members(table: pa.Table) -> NDArray[np.int64]:
    """Number of the members of the group in each row."""
    return np.array([members[-1] + 1 if members else 0 for members in table.column("members").to_pylist()])
