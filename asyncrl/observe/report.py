"""`report.html`: the curves of a run on one page that needs nothing else."""

from __future__ import annotations

import html
import json
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
}
"""Title of each picture, and the metrics drawn in it."""


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
    """Draws `metrics.jsonl` and the summary's table and staleness histogram; gives the file."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    rows = read_metrics(run_dir / "metrics.jsonl")
    titles = [*CURVES, "Action tokens by staleness"]
    figure = make_subplots(rows=(len(titles) + 1) // 2, cols=2, subplot_titles=titles, vertical_spacing=0.09)
    for index, names in enumerate(CURVES.values()):
        for name in names:
            # The first step waits for the whole run to start.
            points = [(row["step"], row[name]) for row in rows[name.endswith("_s") :] if name in row]
            line = go.Scatter(x=[p[0] for p in points], y=[p[1] for p in points], name=name, mode="lines")
            figure.add_trace(line, row=index // 2 + 1, col=index % 2 + 1)
    histogram = summary.get("staleness", {}).get("histogram", [])
    bars = go.Bar(x=list(range(len(histogram))), y=histogram, name="tokens")
    figure.add_trace(bars, row=(len(titles) + 1) // 2, col=(len(titles) - 1) % 2 + 1)
    figure.update_layout(height=1150, margin={"t": 40, "l": 50, "r": 20, "b": 40}, template="plotly_white")
    figure.update_xaxes(title_text="step")
    figure.update_xaxes(title_text="staleness", row=(len(titles) + 1) // 2, col=(len(titles) - 1) % 2 + 1)
    page = PAGE.format(
        name=html.escape(run_dir.name),
        verdict=html.escape(str(summary.get("bottleneck", ""))),
        table=_table(summary),
        figure=figure.to_html(full_html=False, include_plotlyjs=True),
    )
    path = run_dir / "report.html"
    path.write_text(page)
    return path


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
