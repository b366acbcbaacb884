"""The results of the training rows: what is counted, and what it costs to keep and to store."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.replay.codec import pack_group
from asyncrl.replay.results import MAX_SOURCES, OTHER_SOURCES, Kind, RowRecord, RowResults
from asyncrl.types import Lease, Prompt
from asyncrl.util.durable import of_bytes, to_bytes
from asyncrl.wire.messages import GroupHeader
from tests.helpers.replay import make_group


def outcome(row: int, *rewards: float, source: str = "sums") -> GroupHeader:
    lease = Lease(0, 0, Prompt(row, np.arange(3, dtype=np.int32), "", source))
    return pack_group(make_group(lease, 0, rewards=rewards, completion_tokens=[1] * len(rewards)))[0]


def results(num_rows: int, *outcomes: GroupHeader) -> RowResults:
    made = RowResults(num_rows)
    for header in outcomes:
        made.add(header)
    return made


def loaded(stored: RowResults) -> RowResults:
    again = RowResults(0)
    again.load(of_bytes(RowRecord, to_bytes(RowRecord, stored)))
    return again


@pytest.mark.parametrize(
    ("seen_before", "rewards", "kind"),
    [
        ((), (1.0, 1.0), Kind.SOLVED),
        ((), (0.0, 0.0), Kind.NEVER_SOLVED),
        ((), (0.0, 1.0), Kind.LEARNING),
        ((-1.0, 1.0), (-1.0, -1.0), Kind.NEVER_SOLVED),
        ((-1.0, 1.0), (1.0, 1.0), Kind.SOLVED),
        ((0.0, 100.0), (10.0, 10.0), Kind.NEVER_SOLVED),
        ((-5.0, -1.0), (-1.0, -1.0), Kind.SOLVED),
    ],
)
def test_solved_is_the_upper_half_of_the_rewards_of_the_source(
    seen_before: tuple[float, ...], rewards: tuple[float, ...], kind: Kind
) -> None:
    before = [outcome(0, *seen_before), outcome(0, -99.0, 99.0, source="another")] if seen_before else []
    assert results(2, *before, outcome(1, *rewards)).kinds[1] == kind


def test_each_row_is_counted_once_however_often_it_was_seen() -> None:
    made = results(10, *[outcome(0, 1.0)] * 9, outcome(1, 0.0), outcome(2, 0.0, 1.0, source="code"))
    assert made.counts(left_out=3) == {"learning": 1, "solved": 1, "never_solved": 1, "unseen": 4}
    assert made.summary(left_out=3)["by_source"] == {
        "code": {"learning": 1, "solved": 0, "never_solved": 0},
        "sums": {"learning": 0, "solved": 1, "never_solved": 1},
    }  # fmt: skip
    made.add(outcome(0, 0.0, 0.0))
    assert made.counts()["never_solved"] == 2 and made.counts()["solved"] == 0


def test_many_data_sources_are_counted_together() -> None:
    made = results(300, *[outcome(row, 1.0, source=f"source {row}") for row in range(300)] * 2)
    assert len(made.sources) == MAX_SOURCES + 1
    assert made.sources[OTHER_SOURCES].kinds[Kind.SOLVED] == 300 - MAX_SOURCES
    assert made.counts()["unseen"] == 0


def test_a_record_has_everything() -> None:
    made = results(99, outcome(7, 0.25, 0.5), outcome(98, 1.0), outcome(98, 0.3, 0.3, source="code"))
    again = loaded(made)
    assert np.array_equal(again.kinds, made.kinds)
    for one in (made, again):
        one.add(outcome(7, 1.0))
    assert to_bytes(RowRecord, again) == to_bytes(RowRecord, made)


def test_ten_million_rows_take_a_byte_each() -> None:
    made = RowResults(10_000_000)
    assert len(made.packed) < 100_000, "rows without results cost nothing"
    seen = np.random.default_rng(0).choice(10_000_000, 100_000, replace=False)
    made.kinds[seen] = Kind.LEARNING
    assert len(made.packed) < 600_000
    assert np.array_equal(loaded(made).kinds, made.kinds)
