"""Snapshots of the queue's state: one struct that names every part, for checkpoints and the start of each segment.

A snapshot also has the settings that must not change between saving and restoring it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError, JournalError, RunError
from asyncrl.observe.metrics import RunSums
from asyncrl.observe.stats import ReportedStats
from asyncrl.replay.evaluation.book import EvalRecord
from asyncrl.replay.journal.reader import OTHER_FORMAT, WITHOUT
from asyncrl.replay.journal.records import FORMAT
from asyncrl.replay.journal.retention import Coverage
from asyncrl.replay.ledger_counts import LedgerCounts
from asyncrl.replay.prompts.selection import SelectionRecord
from asyncrl.replay.refunds import Failures
from asyncrl.replay.staleness_control import ControllerState
from asyncrl.replay.tickets import HeldTicket, TakenStep
from asyncrl.types import PromptPosition
from asyncrl.util.durable import Durable, of_plain


class QueueSnapshot(Durable):
    """The durable attributes of a `QueueState`, without reported stats and the frames of groups."""

    rules: dict[str, int]
    """The result of `rules_of`."""
    position: PromptPosition
    ledger: LedgerCounts
    measure: RunSums
    selection: SelectionRecord
    evaluation: EvalRecord
    staleness_controller: ControllerState | None
    held: dict[int, HeldTicket]
    """By number of the ticket."""
    taken: list[TakenStep]
    stop_reason: str
    generators_wanted: int
    unused_in_a_row: int
    failures: Failures
    late: dict[int, dict[int, int]]
    committed: dict[str, float]
    coverage: Coverage


class Snapshot(Durable):
    """The body of a "state" record, and the queue's part of a checkpoint, as `Store` writes their plain form."""

    format: int
    run_id: str
    origin_s: float
    """Start of the run on the machine's monotonic clock."""
    at_s: float
    """Time of the snapshot, in seconds of the run."""
    reported: ReportedStats
    queue: QueueSnapshot

    @classmethod
    def of_bytes(cls, data: bytes) -> Snapshot:
        """The queue's part of a checkpoint. Raises RunError if it cannot be read, or is of another format."""
        try:
            body = msgspec.msgpack.decode(data)
            # Format 2 had no number.
            if isinstance(body, dict) and (found := body.get("format", 2)) != FORMAT:
                raise RunError(f"queue.msgpack of the checkpoint is of format {found}; {OTHER_FORMAT}")
            return of_plain(cls, body)
        except msgspec.DecodeError as error:
            raise RunError(
                f"queue.msgpack of the checkpoint cannot be read ({type(error).__name__}: {error}); remove that "
                "checkpoint to resume from the one before"
            ) from None

    @classmethod
    def of_record(cls, body: Any, where: str) -> Snapshot:
        """The body of a "state" record. Raises JournalError, which names the place `where`, if it cannot be read."""
        try:
            return of_plain(cls, body)
        except msgspec.ValidationError as error:
            raise JournalError(f"{where}: the state there cannot be read: {error}; {WITHOUT}") from None


def rules_of(config: Config, num_eval_prompts: int) -> dict[str, int]:
    """Returns the settings that must not change between saving and restoring the queue's state, by config key."""
    return {
        "replay.groups_per_step": config.replay.groups_per_step,
        "replay.max_staleness": config.replay.max_staleness,
        "generator.group_size": config.generator.group_size,
        "eval.samples": config.eval.samples,
        "number of evaluation prompts": num_eval_prompts,
    }


def check_rules(before: dict[str, int], now: dict[str, int]) -> None:
    """Raises ConfigError if a setting differs from its value when the run started."""
    for key, value in now.items():
        if value != before[key]:
            raise ConfigError(
                f"{key} = {value}: the run was started with {before[key]}; resume it with that, or start a new run"
            )
