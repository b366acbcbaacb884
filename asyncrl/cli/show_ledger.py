"""`asyncrl ledger`: accounts for every group, trajectory and token of a run, and checks that they add up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.launch.run_dir import is_running, read_endpoints
from asyncrl.replay.client import LauncherClient
from asyncrl.replay.journal import Loader, read_journal, segments_of
from asyncrl.replay.queue_store import recover
from asyncrl.replay.report import run_summary
from asyncrl.replay.state import QueueState, Snapshot, event_of
from asyncrl.types import Prompt, PromptPosition
from asyncrl.util.files import read_json

UNITS = ("groups", "trajectories", "tokens")


class UnknownPrompts:
    """Stand-in for a run's prompts where only their number matters."""

    skipped_rows = 0
    filtered_rows = 0
    num_rows = 0

    def __next__(self) -> Prompt:
        """An empty prompt: which row it is of does not matter."""
        return self.prompt(-1)

    def prompt(self, row: int) -> Prompt:
        """An empty prompt of this row."""
        return Prompt(row, np.empty(0, dtype=np.int32), "", "")

    @property
    def position(self) -> PromptPosition:
        """The start: there is no position to save."""
        return PromptPosition()

    def seek(self, position: PromptPosition) -> None:
        """Does nothing: there is no position to restore."""


def read_ledger(run_dir: Path) -> tuple[dict[str, Any], str]:
    """The run's `ledger`, `outcomes` and `bias`, as in its summary, and their source: the live run, its summary, or
    the journal of a run that was killed.

    Raises ConfigError when there is no run, or nothing to read, and JournalError when its journal is damaged.
    """
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir}: not the folder of a run, config.yaml is missing; give runs/NAME")
    if is_running(run_dir):
        client = LauncherClient(read_endpoints(run_dir))
        try:
            return client.summary(), "the live run"
        finally:
            client.close()
    file = run_dir / "summary.json"
    if file.is_file() and "ledger" in (summary := read_json(file)):
        return summary, f"{file} ({summary['status']})"
    if not segments_of(run_dir / "journal"):
        raise ConfigError(f"{run_dir}: has neither a summary nor a journal; the run ended before its first lease")
    return _recover(run_dir), f"{run_dir / 'journal'} (the run was killed)"


def _recover(run_dir: Path) -> dict[str, Any]:
    journal = Loader(run_dir / "journal")
    location, first = next(read_journal(journal.folder))
    snapshot = event_of(first, location, journal.folder)
    assert isinstance(snapshot, Snapshot)
    num_eval_prompts = snapshot.queue.rules["number of evaluation prompts"]
    prompts = UnknownPrompts()
    state = QueueState(load_config(run_dir / "config.yaml"), prompts, None, [prompts.prompt(-1)] * num_eval_prompts)
    recover(state, journal)
    return run_summary(state.measure, state.ledger, stop_reason=state.stop_reason)


def show_ledger(run_dir: Path, console: Console) -> bool:
    """Prints the ledger; returns True if it adds up."""
    summary, source = read_ledger(run_dir)
    boxes = boxes_of(summary["ledger"])
    table = Table(box=None, padding=(0, 3, 0, 0))
    table.add_column()
    for unit in UNITS:
        table.add_column(unit, justify="right")
    for name, counts in boxes.items():
        table.add_row(name, *(f"{counts[unit]:,}" if unit in counts else "" for unit in UNITS))
    console.print(f"from {source}", highlight=False, soft_wrap=True)
    console.print(table)
    wrong = list(differences(boxes))
    for line in wrong:
        console.print(line, style="bold red", highlight=False)
    if not wrong:
        console.print("generated = trained + refunded + returned + in flight: it adds up", style="green")
    _show_outcomes(console, summary)
    return not wrong


def boxes_of(ledger: dict[str, Any]) -> dict[str, dict[str, int]]:
    """State of the ledger -> unit -> count, "generated" first."""
    trajectories, tokens = ledger["trajectories"], ledger["tokens"]
    boxes = {
        "generated": {
            "groups": ledger["leased"],
            "trajectories": trajectories["generated"],
            "tokens": tokens["generated"],
        },
        "trained": {"groups": ledger["trained"], "trajectories": trajectories["trained"], "tokens": tokens["trained"]},
    }
    for reason, groups in ledger["refunded"].items():
        counts = trajectories["refunded"][reason], tokens["refunded"][reason]
        boxes[f"refunded ({reason})"] = dict(zip(UNITS, (groups, *counts), strict=True))
    boxes["returned"] = {"trajectories": trajectories.get("returned", 0), "tokens": tokens["returned"]}
    boxes["in flight"] = {
        "groups": ledger["in_flight"],
        "trajectories": trajectories["in_flight"],
        "tokens": tokens["in_flight"],
    }
    return boxes


def differences(boxes: dict[str, dict[str, int]]) -> Iterator[str]:
    """A line for every unit whose states do not sum to the generated count."""
    for unit in UNITS:
        generated = boxes["generated"][unit]
        kept = sum(counts.get(unit, 0) for name, counts in boxes.items() if name != "generated")
        if generated != kept:
            yield f"{unit} do not add up: {generated:,} generated, {kept:,} in the boxes"


def _show_outcomes(console: Console, summary: dict[str, Any]) -> None:
    table = Table(box=None, padding=(0, 3, 0, 0))
    for name in ("", "tokens of a trajectory", "reward", "failed rewards"):
        table.add_column(name, justify="right" if name else "left")
    for name, outcome in summary["outcomes"].items():
        table.add_row(
            name if name == "trained" else f"refunded ({name})",
            f"{outcome['tokens_mean']:.1f} +- {outcome['tokens_std']:.1f}",
            f"{outcome['reward_mean']:.3f} +- {outcome['reward_std']:.3f}",
            f"{outcome['rewards_failed']:,}" if "rewards_failed" in outcome else "not counted",
        )
    console.print("", table)
    for sentence in summary["bias"]:
        console.print(f"bias: {sentence}", style="yellow", highlight=False, soft_wrap=True)
    if not summary["bias"]:
        console.print("no bias: refunded trajectories are about as long as trained ones", highlight=False)
