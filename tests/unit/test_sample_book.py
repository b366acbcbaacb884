"""The samples that a run records: which are chosen, when, and what readers get back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import DataError
from asyncrl.observe.samples import (
    EVERY_S,
    REASONS,
    Recorded,
    SampleBook,
    Samples,
    append_rows,
    choose,
    evaluated_file,
    evaluated_versions,
    read_evaluated,
    read_latest,
)
from asyncrl.types import Group, Lease, Prompt
from tests.helpers.replay import make_group


def read_trained(run_dir: Path) -> Samples:
    recorded = Recorded(run_dir)
    return recorded.read(list(range(len(recorded))))


def group(ticket: int, rewards: Sequence[float], lengths: Sequence[int]) -> Group:
    lease = Lease(ticket, 0, Prompt(ticket, np.arange(3, dtype=np.int32), "1", "test"))
    return make_group(lease, 0, rewards=rewards, completion_tokens=lengths)


def batch() -> list[Group]:
    groups = [group(0, (0.5, 0.0, 0.25), (2, 2, 9)), group(1, (0.75, 1.0, 0.0), (2, 2, 2))]
    groups[1].trajectories[2].error, groups[1].trajectories[2].status = "it broke", "failed"
    return groups


def names(samples: Samples) -> list[tuple[str, int, int]]:
    columns = ("chosen", "ticket", "index")
    return list(zip(*(samples.table[name].to_pylist() for name in columns), strict=True))


def test_those_that_inform_are_chosen_each_once() -> None:
    chosen = choose(batch(), step=1)
    assert names(chosen) == [("best", 1, 1), ("worst", 0, 1), ("failed", 1, 2), ("longest", 0, 2), ("median", 0, 0)]
    assert [reason for reason, _, _ in names(chosen)] == list(REASONS)
    assert [row["reward"] for row in chosen.table.to_pylist()] == [1.0, 0.0, None, 0.25, 0.5]
    assert chosen["staleness"].tolist() == [0] * 5 and chosen["step"].tolist() == [1] * 5
    assert names(choose([group(0, (1.0, 1.0), (2, 2))], step=1)) == [("best", 0, 1), ("worst", 0, 0)]
    assert len(choose([], step=1)) == 0


def test_a_step_is_recorded_when_the_last_one_is_old_enough(tmp_path: Path) -> None:
    now_s = 100.0
    book = SampleBook(tmp_path, clock=lambda: now_s)
    assert book.record(1, []) is None, "every group of the step was dropped"
    assert book.record(1, batch()) is not None
    now_s += EVERY_S - 0.1
    assert book.record(2, batch()) is None and book.record(2, batch(), is_last=True) is not None
    now_s += EVERY_S - 0.1
    now_s += 0.1
    assert book.record(3, batch()) is not None
    now_s += 100_000.0
    assert book.record(4, batch()) is not None
    now_s += 400.0
    assert book.record(5, batch()) is None, "a long run records less often"
    assert sorted(set(read_trained(tmp_path)["step"].tolist())) == [1, 2, 3, 4]
    assert set(read_latest(tmp_path)["step"].tolist()) == {4}


def test_what_is_read_is_what_was_recorded(tmp_path: Path) -> None:
    book = SampleBook(tmp_path)
    written = book.record(7, batch())
    assert written is not None
    read = read_trained(tmp_path)
    assert read.table.select(written.table.select(read.columns).column_names).equals(written.table.select(read.columns))
    with (tmp_path / "samples" / "trained.jsonl").open("a") as file:
        file.write('{"step": 8, "tok')  # the process is killed while it writes
    assert len(read_trained(tmp_path)) == len(written) == len(read_latest(tmp_path))
    SampleBook(tmp_path)._file.write_text("no line\n")
    with pytest.raises(DataError, match=r"trained\.jsonl: a line is not JSON: .*; delete the file"):
        read_trained(tmp_path)


def test_a_step_that_is_trained_again_is_there_once(tmp_path: Path) -> None:
    for step in (1, 2, 1, 2):
        SampleBook(tmp_path).record(step, batch())
    assert read_trained(tmp_path)["step"].tolist() == [1] * 5 + [2] * 5


def test_evaluated_completions_are_read_by_version_and_row(tmp_path: Path) -> None:
    assert evaluated_versions(tmp_path) == [] and len(read_evaluated(tmp_path, 0)) == 0
    for version in (10, 0):
        for ticket in (1, 0, 1):
            samples = Samples.of_groups([group(ticket, (1.0, 0.0), (2, 2))], outcome="evaluated")
            append_rows(evaluated_file(tmp_path, version), samples)
    assert evaluated_versions(tmp_path) == [0, 10]
    found = read_evaluated(tmp_path, 10)
    assert (found["row"].tolist(), found["index"].tolist()) == ([0, 0, 1, 1], [0, 1, 0, 1])


def test_a_full_disk_costs_the_record_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("a file where the folder should be")
    assert SampleBook(tmp_path).record(1, batch()) is not None
    assert len(read_trained(tmp_path)) == 0
