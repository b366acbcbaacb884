"""Shows the results of a sweep: a table on the console, and `sweep.html`, a self-contained page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from asyncrl.observe.page import render_page
from asyncrl.plan.sweep.results import LimitResult, SweepResults

COLORS = ("#3b6fd4", "#2a9d5c", "#e0b93a", "#e08a3a", "#d1533f", "#9c3a6b", "#5b5b66", "#38a3b8")
POINTS = 200
"""Number of points of a curve over time."""


def print_results(results: SweepResults, console: Console) -> None:
    """Prints a row for each limit, and the recommendation."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    in_time = f"reward after\n{results.seconds:.0f} s"
    titles = (
        "max\nstaleness", "tokens/s", "goodput", "last reward", in_time, "best\nin", "ESS", "mean\nstaleness", "pareto",
    )  # fmt: skip
    has_collapsed = any(limit.collapsed for limit in results.limits)
    for title in (*titles, "collapsed") if has_collapsed else titles:
        table.add_column(title, justify="right")
    for limit in results.limits:
        table.add_row(
            str(limit.max_staleness),
            f"{limit.tokens_per_s:,.0f}{_error(limit.tokens_per_s_error, ',.0f')}",
            "-" if np.isnan(limit.goodput) else f"{limit.goodput:.0%}",
            f"{limit.reward:.3f}{_error(limit.reward_error, '.3f')}",
            f"{limit.reward_in_time:.3f}{_error(limit.reward_in_time_error, '.3f')}",
            f"{results.recommendation.best_fraction.get(limit.max_staleness, 0.0):.0%}",
            f"{limit.ess:.3f}",
            f"{limit.staleness_mean:.2f}",
            "yes" if limit.pareto else "",
            *([f"{limit.collapsed} of {limit.seeds}"] if has_collapsed else []),
        )
    console.print(table)
    console.print(f"use {results.recommendation.sentence}", style="bold", highlight=False, soft_wrap=True)


def _error(value: float, form: str) -> str:
    return "" if np.isnan(value) else f" ±{value:{form}}"


def write_sweep_report(results: SweepResults, path: Path, *, name: str) -> None:
    """Writes the page with throughput, reward against steps and against time, ESS, and the Pareto front."""
    page = render_page(
        "sweep.html.j2",
        name=name,
        verdict=f"Use {results.recommendation.sentence}.",
        figure=sweep_figure(results).to_html(full_html=False, include_plotlyjs=True),
    )
    path.write_text(page)


def sweep_figure(results: SweepResults) -> Any:
    """Returns the plotly figure of the page."""
    from plotly.subplots import make_subplots

    titles = (
        "Reward against steps", "Reward against time (s)", "Trained tokens per second", "Effective sample size",
        "Reward after equal time", "Pareto front: tokens/s and reward",
    )  # fmt: skip
    figure = make_subplots(rows=3, cols=2, subplot_titles=titles, vertical_spacing=0.1)
    for number, limit in enumerate(results.limits):
        _add_curves(figure, results, limit, COLORS[number % len(COLORS)])
    _add_bars(figure, results)
    _add_front(figure, results)
    figure.update_layout(height=1000, template="plotly_white", margin={"t": 40, "l": 50, "r": 20, "b": 40})
    return figure


def _add_curves(figure: Any, results: SweepResults, limit: LimitResult, color: str) -> None:
    """Adds the reward curves of a limit: the mean over seeds, and a band from the lowest to the highest value."""
    import plotly.graph_objects as go

    cells = [cell for cell in results.cells if cell.max_staleness == limit.max_staleness]
    name = f"max_staleness {limit.max_staleness}"
    name += f", {limit.collapsed} of {limit.seeds} collapsed" if limit.collapsed else ""
    last = min(len(cell.steps) for cell in cells)
    end_s = min(cell.seconds[-1] for cell in cells)
    times = np.linspace(0.0, end_s, POINTS)
    for column, x, curves in (
        (1, np.array(cells[0].steps[:last]), np.array([cell.rewards[:last] for cell in cells])),
        (2, times, np.array([np.interp(times, cell.seconds, cell.rewards) for cell in cells])),
    ):
        band = {"x": [*x, *x[::-1]], "y": [*curves.max(0), *curves.min(0)[::-1]]}
        figure.add_trace(
            go.Scatter(
                **band, fill="toself", fillcolor=color, opacity=0.15, line={"width": 0}, hoverinfo="skip",
                showlegend=False, legendgroup=name,
            ),
            row=1, col=column,
        )  # fmt: skip
        figure.add_trace(
            go.Scatter(
                x=x, y=curves.mean(0), line={"color": color}, name=name, legendgroup=name, showlegend=column == 1,
            ),
            row=1, col=column,
        )  # fmt: skip


def _add_bars(figure: Any, results: SweepResults) -> None:
    import plotly.graph_objects as go

    limits = results.limits
    names = [str(limit.max_staleness) for limit in limits]
    for (row, column), values, errors in (
        ((2, 1), [limit.tokens_per_s for limit in limits], [limit.tokens_per_s_error for limit in limits]),
        ((2, 2), [limit.ess for limit in limits], None),
        ((3, 1), [limit.reward_in_time for limit in limits], [limit.reward_in_time_error for limit in limits]),
    ):
        error = {"array": np.nan_to_num(errors)} if errors else None
        bars = go.Bar(x=names, y=values, error_y=error, marker={"color": list(COLORS)}, showlegend=False)
        figure.add_trace(bars, row=row, col=column)
        figure.update_xaxes(title_text="max_staleness", type="category", row=row, col=column)


def _add_front(figure: Any, results: SweepResults) -> None:
    import plotly.graph_objects as go

    for number, limit in enumerate(results.limits):
        figure.add_trace(
            go.Scatter(
                x=[limit.tokens_per_s], y=[limit.reward], mode="markers+text", text=[str(limit.max_staleness)],
                textposition="top center", showlegend=False,
                error_x={"array": np.nan_to_num([limit.tokens_per_s_error])},
                error_y={"array": np.nan_to_num([limit.reward_error])},
                marker={"size": 11, "color": COLORS[number % len(COLORS)]},
            ),
            row=3, col=2,
        )  # fmt: skip
    front = sorted((limit.tokens_per_s, limit.reward) for limit in results.limits if limit.pareto)
    line = go.Scatter(
        x=[rate for rate, _ in front], y=[reward for _, reward in front], mode="lines", showlegend=False,
        line={"color": "#999", "dash": "dot"},
    )  # fmt: skip
    figure.add_trace(line, row=3, col=2)
    figure.update_xaxes(title_text="trained tokens/s", row=3, col=2)
    figure.update_yaxes(title_text="last reward", row=3, col=2)
