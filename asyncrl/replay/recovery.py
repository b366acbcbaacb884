"""The queue's state out of the journal: the newest state in it, and the records after that one applied again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack
import structlog

from asyncrl.errors import JournalError, RunError
from asyncrl.replay.clock import RunClock
from asyncrl.replay.journal import Journal, Record, read_journal
from asyncrl.replay.segments import WITHOUT, Loader, segments_of
from asyncrl.replay.state import QueueState

log = structlog.get_logger()


@dataclass(slots=True)
class Recovered:
    """What the journal says of the process that wrote it last."""

    run_id: str
    origin_s: float
    at_s: float
    """When the last record was made, in seconds of the run."""
    segment: int
    """That the last record is in."""


def snapshot(state: QueueState, clock: RunClock, run_id: str) -> dict[str, Any]:
    """Body of a "state" record, and what a checkpoint keeps of the queue."""
    return {
        "run_id": run_id,
        "origin_s": clock.origin_s,
        "at_s": clock.now(),
        "told": state.told(),
        "queue": state.state_dict(),
    }


def recover(state: QueueState, journal: Journal | Loader, *, until_step: int | None = None) -> Recovered | None:
    """Brings a new state to where the journal ends, or to right after the commit of a step; None when the journal is
    empty. A Loader changes nothing of it. Raises JournalError when it is damaged."""
    found = _newest_state(journal, until_step)
    if found is None:
        return None
    segment, body = found
    state.load_state_dict(body["queue"], load=journal.load, now_s=body["at_s"])
    state.load_told(body["told"], body["at_s"])
    recovered = Recovered(body["run_id"], body["origin_s"], body["at_s"], segment)
    for location, record in read_journal(journal.folder, first_segment=segment):
        if record.kind != "state":
            # A view would keep the whole batch in memory.
            own = Record(record.kind, record.body, [array.copy() for array in record.arrays])
            state.apply(own, location)
        recovered.segment = location[0]
        recovered.at_s = max(recovered.at_s, record.body.get("at_s", 0.0))
        if record.kind == "commit" and record.body["step"] == until_step:
            return recovered
    if until_step is not None:
        raise JournalError(f"{journal.folder}: step {until_step} is not in it any more; {WITHOUT}")
    return recovered


def state_after(state: QueueState, journal: Journal, step: int) -> dict[str, Any]:
    """`QueueState.state_dict` as it was right after the commit of an earlier step that the journal still has."""
    place = state.prompts.state_dict()
    then = QueueState(state.config, state.prompts, None, state.eval_prompts)
    try:
        recover(then, journal, until_step=step)
        return then.state_dict()
    finally:
        state.prompts.load_state_dict(place)


def load_checkpoint(state: QueueState, data: bytes) -> float:
    """Goes on from the queue's part of a checkpoint, with every ticket taken back; gives the run's seconds then.

    Raises RunError when it cannot be read, ConfigError when the run's settings do not fit it.
    """
    try:
        body = msgpack.unpackb(data, strict_map_key=False)
        queue, told, at_s = body["queue"], body["told"], float(body["at_s"])
    except (ValueError, KeyError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise RunError(
            f"queue.msgpack of the checkpoint cannot be read ({type(error).__name__}: {error}); remove that checkpoint "
            "to resume from the one before"
        ) from None
    state.load_state_dict(queue, load=None, now_s=at_s)
    state.load_told(told, None)
    log.info("queue resumed from a checkpoint", step=state.ledger.steps, tickets_taken_back=len(state.ledger.live))
    return at_s


def _newest_state(journal: Journal | Loader, until_step: int | None) -> tuple[int, dict[str, Any]] | None:
    """The last segment that has a record, or that was begun before the step was committed, and the state in it."""
    if isinstance(journal, Journal):
        journal.write()
    for segment in reversed(segments_of(journal.folder)):
        first = next(read_journal(journal.folder, first_segment=segment), None)
        if first is None or first[0][0] != segment:
            continue
        record = first[1]
        if record.kind != "state":
            raise JournalError(f"{journal.folder}: segment {segment} begins with a {record.kind!r}; {WITHOUT}")
        if until_step is None or record.body["queue"]["ledger"]["steps"] < until_step:
            return segment, record.body
    return None
