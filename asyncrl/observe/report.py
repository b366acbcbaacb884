"""`report.html`: the curves of a run on one page that needs nothing else."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CURVES: dict[str, list[str]] = {
    "Reward": ["reward/mean"],
    "Staleness of trained tokens (learner steps)": ["staleness/mean", "staleness/max"],
    "Trained tokens per second": ["throughput/trained_tokens_per_s"],
    "Seconds of a step, from the second on": ["learner/step_s", "learner/wait_s", "learner/sync_s"],
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
}
"""Title of each picture, and the metrics drawn in it; one whose metrics the run does not have is left out."""


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Rows of a `metrics.jsonl`; a torn last line is left out."""
    rows: list[dict[str, float]] = []
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows


def write_report(run_dir: Path, summary: dict[str, Any]) -> Path:
    """Draws `metrics.jsonl` and the summary's table, evaluations and staleness histogram; gives the file."""
    from plotly.subplots import make_subplots

    rows = read_metrics(run_dir / "metrics.jsonl")
    pictures = [*_curves(rows), *_evaluations(summary.get("eval", [])), _staleness(summary)]
    num_rows = (len(pictures) + 1) // 2
    titles = [picture.title for picture in pictures]
    figure = make_subplots(rows=num_rows, cols=2, subplot_titles=titles, vertical_spacing=0.36 / num_rows)
    for index, picture in enumerate(pictures):
        row, col = index // 2 + 1, index % 2 + 1
        figure.add_traces(picture.traces, rows=row, cols=col)
        figure.update_xaxes(title_text=picture.x_title, row=row, col=col)
    figure.update_layout(height=290 * num_rows, margin={"t": 40, "l": 50, "r": 20, "b": 40}, template="plotly_white")
    page = PAGE.format(
        name=html.escape(run_dir.name),
        verdict=html.escape(str(summary.get("bottleneck", ""))),
        table=_table(summary),
        figure=figure.to_html(full_html=False, include_plotlyjs=True),
    )
    path = run_dir / "report.html"
    path.write_text(page)
    return path


@dataclass(frozen=True, slots=True)
class _Picture:
    title: str
    x_title: str
    traces: list[Any]


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


def _table(summary: dict[str, Any]) -> str:
    cells: list[str] = []
    for key, value in summary.items():
        if key == "bottleneck":
            continue
        text = (
            json.dumps(value)
            if isinstance(value, dict | list)
            else f"{value:.4g}"
            if isinstance(value, float)
            else value
        )
        cells.append(f"<tr><th>{html.escape(key)}</th><td>{html.escape(str(text))}</td></tr>")
    return "\n".join(cells)


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>asyncrl run {name}</title>
<style>
body {{ font-family: system-ui, sans-serif; margin: 2rem auto; max-width: 1100px; color: #222; }}
th {{ text-align: left; padding: 2px 16px 2px 0; vertical-align: top; font-weight: 600; }}
td {{ font-family: ui-monospace, monospace; font-size: 0.9em; word-break: break-word; }}
p.verdict {{ background: #eef4ff; padding: 0.7rem 1rem; border-left: 4px solid #3b6fd4; }}
</style></head><body>
<h1>Run {name}</h1>
<p class="verdict">{verdict}</p>
{figure}
<h2>Summary</h2>
<table>{table}</table>
</body></html>
"""
