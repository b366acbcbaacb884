"""A run as one JSON document: what the report draws.

Everything that a page shows of a run is in its document, numbers as they are and texts unescaped; the scripts in `web/`
draw it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from numpy.typing import NDArray

from asyncrl.observe.collapse import rollback_line
from asyncrl.observe.curves import LATEST_STEPS, OF_STEP, Curves
from asyncrl.observe.samples import CHOSEN, Samples
from asyncrl.observe.trace import list_sums
from asyncrl.observe.trackers import METRICS_FILE
from asyncrl.types import EPISODE_ENDS, GOODPUT_FACTORS, STALENESS_BUCKETS, STALENESS_METRICS, goodput_of
from asyncrl.util.text import redact

if TYPE_CHECKING:
    import pyarrow as pa

REWARD, REWARD_PART = "reward/mean", "reward_part/"
RUNNING, UNFINISHED = "running", "unfinished"
"""Status of a run in progress, and of one that ended without a summary: it was killed."""
UNANSWERED = "unanswered"
"""Field of the summary of a live run with the reason why it is not a new one."""
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
    names = {name for charts in CHARTS.values() for lines in charts.values() for name in lines.split()} | {OF_STEP}
    return Curves(run_dir / METRICS_FILE, wanted=lambda name: name in names or name.startswith(REWARD_PART))


def run_document(
    run_dir: Path,
    summary: Mapping[str, Any],
    trace: pa.Table | None = None,
    samples: PageSamples | None = None,
    *,
    curves: Curves | None = None,
) -> dict[str, Any]:
    """The document of a run; values that are not finite are null. `curves` were read before, by default all of
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
        "progress": f"step {curves.last_step:,}" if summary.get("status") == RUNNING and curves.num_steps else "",
        "verdict": summary.get("bottleneck", summary.get("error", "")),
        "error": summary.get("error", ""),
        "collapse": summary.get("collapse", {}).get("sentence", "") or rollback_line(summary),
        "warnings": [text for text in (curves.fault, summary.get(UNANSWERED)) if text],
        "tiles": _tiles(curves, summary),
        "histogram": summary.get("staleness", {}).get("histogram", []),
        "time": _time(summary.get("time", {})),
        "group_times": [] if trace is None else group_times(trace),
        "timeline": None if trace is None else timeline(trace, latest=summary.get("status") == RUNNING),
        "samples": {
            "trained": _cut_rows(samples.trained) if samples else [],
            "evaluated": _cut_rows(samples.evaluated) if samples else [],
        },
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


def _tiles(curves: Curves, summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The answers of the first screen: title, value, what it is, and the curve or the factors under it."""
    tiles: list[dict[str, Any]] = []
    if (ends := curves.ends(REWARD)) is not None:
        first, last = ends
        evaluations = summary.get("eval", [])
        note = "mean reward, first and last steps"
        if evaluations:
            first_eval, last_eval = (evaluations[at].get("reward", math.nan) for at in (0, -1))
            note += f"; evaluation {first_eval:.3f} to {last_eval:.3f}"
        tiles.append(_tile("Is it learning?", f"{first:.3f} → {last:.3f}", note, REWARD))
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
        value = f"environments {idle[role]:.0%}" if role == "environments" else f"{role} waits {idle[role]:.0%}"
        tiles.append(_tile("What holds it back?", value, note, "learner/wait_s"))
    if "mean" in summary.get("staleness", {}):
        staleness = summary["staleness"]
        note = f"steps of staleness, mean of tokens; the oldest {staleness['max']}, limit {staleness['limit']}"
        tiles.append(_tile("How off-policy?", f"{staleness['mean']:.2f}", note, "staleness/mean"))
    return [*tiles, *_environment_tiles(curves.latest[-1] if curves.latest else {})]


def _environment_tiles(metrics: Mapping[str, float]) -> list[dict[str, Any]]:
    """The tiles of the last step's episodes; none without an environment."""
    if "environment/turns" not in metrics:
        return []
    p50, p95 = (metrics[f"environment/wait_s/{name}"] for name in ("p50", "p95"))
    ends = {end: metrics[f"environment/ended_{end}"] for end in EPISODE_ENDS}
    failed = sum(value for name, value in metrics.items() if name.startswith("environment/failed/"))
    ended = ", ".join(f"{end} {fraction:.0%}" for end, fraction in ends.items()) + f"; {failed:.0%} of all failed"
    observed = metrics["environment/observation_tokens"]
    turns = f"turns of an episode, mean of the last step; {observed:.1f} tokens observed"
    waits = f"wait of an episode for its environment, median; 95 % wait at most {p95:.2g} s"
    return [
        _tile("How long are episodes?", f"{metrics['environment/turns']:.2f}", turns, "environment/turns"),
        _tile("How slow is the environment?", f"{p50:.2g} s", waits, "environment/wait_s/p50"),
        _tile("How do episodes end?", f"done {ends['done']:.0%}", ended, "environment/ended_done"),
    ]


def _parts(goodput: Mapping[str, float]) -> list[list[Any]]:
    """The factors of the goodput: [name, factor, rest after it, meaning]."""
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
    sections: list[dict[str, Any]] = []
    for section, charts in CHARTS.items():
        named = [(title, names.split()) for title, names in charts.items()]
        if section == "Learning":
            named.append(("Parts of the reward", sorted(name for name in curves.names if name.startswith(REWARD_PART))))
        drawn = [(title, [[name, *line] for name in names if (line := curves.line(name))[0]]) for title, names in named]
        shown = [{"title": title, "x": "step", "lines": lines} for title, lines in drawn if lines]
        if section == "Learning":
            shown[1:1] = _evaluations(evaluations)
        if shown:
            sections.append({"title": section, "charts": shown})
    return sections


def _evaluations(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean reward of each data source, and pass@k over all prompts, by version."""
    if not results:
        return []
    results = _finite(results)
    versions = [result["version"] for result in results]
    sources = [name for name in results[-1] if name.endswith("/reward")]
    charts = {
        "Evaluation: mean reward": ["reward", *(sources if len(sources) > 1 else [])],
        "Evaluation: pass@k": [name for name in results[-1] if name.startswith("pass@")],
    }
    return [
        {
            "title": title,
            "x": "version",
            "lines": [[name, versions, [row.get(name) for row in results]] for name in names],
        }
        for title, names in charts.items()
    ]


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


def sample_rows(samples: Samples) -> list[dict[str, Any]]:
    """The fields of decoded samples that pages show, with complete texts."""
    names = [name for name in (*SAMPLE_FIELDS, "raw") if name in samples.columns]
    return samples.table.select(names).to_pylist(maps_as_pydicts="strict")


def _cut_rows(samples: Samples) -> list[dict[str, Any]]:
    return [{name: _cut(value) for name, value in row.items()} for row in sample_rows(samples)]


def _cut(value: Any) -> Any:
    """A text, or the texts of a conversation, without the middle of those that are long; others as they are."""
    if isinstance(value, list):
        return [line | {"text": _cut(line["text"])} for line in value]
    if not isinstance(value, str) or len(value) <= MAX_CHARACTERS:
        return value
    half = MAX_CHARACTERS // 2
    return f"{value[:half]} [... {len(value) - 2 * half:,} characters ...] {value[-half:]}"


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
    """Rows of the dataset by the state of their latest group, also for each data source, of which the unseen ones are
    not known."""
    kinds = ("solved", "learning", "never_solved", "unseen")
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
            return {str(key): _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case float():
            return float(f"{value:.6g}") if math.isfinite(value) else None
        case _:
            return value


CHARTS: dict[str, dict[str, str]] = {
    "Learning": {
        "Reward": "reward/mean",
        "Rows of the dataset": "prompts/learning prompts/solved prompts/never_solved prompts/unseen",
        "Entropy (nats)": "learner/entropy",
        "Policy loss": "learner/policy_loss",
        "Gradient norm": "learner/grad_norm",
        "Advantages of trained tokens": "batch/advantage_mean batch/advantage_std",
        "Learning rate": "learner/lr",
        "Tokens of a completion": "completion/tokens batch/completion_tokens_max",
        "Fraction of completions truncated": "completion/truncated_fraction",
        "Fraction of groups with a training signal": "reward/signal_fraction",
        "Critic: explained variance of the returns": "critic/explained_variance",
        "Divergence from the reference policy (nats)": "kl/reference",
    },
    "Speed": {
        "Trained tokens per second": "tokens_per_s",
        "Goodput and its factors (since the start)":
            "goodput/total goodput/engine goodput/admitted goodput/signal goodput/trained",
        "Seconds of a step": "learner/step_s learner/wait_s learner/sync_s learner/write_s",
        "Phases of a step (seconds)":
            "learner/forward_s learner/backward_s learner/optimizer_s learner/advantage_s learner/proximal_s "
            "learner/reference_s learner/values_s learner/critic_s",
        "Phases of the generators (fraction of their time since the start)":
            "generator/engine_fraction generator/requests_fraction generator/rewards_fraction "
            "generator/messages_fraction generator/idle_fraction generator/environments_fraction",
        "Fraction of the learner devices' peak (MFU)": "learner/mfu",
        "Tokens per second and device":
            "throughput/trained_tokens_per_s_per_device throughput/generated_tokens_per_s_per_device",
        "Peak memory of a process (bytes)":
            "learner/peak_memory_bytes generator/peak_memory_bytes critic/peak_memory_bytes "
            "reward_model/peak_memory_bytes replay/peak_memory_bytes",
        "Seconds of a group in each state": "group/generate_s group/queue_s group/train_s",
    },
    "Environment": {
        "Turns of an episode": "environment/turns",
        "Tokens that the environment says in an episode": "environment/observation_tokens",
        "Seconds for which an episode waits": "environment/wait_s/p50 environment/wait_s/p95 environment/reset_s",
        "Ends of episodes (fraction)": "environment/ended_done environment/ended_max_turns environment/ended_window",
        "Failed episodes (fraction)":
            "environment/failed/environment environment/failed/timeout environment/failed/overlong "
            "environment/failed/host",
        "Episodes in progress": "environment/live_episodes environment/waiting_episodes",
    },
    "Off-policy": {
        "Staleness of trained tokens (learner steps)": "staleness/mean staleness/max replay/staleness_limit",
        "Staleness gained in flight and in the queue": "staleness/in_flight staleness/in_queue",
        "Effective sample size of the importance weights": "correction/ess correction/ess_capped",
        "Distance of current and behavior policy (nats)": "correction/behavior_kl correction/mismatch_kl",
        "Fraction of tokens clipped, capped": "learner/clip_fraction correction/capped_fraction",
        "Active alarms of a collapse": "collapse/alarms",
    },
}  # fmt: skip
"""Section -> chart title -> metrics drawn in it. A chart is left out when the run has none of its metrics."""


SLOWEST = 0.95
"""Groups from this quantile of the total time on have a separate row."""
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
    num_members = [members[-1] + 1 if members else 1 for members in trained.column("members").to_pylist()]
    environment_s = waited_s / np.array(num_members)
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
        groups = [row for row in shown if row[0] == generator][:MAX_GROUPS]
        lanes = _lanes([(row[2], row[3]) for row in groups])
        for row, lane in zip(groups, lanes, strict=True):
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
