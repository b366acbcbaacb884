"""Every field of every struct in a snapshot is saved and restored, and what does not fit is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from itertools import count
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import pytest

from asyncrl.errors import JournalError, RunError
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.codec import FORMAT, JournalRecord, pack_group
from asyncrl.replay.journal import Location
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.results import RowResults
from asyncrl.replay.state import GroupEvent, QueueSnapshot, QueueState, Snapshot, event_of, record_of
from asyncrl.types import Lease, PromptPosition
from asyncrl.util.durable import of_bytes
from asyncrl.wire.messages import FolderName
from tests.helpers.replay import EndlessPrompts, ask_queue, make_group, small_config

LEAST_FIELDS = 90
"""So that the walk is known to reach the structs inside of structs."""


def example(kind: Any, numbers: Iterator[int]) -> Any:
    """A value of the type. No two are the same, and every field of a struct differs from its default."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return "v000001-00000000" if kind is FolderName else example(args[0], numbers)
    if origin in (Union, UnionType):
        return example(next(arg for arg in args if arg is not NoneType), numbers)
    if origin is Literal:
        return args[next(numbers) % len(args)]
    if origin is dict:
        return {example(args[0], numbers): example(args[1], numbers) for _ in range(2)}
    if origin in (list, tuple):
        return origin(example(arg, numbers) for arg in (args * 2 if origin is list else args))
    if issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        made = kind(**{field.name: example(field.type, numbers) for field in fields})
        fresh = {field.name: field.default for field in fields if field.default is not msgspec.NODEFAULT}
        assert all(getattr(made, name) != value for name, value in fresh.items())
        return made
    if kind is bool:
        return True
    if issubclass(kind, Enum):
        return list(kind)[-1]
    if issubclass(kind, str | bytes):
        return f"text {next(numbers)}" if kind is str else bytes([next(numbers) % 256])
    return next(numbers) + 0.5 if kind is float else next(numbers)


def make_state() -> QueueState:
    config = small_config(replay__max_staleness=3, algorithm__max_divergence=0.1, data__eval="eval.parquet")
    return QueueState(config, EndlessPrompts(), None, [EndlessPrompts().prompt(0)])


def make_snapshot(state: QueueState) -> Snapshot:
    """One whose fields all differ from those of a new state, and which fits its settings and prompts."""
    made = example(Snapshot, count(2))
    made.format = FORMAT
    made.queue.rules, made.queue.position = state.rules, PromptPosition(drawn=7)
    rows = RowResults(9)
    rows.kinds[5] = 1
    made.queue.results.packed = rows.packed
    return made


class OneGroup:
    """A journal that has the same group everywhere."""

    folder = Path("journal")

    def load(self, location: Location) -> JournalRecord:
        header, arrays = pack_group(make_group(Lease(0, 0, EndlessPrompts().prompt(0)), 0))
        return record_of(GroupEvent(header, "", signal=True), arrays)


JOURNAL: Any = OneGroup()
HERE = 3, 0, 0


def encoded(state: QueueState) -> bytes:
    return msgspec.msgpack.encode(state.snapshot())


def test_every_field_is_saved_and_restored() -> None:
    state = make_state()
    stored = make_snapshot(state)
    before = state.snapshot()
    for name in set(QueueSnapshot.__struct_fields__) - {"rules"}:
        assert getattr(before, name) != getattr(stored.queue, name), f"{name} is as at the start"
    record = record_of(stored)
    for again in (Snapshot.of_checkpoint(record.body), event_of(record, HERE, Path())):
        assert isinstance(again, Snapshot) and again == stored
        state = make_state()
        state.restore(again.queue, JOURNAL)
        assert of_bytes(QueueSnapshot, encoded(state)) == stored.queue
        assert state.measure.generators == stored.queue.reported.generators
        assert state.evaluation.reported.loaded == stored.queue.reported.loaded


def test_what_a_queue_saves_is_read_as_a_snapshot_of_the_same_bytes(tmp_path: Path) -> None:
    queue = ReplayQueue(small_config(), EndlessPrompts(), TraceWriter(tmp_path / "trace.parquet"))
    leases, _ = ask_queue(queue, 0, 0, 2)
    queue.finish(*pack_group(make_group(leases[0], 0)))
    saved = queue.store.snapshot()
    queue.store.close()
    assert msgspec.msgpack.encode(Snapshot.of_checkpoint(saved)) == saved


def structs_of(value: Any, plain: Any) -> Iterator[dict[str, Any]]:
    """The plain form of each struct in the value."""
    if isinstance(value, msgspec.Struct):
        yield plain
        for name in value.__struct_fields__:
            yield from structs_of(getattr(value, name), plain[name])
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from structs_of(item, plain[key])
    elif isinstance(value, list):
        for item, its in zip(value, plain, strict=True):
            yield from structs_of(item, its)


def read(plain: Any) -> Any:
    return event_of(JournalRecord("state", msgspec.msgpack.encode(plain)), HERE, Path("journal"))


def test_a_field_that_is_missing_or_unknown_is_refused_by_name() -> None:
    stored = make_snapshot(make_state())
    plain = msgspec.msgpack.decode(record_of(stored).body)
    seen = 0
    for struct in structs_of(stored, plain):
        for name in list(struct):
            kept = struct.pop(name)
            with pytest.raises(JournalError, match=f"segment 3, .*: the 'state' there cannot be read: .*`{name}`"):
                read(plain)
            struct[name] = kept
            seen += 1
        struct["new"] = 1
        with pytest.raises(JournalError, match=r"segment 3, .*cannot be read: .*unknown field `new`"):
            read(plain)
        del struct["new"]
    assert seen >= LEAST_FIELDS
    assert read(plain) == stored


def test_a_checkpoint_that_does_not_fit_names_the_field_and_the_way_out() -> None:
    plain = msgspec.msgpack.decode(record_of(make_snapshot(make_state())).body)
    plain["queue"]["ledger"]["steps"] = "many"
    with pytest.raises(RunError, match=r"Expected `int`, got `str` - at `\$\.queue\.ledger\.steps`.*one before"):
        Snapshot.of_checkpoint(msgspec.msgpack.encode(plain))
