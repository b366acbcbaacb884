"""Batches out of the journal alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from asyncrl.errors import JournalError
from asyncrl.replay.codec import pack_group
from asyncrl.replay.journal.history import JournalBatches, trained_steps
from asyncrl.replay.journal.writer import Journal, Record
from asyncrl.types import Group, Lease, Prompt
from asyncrl.wire.learner_messages import Committed
from tests.helpers.replay import make_group

METRICS = {"learner/loss": 0.1, "replay/held_bytes": 7.0, "eval/reward": 0.25}
OWN = ["replay/held_bytes", "eval/reward"]


def group(ticket: int, attempt: int = 0, *, tokens: int = 2) -> Group:
    prompt = Prompt(ticket + 10, np.arange(3, dtype=np.int32), "1", "test")
    return make_group(Lease(ticket, attempt, prompt), 0, completion_tokens=(tokens, ticket + 2))


def record(one: Group, **changes: object) -> Record:
    header, arrays = pack_group(one)
    return Record("group", structs.asdict(header) | {"refunded": "", "signal": True, **changes}, arrays)


def commit(step: int) -> Record:
    return Record("commit", {"step": step, "metrics": METRICS | {"replay/held_bytes": float(step)}, "own": OWN})


def take(step: int, shards: list[list[int]]) -> Record:
    return Record("take", {"step": step, "shards": shards, "dropped": [], "at_s": 1.0})


SEGMENTS = [
    [
        Record("state", {}),
        record(group(0)),
        record(group(3)),
        Record("lease", {"tickets": [[1, 0], [1, 1]]}),
        Record("lose", {"tokens": 3}),
        record(group(1, 1)),
        record(group(2, 0, tokens=9), refunded="zero_variance"),
        take(1, [[3, 0], [1]]),
    ],
    [Record("state", {}), commit(1), record(group(4)), record(group(6))],
    [Record("state", {}), record(group(5)), take(2, [[4], [6, 5]]), commit(2)],
    [Record("state", {}), record(group(7)), record(group(8)), take(3, [[7], [8]])],
]


def make(folder: Path, segments: list[list[Record]] = SEGMENTS) -> Path:
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
    by_one = commit(2)
    by_one.body["learners"] = 1
    folder = make(tmp_path, [SEGMENTS[0], SEGMENTS[1], [*SEGMENTS[2][:-1], by_one]])
    assert {step: one.learners for step, one in trained_steps(folder).items()} == {1: 2, 2: 1}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"lengths": [5]}, "1 lengths|1 rewards|2 rewards"),
        ({"lengths": [5, 50]}, "lengths do not add up"),
        ({"status": None}, "ValidationError: Expected `array`, got `null` - at `\\$.status`"),
    ],
)
def test_a_group_that_the_queue_would_not_write_is_an_error(tmp_path: Path, change: dict, text: str) -> None:
    make(tmp_path, [[record(group(0), **change), take(1, [[0]]), commit(1)]])
    batches = JournalBatches(tmp_path, 0, ranks=2)
    assert batches.begin(0) == 1
    with pytest.raises(JournalError, match=rf"segment 1, record batch 0, row 0: the 'group' there is not .*({text})"):
        batches.take(1)


def test_other_records_that_the_queue_would_not_write_are_errors(tmp_path: Path) -> None:
    make(tmp_path, [[take(1, [[0]]), Record("commit", {"step": 1})]])
    with pytest.raises(JournalError, match=r"row 1: the 'commit' there is not what the replay queue writes \(KeyError"):
        JournalBatches(tmp_path, 0, ranks=2)
