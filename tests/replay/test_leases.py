"""Leases in simulated time: of generators that are silent or lost, and their late attempts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.codec import pack_group
from asyncrl.replay.ledger import Ledger
from asyncrl.replay.queue import SUSPECT_S, ReplayQueue
from asyncrl.types import Lease
from asyncrl.wire.messages import ReleasedLease
from tests.helpers.replay import EndlessPrompts, ask_queue, make_group, small_config


class Simulated:
    """A queue and its generators on a clock that is set."""

    def __init__(self, folder: Path, **overrides: object) -> None:
        config = small_config(**overrides)
        self.now_s = 0.0
        self.queue = ReplayQueue(config, EndlessPrompts(), TraceWriter(folder / "trace.parquet"))
        self.queue.clock.now = lambda: self.now_s  # type: ignore[method-assign]

    def ask(self, num_groups: int = 0, *, generator: int = 0) -> list[Lease]:
        return ask_queue(self.queue, generator, self.queue.ledger.steps, num_groups)[0]

    def lose(self, num_groups: int) -> tuple[list[Lease], list[Lease]]:
        """Leases that generator 0 loses, and the ones of the next attempts."""
        lost = self.ask(num_groups)
        self.queue.lost(0)
        return lost, self.ask(num_groups)

    def finish(self, lease: Lease, version: int = 0, **options: Any) -> None:
        self.queue.finish(*pack_group(make_group(lease, version, **options)))

    def pass_time(self, seconds: float, *asking: int) -> None:
        """Time passes for the queue, in which these generators ask for nothing."""
        for _ in range(round(seconds)):
            self.now_s += 1.0
            for generator in asking:
                self.ask(generator=generator)
            self.queue.check_silence()

    @property
    def tokens(self) -> dict[str, Any]:
        return self.queue.summary()["ledger"]["tokens"]


def test_a_lease_of_a_generator_that_asks_lasts(tmp_path: Path) -> None:
    run = Simulated(tmp_path, launch__generators=2)
    (lease,) = run.ask(1)
    run.pass_time(10 * SUSPECT_S, 0, 1)
    assert run.queue.ledger.is_current(lease.ticket, 0)


def test_an_evaluation_lease_goes_on_when_its_generator_is_lost(tmp_path: Path) -> None:
    config = small_config(data__eval="eval.parquet", eval__samples=1)
    prompts = [EndlessPrompts().prompt(0)]
    queue = ReplayQueue(config, EndlessPrompts(), TraceWriter(tmp_path / "trace.parquet"), prompts)
    (lease,) = ask_queue(queue, 0, 0, 0, 1)[0]
    assert list(queue.evaluation.held()) == [(0, lease.ticket, 0)]
    queue.lost(0)
    (again,) = ask_queue(queue, 0, 0, 0, 1, session="another")[0]
    assert (again.ticket, again.attempt, again.evaluation) == (lease.ticket, 1, True)


def test_of_two_attempts_the_first_that_comes_is_trained_and_both_are_counted(tmp_path: Path) -> None:
    run = Simulated(tmp_path)
    leases, again = run.lose(2)
    assert [(lease.ticket, lease.attempt) for lease in again] == [(0, 1), (1, 1)]
    run.finish(leases[0])
    assert run.queue.state.leased_by[0] == 1
    run.finish(again[0], completion_tokens=(10, 20))
    run.finish(again[0], completion_tokens=(10, 20))
    run.finish(leases[0])
    assert (run.queue.ledger.live[0].tokens, run.queue.state.reported.duplicates) == (6, 2)
    run.finish(leases[1])
    assert run.queue.take(0, 1)[0] == "shard"
    assert [header.attempt for header, _ in run.queue.take(0, 1)[1]] == [0, 0]
    run.queue.commit(1, {})
    run.finish(again[1], completion_tokens=(100, 200))  # its ticket is trained
    run.finish(again[1], completion_tokens=(100, 200))
    assert run.tokens == {"generated": 12 + 330, "trained": 12, "refunded": {}, "returned": 330, "in_flight": 0}
    assert run.queue.state.reported.duplicates == 3
    assert run.queue.state.late == {}


def test_a_group_whose_lease_was_taken_back_and_not_handed_out_again_is_used(tmp_path: Path) -> None:
    run = Simulated(tmp_path)
    (lease,) = run.ask(1)
    run.queue.lost(0)
    assert run.queue.ledger.returned == [0]
    run.finish(lease)
    assert (run.queue.ledger.returned, run.queue.state.leased_by[0]) == ([], 0)
    assert [lease.ticket for lease in run.ask(4)] == [1, 2, 3]


@pytest.mark.parametrize("refunded", [True, False])
def test_what_a_superseded_attempt_gives_back_is_counted_once(tmp_path: Path, refunded: bool) -> None:
    run = Simulated(tmp_path)
    (lease,), (again,) = run.lose(1)
    run.finish(lease, rewards=(1.0, 1.0) if refunded else (0.0, 1.0))
    for _ in range(2):
        run.queue.release(0, [ReleasedLease(again.ticket, again.attempt, 7)])
    run.finish(again)
    assert (run.tokens["generated"], run.tokens["returned"]) == (13, 7)
    run.queue.ledger.check()


def test_a_late_attempt_that_is_too_old_by_now_is_not_trained(tmp_path: Path) -> None:
    run = Simulated(tmp_path, replay__groups_per_step=1, steps=10)
    late, other = run.ask(2)
    run.finish(other)
    assert run.queue.take(0, 1)[0] == "shard"
    run.queue.commit(1, {})
    run.queue.lost(0)
    again, third = run.ask(2)
    assert (again.ticket, again.attempt) == (late.ticket, 1)
    run.finish(third, 1)
    assert run.queue.take(0, 2)[0] == "shard"
    run.queue.commit(2, {})
    run.finish(late)  # version 0 at step 3 is older than the limit of 1 allows
    assert (run.tokens["returned"], run.queue.ledger.is_current(late.ticket, 1)) == (6, True)
    run.finish(again, 1)
    assert run.queue.take(0, 3)[0] == "shard"


def test_a_late_attempt_never_takes_the_place_that_another_group_needs() -> None:
    ledger = Ledger(groups_per_step=1, max_staleness=1)
    for _ in range(2):
        ledger.lease(0)
    ledger.finish(1, trajectories=1, tokens=1)
    ledger.take([1])
    ledger.commit()
    ledger.return_lease(0, tokens=0)
    assert ledger.lease(1).number == 0
    assert ledger.accepts(0, 0), "at version 1 it is as old as allowed"
    ledger.lease(1)
    ledger.finish(2, trajectories=1, tokens=1)
    ledger.take([2])
    assert not ledger.accepts(0, 0), "version 1 trains another group"
    assert ledger.accepts(0, 1)
    ledger.commit()
    assert not ledger.accepts(0, 0)


PAIR = {"launch__generators": 2, "replay__groups_per_step": 4}
"""Two generators that may have four leases each."""


def names(leases: Iterable[Lease]) -> list[tuple[int, int]]:
    return [(lease.ticket, lease.attempt) for lease in leases]


def test_the_leases_of_a_silent_generator_go_to_one_that_has_room(tmp_path: Path) -> None:
    """The oldest first, and no more of them than it gets."""
    run = Simulated(tmp_path, **PAIR)
    leases = run.ask(4)
    assert names(run.ask(2, generator=1)) == [(4, 0), (5, 0)]
    run.pass_time(SUSPECT_S, 1)
    run.queue.release(1, [ReleasedLease(4, 0, 0)])
    assert names(run.ask(1, generator=1)) == [(4, 1)], "nobody is suspected yet"
    run.queue.release(1, [ReleasedLease(4, 1, 0)])
    run.pass_time(1, 1)
    assert names(run.ask(2, generator=1)) == [(4, 2), (0, 1)], "what was returned comes before"
    assert [run.queue.ledger.is_current(lease.ticket, 0) for lease in leases] == [False, True, True, True]
    assert names(run.ask(9, generator=1)) == [(1, 1)], "it has its share"


def test_a_generator_that_comes_back_keeps_what_nobody_took_and_the_first_attempt_is_trained(tmp_path: Path) -> None:
    run = Simulated(tmp_path, **PAIR)
    leases = run.ask(4)
    run.pass_time(SUSPECT_S + 1, 1)
    again = run.ask(2, generator=1)
    assert names(again) == [(0, 1), (1, 1)]
    run.ask(generator=0)
    assert run.queue.state.leased_by == {0: 2, 1: 2}
    assert names(run.ask(2, generator=1)) == [(4, 0), (5, 0)], "it is heard again: its leases are its own"
    run.finish(leases[0], completion_tokens=(10, 20))
    for lease in (again[0], again[1], leases[1], leases[2], leases[3]):
        run.finish(lease)
    assert run.queue.take(0, 1)[0] == "shard"
    trained = {header.ticket: header.attempt for header, _ in run.queue.take(0, 1)[1]}
    assert trained == {0: 0, 1: 1, 2: 0, 3: 0}
    run.queue.commit(1, {})
    assert run.tokens == {"generated": 60, "trained": 48, "refunded": {}, "returned": 12, "in_flight": 0}


def test_a_generator_alone_loses_no_lease_while_it_is_silent(tmp_path: Path) -> None:
    run = Simulated(tmp_path)
    leases = run.ask(2)
    run.pass_time(2 * SUSPECT_S)
    assert names(run.ask(4)) == [(2, 0), (3, 0)]
    assert all(run.queue.ledger.is_current(lease.ticket, 0) for lease in leases)


def test_nobody_is_suspected_by_a_queue_that_stood_still(tmp_path: Path) -> None:
    """The messages of all generators wait to be read then."""
    run = Simulated(tmp_path, **PAIR)
    run.ask(4)
    run.pass_time(2, 0, 1)
    run.now_s += 2 * SUSPECT_S
    run.queue.check_silence()
    assert names(run.ask(1, generator=1)) == [(4, 0)]
    run.pass_time(SUSPECT_S, 1)
    assert names(run.ask(1, generator=1)) == [(5, 0)]
    run.pass_time(1, 1)
    assert names(run.ask(1, generator=1)) == [(0, 1)]


def test_a_generator_with_old_weights_gets_no_lease_that_it_cannot_use(tmp_path: Path) -> None:
    run = Simulated(tmp_path, launch__generators=2, replay__groups_per_step=1, replay__max_staleness=2, steps=9)
    (first,), (second,) = run.ask(1), run.ask(1, generator=1)
    run.finish(second)
    assert run.queue.take(0, 1)[0] == "shard"
    run.queue.commit(1, {})
    for lease in run.ask(2, generator=1):
        run.finish(lease, 1)
    run.pass_time(SUSPECT_S + 1, 1)
    assert run.queue.ledger.charged == 4
    assert ask_queue(run.queue, 1, 0, 1)[0] == [], "version 0 may start three groups"
    assert run.queue.ledger.is_current(first.ticket, 0)
