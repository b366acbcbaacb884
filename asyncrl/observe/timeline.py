"""The timeline of a run: the groups of each generator and the learner's steps, over a few steps."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

STEPS = 4
"""Number of steps shown, from the middle of the trace, where the run is in a steady state."""
MAX_GROUPS = 600
"""Groups shown of one generator."""
MAX_LANES = 64
"""Groups shown side by side in one generator."""


def timeline(trace: pa.Table) -> Any:
    """A plotly figure of a window of the run, from its trace; None when the trace has no step."""
    import plotly.graph_objects as go

    steps = _steps(trace)
    if not steps:
        return None
    begin_s, end_s = _window(steps)
    figure = go.Figure()
    labels: dict[float, str] = {}
    top = _add_learner(figure, [step for step in steps if step[2] > begin_s and step[1] < end_s], labels)
    _add_generators(figure, trace, begin_s, end_s, top, labels)
    figure.update_xaxes(title_text="seconds of the run", range=[begin_s, end_s])
    figure.update_yaxes(tickvals=list(labels), ticktext=list(labels.values()), autorange="reversed", showgrid=False)
    figure.update_layout(
        height=max(320, min(760, 60 + 9 * int(max(labels) + 2))), barmode="overlay", template="plotly_white",
        margin={"t": 60, "l": 110, "r": 20, "b": 45}, legend={"orientation": "h", "y": 1.0, "yanchor": "bottom"},
    )  # fmt: skip
    return figure


def _steps(trace: pa.Table) -> list[tuple[int, float, float]]:
    """(step, taken, trained) of each step in order; times in seconds since the start of the run."""
    versions, taken_s, trained_s = (trace.column(name).to_numpy() for name in ("train_version", "taken_s", "trained_s"))
    trained = np.flatnonzero(versions >= 0)
    _, first = np.unique(versions[trained], return_index=True)
    return [(int(versions[i]) + 1, float(taken_s[i]), float(trained_s[i])) for i in trained[first]]


def _window(steps: list[tuple[int, float, float]]) -> tuple[float, float]:
    first = max(0, len(steps) // 2 - STEPS // 2)
    shown = steps[first : first + STEPS]
    before_s = steps[first - 1][2] if first else shown[0][1]
    return before_s, shown[-1][2]


def _add_learner(figure: Any, steps: list[tuple[int, float, float]], labels: dict[float, str]) -> float:
    import plotly.graph_objects as go

    labels[1.0] = "learner"
    figure.add_trace(
        go.Bar(
            base=[taken_s for _, taken_s, _ in steps], x=[trained_s - taken_s for _, taken_s, trained_s in steps],
            y=[1.0] * len(steps), width=2.0, orientation="h", name="optimizer step",
            marker={"color": "#3b6fd4", "line": {"color": "white", "width": 1}},
            text=[f"step {step}" for step, _, _ in steps], textposition="inside", insidetextanchor="middle",
            hovertemplate="%{text}<extra></extra>",
        )
    )  # fmt: skip
    return 4.0


def _add_generators(
    figure: Any, trace: pa.Table, begin_s: float, end_s: float, top: float, labels: dict[float, str]
) -> None:
    """Adds a bar for every group, colored by the staleness of its oldest token when it was trained."""
    import plotly.graph_objects as go

    columns = ("generator", "ticket", "started_s", "finished_s", "start_version", "train_version", "outcome")
    began, ended = trace.column("started_s").to_numpy() < end_s, trace.column("finished_s").to_numpy() > begin_s
    window = trace.filter(began & ended)
    rows = zip(*(window.column(name).to_pylist() for name in columns), strict=True)
    shown = sorted(rows, key=lambda row: (row[0], row[2]))
    bars: dict[str, list[tuple[float, float, float, str]]] = {}
    for generator in sorted({row[0] for row in shown}):
        own = [row for row in shown if row[0] == generator][:MAX_GROUPS]
        lanes = _lanes([(row[2], row[3]) for row in own])
        labels[top + min(max(lanes), MAX_LANES) / 2] = f"generator {generator}"
        for row, lane in zip(own, lanes, strict=True):
            if lane < MAX_LANES:
                _, ticket, started_s, finished_s, start, train, outcome = row
                kind = f"staleness {train - start}" if outcome == "trained" else f"{outcome}".replace("_", " ")
                text = f"group {ticket}, {finished_s - started_s:.2f} s, {kind}"
                bars.setdefault(kind, []).append((started_s, finished_s - started_s, top + lane, text))
        top += min(max(lanes) + 1, MAX_LANES) + 2
    for kind, found in sorted(bars.items()):
        bases, widths, heights, texts = zip(*found, strict=True)
        figure.add_trace(
            go.Bar(
                base=bases, x=widths, y=heights, width=0.8, orientation="h", name=kind, marker={"color": _color(kind)},
                text=texts, textposition="none", hovertemplate="%{text}<extra></extra>",
            )
        )  # fmt: skip


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


COLORS = ("#2a9d5c", "#8abf4b", "#e0b93a", "#e08a3a", "#d1533f", "#9c3a6b")
"""Colors of staleness 0, 1, 2 and so on."""


def _color(kind: str) -> str:
    if not kind.startswith("staleness "):
        return "#b8bec8"
    return COLORS[min(int(kind.removeprefix("staleness ")), len(COLORS) - 1)]
