"""`report.html`: the results of a run on one self-contained page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from asyncrl.observe.page import render_page
from asyncrl.observe.timeline import timeline
from asyncrl.types import STALENESS_BUCKETS, STALENESS_METRICS
from asyncrl.util.redaction import redact

if TYPE_CHECKING:
    import pyarrow as pa


CURVES: dict[str, list[str]] = {
    "Reward": ["reward/mean"],
    "Staleness of trained tokens (learner steps)": ["staleness/mean", "staleness/max"],
    "Staleness gained in flight and in the queue": ["staleness/in_flight", "staleness/in_queue"],
    "Trained tokens per second": ["throughput/trained_tokens_per_s"],
    "Seconds of a step, without the first step": ["learner/step_s", "learner/wait_s", "learner/sync_s"],
    "Seconds of a group in each state": ["group/generate_s", "group/queue_s", "group/train_s"],
    "Gradient norm": ["learner/grad_norm"],
    "Entropy (nats)": ["learner/entropy"],
    "Idle fraction of the generators": ["generator/idle_fraction"],
    "Effective sample size of the importance weights": ["correction/ess", "correction/ess_capped"],
    "Distance of current and behavior policy (nats)": ["correction/behavior_kl", "correction/mismatch_kl"],
    "Fraction of tokens clipped, capped": ["learner/clip_fraction", "correction/capped_fraction"],
    "Tokens of a completion": ["completion/tokens"],
    "Fraction of completions truncated": ["completion/truncated_fraction"],
    "Critic: explained variance of the returns": ["critic/explained_variance"],
    "Divergence from the reference policy (nats)": ["kl/reference"],
    "Staleness limit in force": ["replay/staleness_limit"],
}
"""Chart title -> metrics drawn in it. A chart is left out when the run has none of its metrics."""


@dataclass(frozen=True, slots=True)
class _Picture:
    title: str
    x_title: str
    traces: list[Any]


def pictures(rows: list[dict[str, float]], summary: dict[str, Any]) -> Any:
    """A figure with all curves of the metrics, the evaluations and the staleness histogram."""
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

    # The first step's times include the start of the run.
    points = [(row[x], row[name]) for row in rows[name.endswith("_s") :] if name in row]
    mode = "lines+markers" if x == "version" else "lines"
    return go.Scatter(x=[p[0] for p in points], y=[p[1] for p in points], name=name, mode=mode)


def _staleness(summary: dict[str, Any]) -> _Picture:
    import plotly.graph_objects as go

    histogram = summary.get("staleness", {}).get("histogram", [])
    bars = go.Bar(x=list(range(len(histogram))), y=histogram, name="tokens")
    return _Picture("Action tokens by staleness", "staleness", [bars])


LATEST_STEPS = 20
"""Steps that the staleness table averages over."""
OF_STEP = "learner/tokens"
"""A metric that every row of a step has, and no other row."""
SHOWN_ELSEWHERE = ("bottleneck", "ledger", "bias", "simulated_gains")
"""Fields of the summary with their own section on the page."""


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a `metrics.jsonl`, without a torn last line."""
    rows: list[dict[str, float]] = []
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows


def write_report(run_dir: Path, summary: dict[str, Any], trace: pa.Table | None = None) -> Path:
    """Writes `report.html` with the metrics, the summary, the timeline of the trace and the configuration of the run;
    returns its path."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    chart = None if trace is None else timeline(trace)
    config = run_dir / "config.yaml"
    page = render_page(
        "run.html.j2",
        name=run_dir.name,
        verdict=summary.get("bottleneck", summary.get("error", "")),
        curves=pictures(rows, summary).to_html(full_html=False, include_plotlyjs=True),
        timeline="" if chart is None else chart.to_html(full_html=False, include_plotlyjs=False),
        latest_steps=LATEST_STEPS,
        staleness_titles=("staleness", *STALENESS_METRICS.values()),
        staleness=_staleness_lines(rows[-LATEST_STEPS:]),
        ledger=_ledger_lines(summary["ledger"]) if "ledger" in summary else [],
        bias=summary.get("bias", []),
        gains=_gain_lines(summary.get("simulated_gains", {})),
        summary=[[key, _text(value)] for key, value in summary.items() if key not in SHOWN_ELSEWHERE],
        config=redact(config.read_text()) if config.is_file() else "",
    )
    path = run_dir / "report.html"
    path.write_text(page)
    return path


def _staleness_lines(rows: Sequence[dict[str, float]]) -> list[list[str]]:
    """A line of off-policy metrics for each staleness."""
    lines: list[list[str]] = []
    for bucket in STALENESS_BUCKETS:
        columns = [
            [row[key] for row in rows if (key := f"staleness/{bucket}/{name}") in row] for name in STALENESS_METRICS
        ]
        if any(columns):
            share = sum(columns[0]) / len(rows)  # a step without such tokens counts as 0
            means = [f"{fmean(values):.4g}" if values else "-" for values in columns[1:]]
            lines.append([bucket, f"{share:.4g}", *means])
    return lines


def _ledger_lines(ledger: dict[str, Any]) -> list[list[str]]:
    trajectories, tokens = ledger["trajectories"], ledger["tokens"]
    lines = [
        ["generated", ledger["leased"], trajectories["generated"], tokens["generated"]],
        ["trained", ledger["trained"], trajectories["trained"], tokens["trained"]],
        *(
            [f"refunded ({reason})", groups, trajectories["refunded"][reason], tokens["refunded"][reason]]
            for reason, groups in ledger["refunded"].items()
        ),
        ["returned", "", trajectories["returned"], tokens["returned"]],
        ["in flight", ledger["in_flight"], trajectories["in_flight"], tokens["in_flight"]],
    ]
    return [[f"{cell:,}" if isinstance(cell, int) else cell for cell in line] for line in lines]


def _gain_lines(gains: dict[str, float]) -> list[list[str]]:
    return [[text, f"{gain:+.1%}"] for text, gain in sorted(gains.items(), key=lambda pair: -pair[1])]


def _text(value: Any) -> str:
    if isinstance(value, dict | list):
        return json.dumps(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
