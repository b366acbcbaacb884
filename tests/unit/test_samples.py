"""The table of trajectories: groups come back as they were, and what selects, cuts, joins, decodes and stores it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import DataError
from asyncrl.observe.samples import ARRAYS, SCHEMA, Samples
from asyncrl.types import NO_VERSION, Group, Trajectory
from tests.helpers.examples import examples


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    mask = np.array([False, *draw(st.lists(st.booleans(), max_size=6))])
    size = len(mask)
    numbers = st.lists(st.integers(0, 1 << 20), min_size=size, max_size=size)
    logprobs = st.lists(st.floats(-50, 0, width=32), min_size=size, max_size=size)
    status = draw(st.sampled_from(["completed", "truncated", "failed"]))
    return Trajectory(
        tokens=np.array(draw(numbers), dtype=np.int32),
        action_mask=mask,
        behavior_logprobs=np.where(mask, np.array(draw(logprobs), dtype=np.float32), np.float32(0)),
        versions=np.where(mask, np.array(draw(numbers), dtype=np.int32), NO_VERSION).astype(np.int32),
        status=status,
        reward=0.0 if status == "failed" else draw(st.floats(-1e30, 1e30)),
        reward_parts=draw(st.dictionaries(st.text(max_size=3), st.floats(-10, 10), max_size=2)),
        error=draw(st.text(max_size=5)),
        member=0,
    )


@st.composite
def rows(draw: st.DrawFn) -> list[Trajectory]:
    """The trajectories of one or more members, with one or more rows each."""
    made = draw(st.lists(trajectories(), min_size=1, max_size=3))
    numbers = accumulate(draw(st.lists(st.integers(0, 1), min_size=len(made) - 1, max_size=len(made) - 1)), initial=0)
    return [replace(one, member=number) for one, number in zip(made, numbers, strict=True)]


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    return [
        Group(
            ticket=ticket,
            attempt=draw(st.integers(0, 9)),
            generator=draw(st.integers(0, 9)),
            row=draw(st.integers(0, 1 << 40)),
            data_source=draw(st.text(max_size=5)),
            start_version=draw(st.integers(0, 99)),
            end_version=draw(st.integers(0, 99)),
            trajectories=draw(rows()),
            started_s=draw(st.floats(0, 1e9)),
            finished_s=draw(st.floats(0, 1e9)),
            greedy_reward=draw(st.none() | st.floats(-9, 9)),
            greedy_tokens=draw(st.integers(0, 9)),
        )
        for ticket in range(draw(st.integers(0, 3)))
    ]


def assert_same(one: Any, other: Any) -> None:
    for field in fields(one):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right)
        elif field.name == "trajectories":
            assert len(left) == len(right)
            for member, same in zip(left, right, strict=True):
                assert_same(member, same)
        else:
            assert left == right


@settings(max_examples=examples(60))
@given(groups())
def test_groups_come_back_as_they_were(made: list[Group]) -> None:
    found = Samples.of_groups(made).to_groups()
    assert len(found) == len(made)
    for one, other in zip(made, found, strict=True):
        assert_same(one, other)


def member(tokens: Sequence[int], reward: float, *, prompt: int = 2, version: int = 3, **others: Any) -> Trajectory:
    mask = np.arange(len(tokens)) >= prompt
    return Trajectory(
        tokens=np.array(tokens, dtype=np.int32),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.where(mask, version, NO_VERSION).astype(np.int32),
        status="completed",
        reward=reward,
        **others,
    )


def group(ticket: int, *members: Trajectory) -> Group:
    return Group(ticket, 0, 1, 10 + ticket, "sums", 3, 4, list(members))


@pytest.fixture
def samples() -> Samples:
    first = group(0, member([1, 2, 3], 0.5), member([1, 2, 4, 5], 1.0, reward_parts={"exact": 1.0}))
    second = group(1, member([6, 7], -1.0), member([6, 7, 8], 0.5, version=2))
    return Samples.of_groups([first, second], step=5, outcome="trained")


def test_a_row_tells_the_trajectory(samples: Samples) -> None:
    assert (len(samples), set(samples.columns)) == (4, {*SCHEMA.names, *ARRAYS})
    assert samples["num_prompt_tokens"].tolist() == [2, 2, 2, 2]
    assert samples["num_action_tokens"].tolist() == [1, 2, 0, 1]
    assert samples["staleness"].tolist()[:2] == [1, 1] and samples["staleness"].tolist()[3] == 2
    assert samples["index"].tolist() == [0, 1, 0, 1]
    assert [row.tolist() for row in samples["tokens"]] == [[1, 2, 3], [1, 2, 4, 5], [6, 7], [6, 7, 8]]
    assert samples.table["reward_parts"].to_pylist() == [[], [("exact", 1.0)], [], []]


def test_rows_are_selected_and_sorted(samples: Samples) -> None:
    assert samples.where(ticket=1, reward=0.5)["index"].tolist() == [1]
    assert len(samples.where(step=6)) == 0
    assert samples.sort("reward")["reward"].tolist() == [-1.0, 0.5, 0.5, 1.0]
    assert samples.sort("reward", descending=True).select(slice(2))["reward"].tolist() == [1.0, 0.5]
    assert samples.select([3, 0])["ticket"].tolist() == [1, 0]
    assert samples.select(samples["reward"] > 0.4)["ticket"].tolist() == [0, 0, 1]
    assert_same(samples.select(slice(2, None)).to_groups()[0].trajectories[1], samples.to_groups()[1].trajectories[1])


def test_parts_are_cut_and_joined(samples: Samples) -> None:
    assert [len(part) for part in samples.split(3)] == [2, 1, 1]
    parts = samples.split([1, 3])
    assert Samples.concat(parts).table.equals(samples.table)
    with pytest.raises(DataError, match="parts of 5 rows in all, there are 4"):
        samples.split([2, 3])
    bare = Samples(samples.table.drop_columns(list(ARRAYS)))
    both = Samples.concat([samples, bare])
    assert len(both) == 8
    for one in (bare, both):
        with pytest.raises(DataError, match="action_mask is missing"):
            one.to_groups()
    assert len(Samples.concat([])) == 0


def test_columns_are_added_and_replaced(samples: Samples) -> None:
    assert samples.with_column("chosen", [1, 2, 3, 4])["chosen"].tolist() == [1, 2, 3, 4]
    assert samples.with_column("reward", [1, 2, 3, 4]).table.schema.field("reward").type == pa.float64()
    with pytest.raises(DataError, match="1 values of chosen for 4 rows"):
        samples.with_column("chosen", [1])


def test_texts_are_those_before_and_after_the_first_action_token(samples: Samples) -> None:
    def spell(sequences: Sequence[Sequence[int]], *, special_tokens: bool) -> list[str]:
        return ["-".join(map(str, one)) + "." * special_tokens for one in sequences]

    decoded = samples.decode(spell)
    assert decoded.table["prompt"].to_pylist() == ["1-2", "1-2", "6-7", "6-7"]
    assert decoded.table["completion"].to_pylist() == ["3", "4-5", "", "8"]
    assert samples.decode(spell, special_tokens=True).table["completion"].to_pylist() == ["3.", "4-5.", ".", "8."]


def test_a_file_has_the_same_rows(samples: Samples, tmp_path: Path) -> None:
    file = tmp_path / "samples.parquet"
    samples.save(file)
    assert Samples.load(file).table.equals(samples.table)
    file.write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"samples\.parquet: not a file of samples"):
        Samples.load(file)


def test_a_table_of_something_else_is_refused(samples: Samples) -> None:
    with pytest.raises(DataError, match="the column ticket is missing, it has to be int64"):
        Samples(pa.table({"a": [1]}))
    with pytest.raises(DataError, match="the column reward is string, it has to be double"):
        Samples(samples.table.set_column(samples.columns.index("reward"), "reward", pa.array(["a"] * 4)))


def test_pandas_has_a_column_for_each(samples: Samples) -> None:
    frame = samples.to_pandas()
    assert list(frame.columns) == samples.columns
    assert frame["reward"].tolist() == [0.5, 1.0, -1.0, 0.5]
    assert frame["reward_parts"].tolist()[1] == {"exact": 1.0}
