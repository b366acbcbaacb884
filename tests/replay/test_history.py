"""Batches out of the journal alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from asyncrl.errors import JournalError
from asyncrl.observe.stats import ReportedStats
from asyncrl.replay.codec import JournalRecord, pack_group
from asyncrl.replay.history import JournalBatches, read_index
from asyncrl.replay.journal import Journal
from asyncrl.replay.state import CommitEvent, GroupEvent, TakeEvent, record_of
from asyncrl.types import Group, Lease, Prompt
from asyncrl.wire.messages import Committed
from tests.helpers.journal import record_with
from tests.helpers.replay import make_group

METRICS = {"learner/loss": 0.1, "replay/held_bytes": 7.0, "eval/reward": 0.25}
OWN = ["replay/held_bytes", "eval/reward"]


def group(ticket: int, attempt: int = 0, *, tokens: int = 2) -> Group:
    prompt = Prompt(ticket + 10, np.arange(3, dtype=np.int32), "1", "test")
    return make_group(Lease(ticket, attempt, prompt), 0, completion_tokens=(tokens, ticket + 2))


def record(one: Group, **changes: object) -> JournalRecord:
    header, arrays = pack_group(one)
    made = record_of(GroupEvent(header, refunded="", signal=True), arrays)
    plain = msgspec.msgpack.decode(made.body)
    for name, value in changes.items():
        (plain if name in plain else plain["header"])[name] = value
    return JournalRecord("group", msgspec.msgpack.encode(plain), arrays)


def commit(step: int, learners: int = 2) -> JournalRecord:
    metrics = METRICS | {"replay/held_bytes": float(step)}
    return record_of(
        CommitEvent(
            step=step,
            metrics=metrics,
            own=OWN,
            reported=ReportedStats(),
            at_s=1.0,
            learners=learners,
            evaluates=False,
            stops=False,
        )
    )


def take(step: int, shards: list[list[int]]) -> JournalRecord:
    return record_of(TakeEvent(step, shards, [], 1.0))


SEGMENTS = [
    [
        JournalRecord("state", b""),
        record(group(0)),
        record(group(3)),
        JournalRecord("lease", b""),
        JournalRecord("lose", b""),
        record(group(1, 1)),
        record(group(2, 0, tokens=9), refunded="zero_variance"),
        take(1, [[3, 0], [1]]),
    ],
    [JournalRecord("state", b""), commit(1), record(group(4)), record(group(6))],
    [JournalRecord("state", b""), record(group(5)), take(2, [[4], [6, 5]]), commit(2)],
    [JournalRecord("state", b""), record(group(7)), record(group(8)), take(3, [[7], [8]])],
]


def make(folder: Path, segments: list[list[JournalRecord]] = SEGMENTS) -> Path:
    """A journal of these records, a few to a batch."""
    journal = Journal(folder, flush="os")
    for number, records in enumerate(segments):
        if number:
            journal.rotate()
        for index, one in enumerate(records):
            journal.append(one)
            if index % 3 == 2:
                journal.write()
        journal.write()
    journal.close()
    return folder


def drop(folder: Path, *numbers: int) -> None:
    journal = Journal(folder, flush="os")
    journal.drop(numbers)
    journal.close()


def same(one: Group, other: Group) -> bool:
    (header, arrays), (other_header, other_arrays) = pack_group(one), pack_group(other)
    return header == other_header and all(a.tobytes() == b.tobytes() for a, b in zip(arrays, other_arrays, strict=True))


def test_every_rank_gets_its_groups_of_every_committed_step_in_their_order(tmp_path: Path) -> None:
    folder = make(tmp_path)
    expected = {1: [[group(3), group(0)], [group(1, 1)]], 2: [[group(4)], [group(6), group(5)]]}
    for rank in (0, 1):
        batches = JournalBatches(folder, rank, ranks=2)
        assert batches.begin(0) == 2
        for step in (1, 2):
            shard = batches.take(step)
            assert shard is not None
            assert shard.step == step
            assert len(shard.groups) == len(expected[step][rank])
            assert all(same(one, want) for one, want in zip(shard.groups, expected[step][rank], strict=True))
            for one in shard.groups:
                for trajectory in one.trajectories:
                    trajectory.check()
            own = {"replay/held_bytes": float(step), "eval/reward": 0.25}
            assert batches.commit(step, {"learner/loss": 9.0}, saving=True, checkpoints=[1]) == Committed(
                own, b"", False, False, 0, False
            )
        assert batches.take(3) is None, "taken but never committed"
        assert list(batches.evaluations(lambda: False)) == []
        batches.close()


def test_a_learner_may_start_after_what_it_has_trained(tmp_path: Path) -> None:
    batches = JournalBatches(make(tmp_path), 0, ranks=2)
    assert [batches.begin(step) for step in (1, 2)] == [2, 2]
    assert batches.first == 1
    with pytest.raises(JournalError, match="ends with step 2, and the learner has trained 3 steps; start from an earl"):
        batches.begin(3)


def test_steps_whose_segments_were_dropped_are_named(tmp_path: Path) -> None:
    drop(make(tmp_path), 1)
    batches = JournalBatches(tmp_path, 0, ranks=2)
    with pytest.raises(JournalError, match=r"step 1 is not there any more, the first one there is 2; .*retention=all"):
        batches.begin(0)
    with pytest.raises(JournalError, match="step 1 is not there; it has steps 2 to 2"):
        batches.take(1)
    assert batches.begin(1) == 2
    assert batches.take(2) is not None
    drop(tmp_path, 2)
    with pytest.raises(JournalError, match=r"step 1 is not there any more, nor is any after it; .*retention=all"):
        JournalBatches(tmp_path, 0, ranks=2).begin(0)


def test_a_folder_without_a_journal_or_a_committed_step_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="nowhere: there is no journal; give the folder of a run"):
        JournalBatches(tmp_path / "nowhere", 0, ranks=2)
    make(tmp_path / "none", [SEGMENTS[0]])
    with pytest.raises(JournalError, match="no step was committed, so there is nothing to train again"):
        JournalBatches(tmp_path / "none", 0, ranks=2).begin(0)


def test_another_number_of_ranks_gets_the_same_groups(tmp_path: Path) -> None:
    folder = make(tmp_path)

    def dealt(step: int, ranks: int) -> list[list[int]]:
        shards = [JournalBatches(folder, rank, ranks=ranks).take(step) for rank in range(ranks)]
        return [[group.ticket for group in shard.groups] for shard in shards if shard is not None]

    # Groups of higher tickets are longer, and the longest is dealt first.
    assert [dealt(1, ranks) for ranks in (1, 2, 3)] == [[[0, 1, 3]], [[3, 0], [1]], [[3], [1], [0]]]
    assert [dealt(2, ranks) for ranks in (1, 2, 3)] == [[[4, 5, 6]], [[4], [6, 5]], [[6], [5], [4]]]


def test_the_number_of_ranks_that_trained_a_step_is_known(tmp_path: Path) -> None:
    folder = make(tmp_path, [SEGMENTS[0], SEGMENTS[1], [*SEGMENTS[2][:-1], commit(2, learners=1)]])
    assert {step: one.learners for step, one in read_index(folder).steps.items()} == {1: 2, 2: 1}


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (record(group(0), status=None), "row 1: the 'group' there cannot be read: Expected `array`, got `None`"),
        (record_with("commit", step=1), "row 1: the 'commit' there cannot be read: .*required field `metrics`"),
        (JournalRecord("commit", b"\xc1"), "row 1: the 'commit' there cannot be read: .*malformed"),
    ],
)
def test_records_that_the_queue_would_not_write_are_errors(tmp_path: Path, record: JournalRecord, text: str) -> None:
    make(tmp_path, [[take(1, [[0]]), record]])
    with pytest.raises(JournalError, match=text):
        JournalBatches(tmp_path, 0, ranks=2)
