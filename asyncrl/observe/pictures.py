"""The curves and bars of a report, as plotly figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CURVES: dict[str, list[str]] = {
    "Reward": ["reward/mean"],
    "Staleness of trained tokens (learner steps)": ["staleness/mean", "staleness/max"],
    "Staleness by where tokens got old": ["staleness/in_flight", "staleness/in_queue"],
    "Trained tokens per second": ["throughput/trained_tokens_per_s"],
    "Seconds of a step, from the second on": ["learner/step_s", "learner/wait_s", "learner/sync_s"],
    "Seconds of a group in each state": ["state/leased_s", "state/finished_s", "state/taken_s"],
    "Gradient norm": ["learner/grad_norm"],
    "Entropy (nats)": ["learner/entropy"],
    "Idle fraction of the generators": ["generator/idle_fraction"],
    "Effective sample size of the importance weights": ["correction/ess", "correction/ess_capped"],
    "Distance of current and behavior policy (nats)": ["correction/mismatch_kl", "correction/mismatch_kl_lag0"],
    "Fraction of tokens clipped, capped": ["learner/clip_fraction", "correction/capped_fraction"],
    "Tokens of a completion": ["completion/tokens"],
    "Fraction of completions truncated": ["completion/truncated_fraction"],
    "Critic: explained variance of the returns": ["critic/explained_variance"],
    "Divergence from the reference policy (nats)": ["kl/reference"],
    "Staleness limit in force": ["replay/admitted_staleness"],
}
"""Title of each picture, and the metrics drawn in it; one whose metrics the run does not have is left out."""


@dataclass(frozen=True, slots=True)
class _Picture:
    title: str
    x_title: str
    traces: list[Any]


def pictures(rows: list[dict[str, float]], summary: dict[str, Any]) -> Any:
    """All curves of the metrics, the evaluations and the staleness histogram in one figure."""
    from plotly.subplots import make_subplots

    shown = [*_curves(rows), *_evaluations(summary.get("eval", [])), _staleness(summary)]
    num_rows = (len(shown) + 1) // 2
    titles = [picture.title for picture in shown]
    figure = make_subplots(rows=num_rows, cols=2, subplot_titles=titles, vertical_spacing=0.36 / num_rows)
    for index, picture in enumerate(shown):
        row, col = index // 2 + 1, index % 2 + 1
        figure.add_traces(picture.traces, rows=row, cols=col)
        figure.update_xaxes(title_text=picture.x_title, row=row, col=col)
    margin = {"t": 40, "l": 50, "r": 20, "b": 40}
    figure.update_layout(height=290 * num_rows, margin=margin, template="plotly_white")
    return figure


def _curves(rows: list[dict[str, float]]) -> list[_Picture]:
    known = {name for row in rows for name in row}
    parts = sorted(name for name in known if name.startswith("reward_part/"))
    curves = CURVES | ({"Parts of the reward": parts} if parts else {})
    return [
        _Picture(title, "step", [_line(rows, "step", name) for name in names])
        for title, names in curves.items()
        if known & set(names)
    ]


def _evaluations(results: list[dict[str, Any]]) -> list[_Picture]:
    """Mean reward of each data source, and pass@k over all prompts, by version."""
    if not results:
        return []
    rewards = [name for name in results[-1] if name == "reward" or name.endswith("/reward")]
    passes = [name for name in results[-1] if name.startswith("pass@")]
    return [
        _Picture("Evaluation: mean reward", "version", [_line(results, "version", name) for name in rewards]),
        _Picture("Evaluation: pass@k", "version", [_line(results, "version", name) for name in passes]),
    ]


def _line(rows: Sequence[dict[str, Any]], x: str, name: str) -> Any:
    import plotly.graph_objects as go

    # The first step waits for the whole run to start.
    points = [(row[x], row[name]) for row in rows[name.endswith("_s") :] if name in row]
    mode = "lines+markers" if x == "version" else "lines"
    return go.Scatter(x=[p[0] for p in points], y=[p[1] for p in points], name=name, mode=mode)


def _staleness(summary: dict[str, Any]) -> _Picture:
    import plotly.graph_objects as go

    histogram = summary.get("staleness", {}).get("histogram", [])
    bars = go.Bar(x=list(range(len(histogram))), y=histogram, name="tokens")
    return _Picture("Action tokens by staleness", "staleness", [bars])
