"""Admission and ledger under random schedules of generators, failures and staleness."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import InvariantError
from asyncrl.replay.ledger import MAX_TAKEN, Ledger, State
from asyncrl.replay.queue import balance
from tests.helpers.examples import examples

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["lease", "finish", "refund", "give_back", "take", "commit", "load", "lose", "late"]),
        st.integers(0, 7),
    ),
    max_size=300,
)


class Simulation:
    """Generators that staleness behind the learner, groups that end in any order, and a ledger that must hold."""

    def __init__(self, ledger: Ledger, generators: int) -> None:
        self.ledger = ledger
        self.versions = [0] * generators
        self.taken: list[list[int]] = []
        """Batches that are taken and not trained, in their order."""
        self.trained: list[int] = []

    def apply(self, event: str, pick: int) -> None:
        getattr(self, event)(pick)
        self.ledger.check()
        states = [ticket.state for ticket in self.ledger.live.values()]
        assert all(self.ledger.count(state) == states.count(state) for state in State)

    def leased(self, pick: int) -> int | None:
        numbers = [t.number for t in self.ledger.live.values() if t.state is State.LEASED]
        return numbers[pick % len(numbers)] if numbers else None

    def lease(self, pick: int) -> None:
        version = self.versions[pick % len(self.versions)]
        if self.ledger.can_lease(version):
            self.ledger.lease(version)

    def finish(self, pick: int) -> None:
        number = self.leased(pick)
        if number is not None:
            self.ledger.finish(number, trajectories=4, tokens=10 + pick)

    def refund(self, pick: int) -> None:
        number = self.leased(pick)
        if number is not None:
            self.ledger.finish(number, trajectories=4, tokens=10 + pick)
            self.ledger.refund(number, "zero_variance")

    def give_back(self, pick: int) -> None:
        number = self.leased(pick)
        if number is not None:
            self.ledger.return_lease(number, tokens=pick)

    def lose(self, pick: int) -> None:
        self.ledger.count_lost(pick)

    def late(self, pick: int) -> None:
        """A group of an earlier attempt arrives, as old as any of its ticket may be."""
        waiting = [t for t in self.ledger.live.values() if t.state in (State.LEASED, State.RETURNED)]
        if waiting:
            ticket = waiting[pick % len(waiting)]
            version = max(0, ticket.start_version - pick % 3)
            if self.ledger.accepts(ticket.number, version):
                self.ledger.finish(ticket.number, trajectories=4, tokens=10 + pick, start_version=version)
                assert ticket.start_version == version

    def take(self, _: int) -> None:
        """A batch is taken, if it is complete: the next one while the one before it is trained."""
        assert self.ledger.next_step == self.ledger.steps + len(self.taken) + 1
        if len(self.taken) < MAX_TAKEN and (numbers := self.ledger.select()) is not None:
            assert len(numbers) == self.ledger.groups_per_step
            self.ledger.take(numbers)
            self.taken.append(numbers)

    def commit(self, _: int) -> None:
        if not self.taken:
            return
        numbers, version = self.taken.pop(0), self.ledger.steps
        starts = [self.ledger.live[number].start_version for number in numbers]
        assert all(0 <= version - start <= self.ledger.max_staleness for start in starts)
        assert self.ledger.num_waiting == self.ledger.count(State.FINISHED) + sum(map(len, self.taken))
        assert self.ledger.taken() == self.ledger.commit() == sorted(numbers)
        self.trained += numbers

    def load(self, pick: int) -> None:
        self.versions[pick % len(self.versions)] = self.ledger.steps

    def drain(self) -> None:
        """With fair generators every further step must come: nothing can be stuck."""
        goal = self.ledger.steps + self.ledger.max_staleness + 2
        for _ in range(200 * goal * self.ledger.groups_per_step):
            if self.ledger.steps >= goal:
                return
            for event in ("load", "lease", "finish", "take", "commit"):
                for pick in range(len(self.versions)):
                    self.apply(event, pick)
        raise AssertionError("no progress although every generator works")


@settings(max_examples=examples(300))
@given(
    events=EVENTS,
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 4),
    generators=st.integers(1, 3),
)
def test_any_schedule_keeps_bound_balance_and_progress(
    events: list[tuple[str, int]], groups_per_step: int, max_staleness: int, generators: int
) -> None:
    ledger = Ledger(groups_per_step=groups_per_step, max_staleness=max_staleness)
    simulation = Simulation(ledger, generators)
    for event, pick in events:
        simulation.apply(event, pick)
    simulation.drain()
    assert len(simulation.trained) == len(set(simulation.trained)), "a group was trained twice"
    ledger.check()


def finished(ledger: Ledger, *numbers: int) -> None:
    for number in numbers:
        ledger.finish(number, trajectories=1, tokens=1)


def test_the_next_batch_is_taken_as_if_the_one_before_it_were_trained() -> None:
    ledger = Ledger(groups_per_step=1, max_staleness=2)
    for _ in range(3):
        ledger.lease(0)
    finished(ledger, 1, 2)
    ledger.take([1])
    assert (ledger.next_step, ledger.select()) == (2, [2])
    ledger.take([2])
    assert (ledger.taken(), ledger.num_waiting, ledger.select()) == ([1], 1, None)
    finished(ledger, 0)
    with pytest.raises(InvariantError, match="batch of step 3 after 0 steps, 2 are taken"):
        ledger.take([0])
    assert (ledger.commit(), ledger.taken(), ledger.num_waiting) == ([1], [2], 1)
    assert ledger.select() == [0]
    ledger.take([0])
    assert (ledger.commit(), ledger.commit(), ledger.steps) == ([2], [0], 3)


def test_a_batch_taken_ahead_leaves_a_slow_group_the_step_of_its_deadline() -> None:
    ledger = Ledger(groups_per_step=1, max_staleness=2)
    for _ in range(3):
        ledger.lease(0)
    finished(ledger, 1)
    ledger.take([1])
    ledger.commit()
    ledger.lease(1)
    finished(ledger, 2, 3)
    ledger.take([2])
    assert ledger.select() is None, "ticket 0 must be trained at version 2, the next one"
    finished(ledger, 0)
    assert ledger.select() == [0]


def test_without_staleness_no_group_may_start_for_a_batch_ahead() -> None:
    ledger = Ledger(groups_per_step=1, max_staleness=0)
    finished(ledger, ledger.lease(0).number)
    ledger.take([0])
    assert not ledger.can_lease(0) and ledger.select() is None
    ledger.commit()
    assert ledger.can_lease(1)


def test_a_late_group_that_is_too_old_for_the_step_after_the_taken_ones_is_refused() -> None:
    ledger = Ledger(groups_per_step=1, max_staleness=1)
    ledger.lease(0)
    ledger.lease(0)
    finished(ledger, 1)
    ledger.take([1])
    ledger.commit()
    ledger.return_lease(0, tokens=0)
    ledger.lease(1)
    assert ledger.accepts(0, 0), "it may be trained at version 1"
    ledger.lease(1)
    finished(ledger, 2)
    ledger.take([2])
    assert not ledger.accepts(0, 0), "version 1 is trained by another batch"


def test_synchronous_limit_admits_exactly_one_batch() -> None:
    ledger = Ledger(groups_per_step=3, max_staleness=0)
    assert ledger.capacity(0) == 3
    for _ in range(3):
        ledger.lease(0)
    assert not ledger.can_lease(0)
    with pytest.raises(InvariantError, match="no group may start at version 0 with 3 charged"):
        ledger.lease(0)


def test_young_groups_pass_a_slow_one_until_its_deadline() -> None:
    ledger = Ledger(groups_per_step=1, max_staleness=2)
    for _ in range(3):
        ledger.lease(0)
    for number in (1, 2):
        ledger.finish(number, trajectories=1, tokens=1)
    for number in (1, 2):
        selected = ledger.select()
        assert selected == [number]
        ledger.take(selected)
        ledger.commit()
    ledger.lease(2)
    ledger.finish(3, trajectories=1, tokens=1)
    assert ledger.select() is None, "ticket 0 must be trained at version 2, nothing else may take its place"
    ledger.finish(0, trajectories=1, tokens=1)
    assert ledger.select() == [0]


def test_a_group_that_is_older_than_its_lease_has_an_earlier_deadline() -> None:
    ledger = Ledger(groups_per_step=1, max_staleness=2)
    for _ in range(2):
        ledger.lease(0)
    ledger.finish(1, trajectories=1, tokens=1)
    ledger.take([1])
    ledger.commit()
    ledger.return_lease(0, tokens=0)
    ledger.lease(1)
    ledger.finish(0, trajectories=1, tokens=1, start_version=0)
    assert ledger.deadline(ledger.live[0]) == 2
    ledger.lease(1)
    ledger.finish(2, trajectories=1, tokens=1)
    assert ledger.select() == [0]


def test_refund_gives_the_place_back() -> None:
    ledger = Ledger(groups_per_step=1, max_staleness=0)
    number = ledger.lease(0).number
    ledger.finish(number, trajectories=2, tokens=7)
    assert ledger.capacity(0) == 0
    ledger.refund(number, "zero_variance")
    assert ledger.capacity(0) == 1
    assert ledger.summary()["refunded"] == {"zero_variance": 1}
    assert ledger.summary()["tokens"] == {
        "generated": 7, "trained": 0, "refunded": {"zero_variance": 7}, "returned": 0, "in_flight": 0,
    }  # fmt: skip


def test_returned_ticket_keeps_its_number_and_counts_an_attempt() -> None:
    ledger = Ledger(groups_per_step=1, max_staleness=0)
    first = ledger.lease(0)
    ledger.return_lease(first.number, tokens=5)
    again = ledger.lease(0)
    assert (again.number, again.attempt) == (first.number, 1)
    assert not ledger.is_current(first.number, 0)
    assert ledger.is_current(first.number, 1)
    assert ledger.summary()["tokens"]["returned"] == 5  # type: ignore[index]


def test_wrong_transitions_are_refused() -> None:
    ledger = Ledger(groups_per_step=1, max_staleness=0)
    with pytest.raises(InvariantError, match="ticket 0 is not live, expected leased"):
        ledger.finish(0, trajectories=1, tokens=1)
    ledger.lease(0)
    with pytest.raises(InvariantError, match="ticket 0 is leased, expected finished"):
        ledger.take([0])
    with pytest.raises(InvariantError, match="commit of 0 groups, a step has 1"):
        ledger.commit()


def test_check_finds_a_group_that_was_lost() -> None:
    ledger = Ledger(groups_per_step=1, max_staleness=0)
    ledger.lease(0)
    del ledger.live[0]
    with pytest.raises(InvariantError, match="1 groups generated, 0 accounted for"):
        ledger.check()


@given(costs=st.lists(st.integers(1, 10_000), min_size=1, max_size=16), parts=st.integers(1, 4))
def test_balance_deals_every_item_once_and_evenly(costs: list[int], parts: int) -> None:
    costs = costs * parts
    bins = balance(costs, parts)
    assert sorted(index for part in bins for index in part) == list(range(len(costs)))
    assert {len(part) for part in bins} == {len(costs) // parts}
    sums = [sum(costs[i] for i in part) for part in bins]
    assert max(sums) - min(sums) <= max(costs), "no rank has more than one group's tokens above another"


def test_balance_deals_what_cannot_be_dealt_evenly() -> None:
    assert balance([1, 2, 3], 2) == [[2], [0, 1]]
    assert balance([7], 2) == [[0], []]
    assert balance([], 2) == [[], []]
