"""A run as one JSON document: what the report draws.

Everything that a page shows of a run is in its document, numbers as they are and texts unescaped; the scripts in `web/`
draw it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import yaml

from asyncrl.observe.charts import CHARTS
from asyncrl.observe.curves import LATEST_STEPS, OF_STEP, Curves
from asyncrl.observe.destinations import METRICS_FILE
from asyncrl.observe.environment_tiles import environment_tiles
from asyncrl.observe.group_time import group_times
from asyncrl.observe.rollbacks import rollback_line
from asyncrl.observe.timeline import timeline
from asyncrl.samples import Samples
from asyncrl.samples.book import CHOSEN
from asyncrl.types import GOODPUT_FACTORS, STALENESS_BUCKETS, STALENESS_METRICS, goodput_of
from asyncrl.util.files import read_lines
from asyncrl.util.text import redact

if TYPE_CHECKING:
    import pyarrow as pa

REWARD_PART = "reward_part/"
RUNNING, UNFINISHED = "running", "unfinished"
"""Status of a run in progress, and of one that ended without a summary: it was killed."""
UNANSWERED = "unanswered"
"""Field of the summary of a live run that says why it is not a new one."""
MAX_SAMPLES = 200
"""Samples of steps, and completions of evaluations, that a document has."""
MAX_CHARACTERS = 4000
"""Longer texts of samples are cut in the middle."""
SHOWN_ELSEWHERE = (
    "bottleneck", "ledger", "bias", "simulated_gains", "eval", "staleness", "time", "status", "error", "prompts",
    "collapse", UNANSWERED,
)  # fmt: skip
"""Fields of the summary with their own section on the page."""
SAMPLE_FIELDS = (
    "step", CHOSEN, "index", "prompt", "completion", "ground_truth", "reward", "reward_parts", "staleness",
    "start_version", "end_version", "status", "error", "num_action_tokens", "ticket", "row", "data_source",
    "conversation",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PageSamples:
    """The samples of a run that a document has, decoded, with the texts of special tokens in `raw`."""

    trained: Samples
    evaluated: Samples
    """`step` is the version that was evaluated."""


def curves_of(run_dir: Path) -> Curves:
    """The curves of a run, of which nothing is read yet: all that CHARTS names, and the parts of its reward."""
    names = {name for charts in CHARTS.values() for lines in charts.values() for name in lines} | {OF_STEP}
    return Curves(run_dir / METRICS_FILE, wanted=lambda name: name in names or name.startswith(REWARD_PART))


def run_document(
    run_dir: Path,
    summary: Mapping[str, Any],
    trace: pa.Table | None = None,
    samples: PageSamples | None = None,
    *,
    curves: Curves | None = None,
) -> dict[str, Any]:
    """The document of a run; values that are not finite are null. `curves` are what was read before, by default all of
    the run's metrics."""
    if curves is None:
        curves = curves_of(run_dir)
        curves.read()
    config = run_dir / "config.yaml"
    shown = {key: value for key, value in summary.items() if key not in SHOWN_ELSEWHERE}
    shown["phases"] = {role: parts["phases"] for role, parts in summary.get("time", {}).items() if "phases" in parts}
    document = {
        "name": run_dir.name,
        "status": summary.get("status", ""),
        "verdict": summary.get("bottleneck", summary.get("error", "")),
        "error": summary.get("error", ""),
        "collapse": summary.get("collapse", {}).get("sentence", "") or rollback_line(summary),
        "warnings": [text for text in (curves.fault, summary.get(UNANSWERED)) if text],
        "tiles": _tiles(curves, summary),
        "histogram": summary.get("staleness", {}).get("histogram", []),
        "time": _time(summary.get("time", {})),
        "group_times": [] if trace is None else group_times(trace),
        "timeline": None if trace is None else timeline(trace, latest=summary.get("status") == RUNNING),
        "samples": _samples(samples),
        "staleness": _staleness(curves.latest),
        "ledger": _ledger(summary["ledger"]) if "ledger" in summary else [],
        "bias": summary.get("bias", []),
        "rows": _rows(summary.get("prompts", {})),
        "gains": sorted(summary.get("simulated_gains", {}).items(), key=lambda pair: -pair[1]),
        "summary": list(_flat(shown)),
        "config": _config_text(config) if config.is_file() else "",
    }
    return _finite(document) | {"charts": _charts(curves, summary.get("eval", []))}


def _config_text(file: Path) -> str:
    """The config without secrets."""
    try:
        return yaml.safe_dump(redact(yaml.safe_load(file.read_text(encoding="utf-8"))), sort_keys=False)
    except (yaml.YAMLError, OSError, ValueError) as error:
        return f"{file} cannot be read: {type(error).__name__}"


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a `metrics.jsonl`, without a torn last line."""
    rows: list[dict[str, float]] = []
    for line in read_lines(path):
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _tiles(curves: Curves, summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The answers of the first screen: title, value, what it is, and the curve or the factors under it."""
    tiles: list[dict[str, Any]] = []
    if (ends := curves.ends("reward/mean")) is not None:
        first, last = (summary.get(f"reward_{name}") for name in ("first", "last"))
        first, last = ends[0] if first is None else first, ends[1] if last is None else last
        evaluations = summary.get("eval", [])
        note = "mean reward, first and last steps"
        if evaluations:
            first_eval, last_eval = (evaluations[at].get("reward", math.nan) for at in (0, -1))
            note += f"; evaluation {first_eval:.3f} to {last_eval:.3f}"
        tiles.append(_tile("Is it learning?", f"{first:.3f} → {last:.3f}", note, "reward/mean"))
    if "tokens_per_s" in summary:
        steps = summary.get("steps", curves.num_steps)
        note = f"trained tokens per second; {steps:,} steps"
        note += f" in {duration(summary['wall_s'])}" if "wall_s" in summary else ""
        tiles.append(_tile("How fast?", f"{summary['tokens_per_s']:,.0f}", note, "tokens_per_s"))
    if goodput := summary.get("goodput") or goodput_of(curves.latest[-1] if curves.latest else {}):
        note = "goodput: trained with signal, of what bare engines make"
        parts = {"parts": _parts(goodput)}
        tiles.append(_tile("How much counts?", f"{goodput['total']:.0%}", note, "goodput/total") | parts)
    if "idle" in summary:
        idle = {role: fraction for role, fraction in summary["idle"].items() if role != "environments" or fraction}
        role = max(idle, key=lambda name: idle[name])
        others = ", ".join(f"{name} {idle[name]:.0%}" for name in idle if name != role)
        note = f"of its time; {others}; below, the learner's seconds of waiting by step"
        what = f"environments {idle[role]:.0%}" if role == "environments" else f"{role} waits {idle[role]:.0%}"
        tiles.append(_tile("What holds it back?", what, note, "learner/wait_s"))
    if "mean" in summary.get("staleness", {}):
        staleness = summary["staleness"]
        note = f"steps of staleness, mean of tokens; the oldest {staleness['max']}, limit {staleness['limit']}"
        tiles.append(_tile("How off-policy?", f"{staleness['mean']:.2f}", note, "staleness/mean"))
    return [*tiles, *(_tile(*one) for one in environment_tiles(curves.latest[-1] if curves.latest else {}))]


def _parts(goodput: Mapping[str, float]) -> list[list[Any]]:
    """The factors of the goodput: [name, factor, what is left after it, what it is a fraction of]."""
    parts, left = list[list[Any]](), 1.0
    for name, meaning in GOODPUT_FACTORS.items():
        left *= goodput[name]
        parts.append([name, goodput[name], left, meaning])
    return parts


def _tile(title: str, value: str, note: str, metric: str) -> dict[str, Any]:
    return {"title": title, "value": value, "note": note, "metric": metric}


def duration(seconds: float) -> str:
    """Seconds as people read them: "1 h 2 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _charts(curves: Curves, evaluations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sections of charts: each line is [name, xs, ys], over steps or, in evaluations, over versions."""
    parts = sorted(name for name in curves.names if name.startswith(REWARD_PART))
    sections: list[dict[str, Any]] = []
    for section, charts in CHARTS.items():
        if section == "Learning" and parts:
            charts = charts | {"Parts of the reward": parts}
        drawn: list[dict[str, Any]] = []
        for title, names in charts.items():
            lines = [line for name in names if len((line := [name, *curves.line(name)])[1])]
            if lines:
                drawn.append(_chart(title, "step", lines))
        if section == "Learning":
            drawn[1:1] = _evaluations(evaluations)
        if drawn:
            sections.append({"title": section, "charts": drawn})
    return sections


def _evaluations(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean reward of each data source, and pass@k over all prompts, by version."""
    if not results:
        return []
    results = _finite(results)
    versions = [result["version"] for result in results]
    sources = [name for name in results[-1] if name.endswith("/reward")]
    rewards = ["reward", *(sources if len(sources) > 1 else [])]
    passes = [name for name in results[-1] if name.startswith("pass@")]
    return [
        _chart(title, "version", [[name, versions, [row.get(name) for row in results]] for name in lines])
        for title, lines in (("Evaluation: mean reward", rewards), ("Evaluation: pass@k", passes))
    ]


def _chart(title: str, x: str, lines: list[list[Any]]) -> dict[str, Any]:
    return {"title": title, "x": x, "lines": lines}


def _time(times: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By role the fraction of its time in each activity."""
    return [
        {
            "role": role,
            "seconds": activities.get("seconds"),
            "activities": [[name, activities[name]] for name in activities if name not in ("seconds", "phases")],
        }
        for role, activities in times.items()
    ]


def _samples(samples: PageSamples | None) -> dict[str, Any]:
    if samples is None:
        return {"trained": [], "evaluated": []}
    return {"trained": _plain(samples.trained), "evaluated": _plain(samples.evaluated)}


def _plain(samples: Samples) -> list[dict[str, Any]]:
    names = [name for name in (*SAMPLE_FIELDS, "raw") if name in samples.columns]
    rows = samples.table.select(names).to_pylist(maps_as_pydicts="strict")
    return [{name: _cut(value) for name, value in row.items()} for row in rows]


def _cut(value: Any) -> Any:
    """A text, or the texts of a conversation, without the middle of those that are long; others as they are."""
    if isinstance(value, list):
        return [line | {"text": _cut(line["text"])} for line in value]
    return _cut_text(value) if isinstance(value, str) else value


def _cut_text(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"


def _staleness(rows: Collection[dict[str, float]]) -> dict[str, Any]:
    """A line of off-policy metrics for each staleness, means of the latest steps."""
    lines: list[list[Any]] = []
    for bucket in STALENESS_BUCKETS:
        columns = [
            [row[key] for row in rows if (key := f"staleness/{bucket}/{name}") in row] for name in STALENESS_METRICS
        ]
        if any(columns):
            share = sum(columns[0]) / len(rows)  # a step without such tokens counts as 0
            lines.append([bucket, share, *(fmean(values) if values else None for values in columns[1:])])
    return {"steps": LATEST_STEPS, "titles": ["staleness", *STALENESS_METRICS.values()], "lines": lines}


def _ledger(ledger: Mapping[str, Any]) -> list[list[Any]]:
    trajectories, tokens = ledger["trajectories"], ledger["tokens"]
    return [
        ["generated", ledger["leased"], trajectories["generated"], tokens["generated"]],
        ["trained", ledger["trained"], trajectories["trained"], tokens["trained"]],
        *(
            [f"refunded ({reason})", groups, trajectories["refunded"][reason], tokens["refunded"][reason]]
            for reason, groups in ledger["refunded"].items()
        ),
        ["returned", None, trajectories["returned"], tokens["returned"]],
        ["in flight", ledger["in_flight"], trajectories["in_flight"], tokens["in_flight"]],
    ]


def _rows(prompts: Mapping[str, Any]) -> list[list[Any]]:
    """Rows of the dataset by what their latest group says, and those of each data source, of which the unseen ones are
    not known."""
    kinds = ("solved", "learning", "hopeless", "unseen")
    by_source = prompts.get("by_source", {})
    return [[name, *map(counts.get, kinds)] for name, counts in ({"all": prompts} | by_source).items() if by_source]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """The values of nested dictionaries with their dotted names; lists as text."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value) if isinstance(value, list) else value


def _finite(value: Any) -> Any:
    """The document with null for NaN and infinity, which JSON lacks, and numbers of six digits."""
    match value:
        case dict():
            return {str(key): _finite(one) for key, one in value.items()}
        case list() | tuple():
            return [_finite(one) for one in value]
        case float():
            return float(f"{value:.6g}") if math.isfinite(value) else None
        case _:
            return value
