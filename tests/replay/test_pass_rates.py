"""The history of the training rows: what is counted, and what it costs to keep and to store."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.replay.prompts.pass_rates import MAX_SOURCES, OTHER_SOURCES, Kind, PassRates, RowOutcome, RowRecord
from asyncrl.util.durable import of_plain, to_plain


def outcome(row: int, *rewards: float, source: str = "sums") -> RowOutcome:
    return RowOutcome(0, row, source, sum(rewards) / len(rewards), min(rewards), max(rewards))


def rates(num_rows: int, *outcomes: RowOutcome) -> PassRates:
    made = PassRates(num_rows)
    for one in outcomes:
        made.add(one)
    return made


def loaded(stored: PassRates) -> PassRates:
    again = PassRates(0)
    again.load(of_plain(RowRecord, to_plain(RowRecord, stored)))
    return again


def test_the_mean_reward_follows_a_policy_that_changes() -> None:
    first = rates(1, *[outcome(0, reward) for reward in (1.0, 0.0, 1.0)])
    assert first.rewards[0] == pytest.approx(2 / 3), "few groups weigh the same"
    changed = rates(1, *[outcome(0, 0.0)] * 100, *[outcome(0, 1.0)] * 7)
    assert changed.rewards[0] > 0.9
    assert changed.groups[0] == 107


def test_a_streak_ends_with_a_signal() -> None:
    made = rates(2, *[outcome(1, 0.0, 0.0)] * 3)
    assert made.streaks.tolist() == [0, 3]
    made.add(outcome(1, 0.0, 1.0))
    assert made.streaks.tolist() == [0, 0]
    assert rates(1, *[outcome(0, 1.0)] * 1000).streaks[0] == 255


@pytest.mark.parametrize(
    ("seen_before", "rewards", "kind"),
    [
        ((), (1.0, 1.0), Kind.SOLVED),
        ((), (0.0, 0.0), Kind.HOPELESS),
        ((), (0.0, 1.0), Kind.LEARNING),
        ((-1.0, 1.0), (-1.0, -1.0), Kind.HOPELESS),
        ((-1.0, 1.0), (1.0, 1.0), Kind.SOLVED),
        ((0.0, 100.0), (10.0, 10.0), Kind.HOPELESS),
        ((-5.0, -1.0), (-1.0, -1.0), Kind.SOLVED),
    ],
)
def test_solved_is_the_upper_half_of_the_rewards_of_the_source(
    seen_before: tuple[float, ...], rewards: tuple[float, ...], kind: Kind
) -> None:
    before = [outcome(0, *seen_before), outcome(0, -99.0, 99.0, source="another")] if seen_before else []
    assert rates(2, *before, outcome(1, *rewards)).kinds[1] == kind


def test_each_row_is_counted_once_however_often_it_was_seen() -> None:
    made = rates(10, *[outcome(0, 1.0)] * 9, outcome(1, 0.0), outcome(2, 0.0, 1.0, source="code"))
    assert made.counts(left_out=3) == {"learning": 1, "solved": 1, "hopeless": 1, "unseen": 4}
    assert made.counts_by_source() == {
        "code": {"learning": 1, "solved": 0, "hopeless": 0}, "sums": {"learning": 0, "solved": 1, "hopeless": 1},
    }  # fmt: skip
    made.add(outcome(0, 0.0, 0.0))
    assert made.counts()["hopeless"] == 2 and made.counts()["solved"] == 0


def test_many_data_sources_are_counted_together() -> None:
    made = rates(300, *[outcome(row, 1.0, source=f"source {row}") for row in range(300)] * 2)
    assert len(made.sources) == MAX_SOURCES + 1
    assert made.counts_by_source()[OTHER_SOURCES]["solved"] == 300 - MAX_SOURCES
    assert made.num_seen == 300


def test_a_record_has_everything() -> None:
    made = rates(99, outcome(7, 0.25, 0.5), *[outcome(98, 1.0)] * 300, outcome(98, 0.3, 0.3, source="code"))
    made.skips[13] = 5
    again = loaded(made)
    for name in ("rewards", "groups", "streaks", "skips", "kinds"):
        assert np.array_equal(getattr(again, name), getattr(made, name)), name
    assert to_plain(RowRecord, again) == to_plain(RowRecord, made)
    for one in (made, again):
        one.add(outcome(7, 1.0))
    assert to_plain(RowRecord, again) == to_plain(RowRecord, made)


def test_ten_million_rows_take_a_few_bytes_each() -> None:
    num_rows = 10_000_000
    made = PassRates(num_rows)
    assert (
        sum(getattr(made, name).nbytes for name in ("rewards", "groups", "streaks", "skips", "kinds")) <= 8 * num_rows
    )
    assert len(made.packed) < 100_000, "rows without history cost nothing"
    seen = np.random.default_rng(0).choice(num_rows, 100_000, replace=False)
    made.kinds[seen], made.groups[seen], made.rewards[seen] = Kind.LEARNING, 1, np.arange(100_000) % 9 / 8
    assert len(made.packed) < 600_000
    assert np.array_equal(loaded(made).rewards, made.rewards)
