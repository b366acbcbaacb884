"""The places where tokens aged, and the time that groups spent in each state."""

from __future__ import annotations

import pytest
from msgspec import structs

from asyncrl.observe.stats import StalenessBreakdown
from asyncrl.replay.codec import pack_group
from asyncrl.types import Lease
from asyncrl.util.durable import of_bytes, to_bytes
from asyncrl.wire.messages import GroupHeader
from tests.helpers.replay import EndlessPrompts, make_group


def header(end_version: int, started_s: float, finished_s: float) -> GroupHeader:
    times = {"started_s": started_s, "finished_s": finished_s}
    packed, _ = pack_group(make_group(Lease(0, 0, EndlessPrompts().prompt(0)), 0))
    return structs.replace(packed, end_version=end_version, **times)


def test_staleness_is_split_at_the_newest_token() -> None:
    ages = StalenessBreakdown()
    ages.add(header(5, 1.0, 3.0), {3: 10, 5: 30}, taken_s=3.5, trained_s=4.5, train_version=6)
    assert ages.staleness == {"in_flight": 20 / 40, "in_queue": 1.0}
    assert ages.phases_s == {"generate": 2.0, "queue": 0.5, "train": 1.0}
    other = StalenessBreakdown()
    other.add(header(6, 0.0, 1.0), {6: 40}, taken_s=1.0, trained_s=2.0, train_version=6)
    ages.join(other)
    assert ages.staleness == {"in_flight": 20 / 80, "in_queue": 40 / 80}
    assert ages.phases_s == pytest.approx({"generate": 1.5, "queue": 0.25, "train": 1.0})
    assert of_bytes(StalenessBreakdown, to_bytes(StalenessBreakdown, ages)) == ages


def test_no_groups_have_no_age() -> None:
    assert set(StalenessBreakdown().staleness.values()) == set(StalenessBreakdown().phases_s.values()) == {0.0}
