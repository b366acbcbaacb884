"""The timeline of a run: the groups of each generator and the learner's steps, over a few steps."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

STEPS = 4
"""Number of steps shown: of an ended run from the middle of the trace, where the run is in a steady state."""
MAX_GROUPS = 600
"""Groups shown of one generator."""
MAX_LANES = 64
"""Groups shown side by side in one generator."""


def timeline(trace: pa.Table, *, latest: bool = False) -> dict[str, Any] | None:
    """A window of the run, from its trace, with `latest` the last steps; None when the trace has no step.

    "roles" has [name, first lane, lanes] of the learner and each generator. "bars" has [begin_s, end_s, lane, kind,
    text] with the kind "step", "staleness N" of a group's oldest token when it was trained, or another outcome.
    """
    steps = _steps(trace)
    if not steps:
        return None
    begin_s, end_s = _window(steps, max(0, len(steps) - STEPS if latest else len(steps) // 2 - STEPS // 2))
    bars = [
        [taken_s, trained_s, 0, "step", f"step {step}"]
        for step, taken_s, trained_s in steps
        if trained_s > begin_s and taken_s < end_s
    ]
    roles: list[list[Any]] = [["learner", 0, 1]]
    _add_generators(roles, bars, trace, begin_s, end_s)
    return {"begin_s": begin_s, "end_s": end_s, "roles": roles, "bars": bars}


def _steps(trace: pa.Table) -> list[tuple[int, float, float]]:
    """(step, taken, trained) of each step in order; times in seconds since the start of the run."""
    versions, taken_s, trained_s = (trace.column(name).to_numpy() for name in ("train_version", "taken_s", "trained_s"))
    trained = np.flatnonzero(versions >= 0)
    _, first = np.unique(versions[trained], return_index=True)
    return [(int(versions[i]) + 1, float(taken_s[i]), float(trained_s[i])) for i in trained[first]]


def _window(steps: list[tuple[int, float, float]], first: int) -> tuple[float, float]:
    shown = steps[first : first + STEPS]
    before_s = steps[first - 1][2] if first else shown[0][1]
    return before_s, shown[-1][2]


def _add_generators(
    roles: list[list[Any]], bars: list[list[Any]], trace: pa.Table, begin_s: float, end_s: float
) -> None:
    """Adds a bar for every group that a generator worked on in the window."""
    columns = ("generator", "ticket", "started_s", "finished_s", "start_version", "train_version", "outcome")
    began, ended = trace.column("started_s").to_numpy() < end_s, trace.column("finished_s").to_numpy() > begin_s
    window = trace.filter(began & ended)
    rows = zip(*(window.column(name).to_pylist() for name in columns), strict=True)
    shown = sorted(rows, key=lambda row: (row[0], row[2]))
    top = 2
    for generator in sorted({row[0] for row in shown}):
        own = [row for row in shown if row[0] == generator][:MAX_GROUPS]
        lanes = _lanes([(row[2], row[3]) for row in own])
        for row, lane in zip(own, lanes, strict=True):
            if lane < MAX_LANES:
                _, ticket, started_s, finished_s, start, train, outcome = row
                kind = f"staleness {train - start}" if outcome == "trained" else f"{outcome}".replace("_", " ")
                text = f"group {ticket}, {finished_s - started_s:.2f} s, {kind}"
                bars.append([started_s, finished_s, top + lane, kind, text])
        height = min(max(lanes) + 1, MAX_LANES)
        roles.append([f"generator {generator}", top, height])
        top += height + 1


def _lanes(spans_s: Sequence[tuple[float, float]]) -> list[int]:
    """Assigns a lane to each span so that no two in a lane overlap. Spans are sorted by their start."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    lanes: list[int] = []
    for begin_s, end_s in spans_s:
        while busy and busy[0][0] <= begin_s:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else len(busy)
        heappush(busy, (end_s, lane))
        lanes.append(lane)
    return lanes
