"""`asyncrl samples` and `asyncrl show`: what the model of a run has written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from asyncrl.observe.run_report import RunSummary
from asyncrl.observe.sample_search import (
    CONVERSATION,
    Query,
    check_samples_file,
    find_group,
    find_samples,
)
from asyncrl.observe.samples import ARRAYS, EPISODES, Samples
from asyncrl.util.text import printable

_NAME_WIDTH = 14


def show_samples(
    run_dir: Path, query: Query, console: Console, *, special_tokens: bool, as_json: bool, out: Path | None
) -> None:
    """Prints the trajectories that match, or writes them to `out`. Raises as `find_samples` does."""
    if out is not None:
        check_samples_file(out)
    found = find_samples(run_dir, query, special_tokens=special_tokens)
    if out is not None:
        found.samples.save(out)
        console.print(f"{out}: {len(found.samples)} trajectories written", highlight=False, soft_wrap=True)
        return
    for row in rows_of(found.samples):
        if as_json:
            print(json.dumps(row))
        else:
            print_sample(row, console)
    if not as_json:
        count = len(found.samples)
        what = "no trajectory matches" if not count else f"{count} trajector{'y' if count == 1 else 'ies'}"
        console.print(f"{what}; {found.searched}", style="dim", highlight=False, soft_wrap=True)
        for line in rows_lines(run_dir):
            console.print(line, style="dim", highlight=False, soft_wrap=True)


def rows_lines(run_dir: Path) -> list[str]:
    """Lines with the rows of the dataset by the state of their latest group: of all, and of each data source if
    there are several. Empty if neither the run nor its summary tells."""
    summary = RunSummary(run_dir)
    try:
        prompts: dict[str, Any] = summary.read().get("prompts", {})
    finally:
        summary.close()
    by_source: dict[str, dict[str, int]] = prompts.get("by_source", {})
    if not by_source:
        return []
    lines = [f"rows: {_kinds(prompts)}, {prompts['unseen']:,} unseen"]
    return lines + [
        f"  {printable(name)}: {_kinds(counts)}" for name, counts in by_source.items() if len(by_source) > 1
    ]


def _kinds(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{counts[name]:,} {name.replace('_', ' ')}" for name in ("solved", "learning", "never_solved"))


def show_group(run_dir: Path, ticket: int, console: Console, *, special_tokens: bool) -> None:
    """Prints the group of a ticket: its prompt once, then every completion, or the turns of every episode. Raises as
    `find_group` does."""
    rows = rows_of(find_group(run_dir, ticket, special_tokens=special_tokens))
    first = rows[0]
    step = "no step" if first["step"] is None else f"step {first['step']}"
    versions = f"versions {first['start_version']} to {first['end_version']}"
    facts = [f"ticket {ticket}", f"attempt {first['attempt']}", first["outcome"], step, f"row {first['row']}"]
    facts += [first["data_source"], f"generator {first['generator']}", versions]
    console.print(Text(" · ".join(map(printable, facts)), style="bold"), soft_wrap=True)
    _print_prompt(console, rows[0])
    if first["ground_truth"] is not None:
        _print_text(console, "truth", first["ground_truth"])
    for row in rows:
        console.print(Text(_facts(row), style="bold"), soft_wrap=True)
        _print_completion(console, row)


def _print_prompt(console: Console, row: Mapping[str, Any]) -> None:
    lines = row.get(CONVERSATION)
    if lines is None:
        _print_text(console, "prompt", row["prompt"])
        return
    for line in takewhile(lambda line: not line["said"], lines):
        _print_text(console, line["role"], line["text"])


def _print_completion(console: Console, row: Mapping[str, Any]) -> None:
    """Prints a completion, or the turns of an episode, each under its role, and of the policy's the newest version in
    it and the reward."""
    lines = row.get(CONVERSATION)
    if lines is None:
        _print_text(console, "completion", row["completion"])
        return
    for line in dropwhile(lambda line: not line["said"], lines):
        name = line["role"]
        if name in ("assistant", "policy") and line["version"] is not None:
            name = f"version {line['version']}"
        reward = "" if line["reward"] is None else f"   reward {line['reward']:g}"
        _print_text(console, name, line["text"], style="green" if line["said"] else "cyan", note=reward)


def rows_of(samples: Samples) -> list[dict[str, Any]]:
    """The samples as dicts, without the arrays of tokens."""
    table = samples.table.drop_columns([name for name in ("tokens", *ARRAYS, *EPISODES) if name in samples.columns])
    return table.to_pylist(maps_as_pydicts="strict")


def print_sample(row: Mapping[str, Any], console: Console) -> None:
    """Prints one trajectory with its prompt."""
    facts = [_place(row), row["data_source"], _facts(row)]
    console.print(Text(" · ".join(map(printable, facts)), style="bold"), soft_wrap=True)
    _print_prompt(console, row)
    _print_completion(console, row)
    if row["ground_truth"] is not None:
        _print_text(console, "truth", row["ground_truth"])
    console.print()


def _place(row: Mapping[str, Any]) -> str:
    """Returns the origin of the trajectory: its step, or the evaluated version."""
    if row["outcome"] == "evaluated":
        return f"evaluation of version {row['end_version']} · row {row['row']}"
    step = "not trained" if row["step"] is None else f"step {row['step']}"
    member = f" (member {row['member']})" if row["member"] != row["index"] else ""
    return f"{step} · ticket {row['ticket']}.{row['index']}{member}"


def _facts(row: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{name} {value:g}" for name, value in row["reward_parts"].items())
    facts: list[str] = []
    if row["reward"] is not None:
        facts.append(f"reward {row['reward']:g}" + (f" ({printable(parts)})" if len(row["reward_parts"]) > 1 else ""))
    if row["staleness"] is not None:
        facts.append(f"staleness {row['staleness']}")
    facts.append(f"{row['status']}, {row['num_action_tokens']} tokens")
    if row["outcome"] not in ("trained", "evaluated"):
        facts.append(row["outcome"])
    if row["error"]:
        facts.append(f"no reward: {printable(row['error'])}")
    return " · ".join(facts)


def _print_text(console: Console, name: str, text: str, *, style: str = "", note: str = "") -> None:
    """Prints a text under its name, with a note after it; further lines are indented."""
    lines = printable(text).split("\n")
    for number, line in enumerate(lines):
        head = f"  {name if not number else '':{_NAME_WIDTH - 2}}"
        console.print(
            Text.assemble((head, "dim"), (line, style), (note if line is lines[-1] else "", "dim")), soft_wrap=True
        )
