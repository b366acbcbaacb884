"""Admission and the ledger: the pure arithmetic of the replay queue, without sockets, clocks or arrays.

A ticket is one group. Its life (drawn in `queue.py`): leased -> finished -> taken -> trained; or it is refunded (zero
variance, failed) and its place goes to another prompt; or it is returned (its generator stopped) and leased again.
The first attempt that arrives finishes the ticket, even if its lease has passed to another generator.

With P groups per step, staleness limit S and k groups charged so far, a generator that has loaded version v may
start another group if and only if k < (v + S + 1) * P. A group started at version v has the deadline v + S, the
last learner version that may train on it. The rule keeps, for every version t not yet trained,

    number of charged, untrained groups with deadline <= t   <=   (t - trained steps + 1) * P,

so taking groups by earliest deadline always meets every deadline, regardless of the order in which they finish.

A batch may be taken while the one before it is trained. It is then treated as if that one were trained already: its
groups must be allowed at the version that comes next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from heapq import nsmallest
from typing import Self

from msgspec import field

from asyncrl.config.config import Config
from asyncrl.errors import InvariantError
from asyncrl.util.durable import Durable

MAX_TAKEN = 2
"""Batches that are taken and not trained at most: the batch of the step in progress and the next one."""
UNITS = ("trajectories", "tokens")
"""The parts of a group, each of which is counted like the groups themselves."""
_RUNNING_PER_WAITING = 8


class State(StrEnum):
    """States of a live ticket."""

    LEASED = "leased"
    RETURNED = "returned"
    FINISHED = "finished"
    TAKEN = "taken"


class Ticket(Durable):
    """A group that is charged and not yet trained."""

    number: int
    state: State
    attempt: int
    start_version: int
    step: int = 0
    """The step whose batch it is in, once it is taken."""
    trajectories: int = 0
    tokens: int = 0


class Amount(Durable):
    """A number of groups, trajectories and action tokens."""

    groups: int = 0
    trajectories: int = 0
    tokens: int = 0

    def add(self, *, groups: int = 1, trajectories: int, tokens: int) -> None:
        """Adds to each of the three."""
        self.groups += groups
        self.trajectories += trajectories
        self.tokens += tokens


class LedgerCounts(Durable):
    """Counts that assign every group, trajectory and token to one category."""

    issued: int = 0
    """Tickets issued so far; the next one's number."""
    steps: int = 0
    """Optimizer steps committed: the learner's version."""
    admission_limit: int = -1
    """The staleness limit of admission, at most `max_staleness`; negative: `max_staleness`. It may change at any time:
    a lower limit admits fewer groups than the bound allows."""
    live: dict[int, Ticket] = field(default_factory=dict[int, Ticket])
    trained: Amount = field(default_factory=Amount)
    refunded: dict[str, Amount] = field(default_factory=dict[str, Amount])
    generated: Amount = field(default_factory=Amount)
    """Finished groups, and the tokens of abandoned attempts."""
    returned: list[int] = field(default_factory=list[int])
    """Tickets that wait to be leased again."""
    returned_tokens: int = 0
    """Tokens of attempts that were abandoned, or that arrived after their ticket was finished."""
    returned_trajectories: int = 0
    """Trajectories of finished groups whose data was lost (`revoke`)."""

    def in_flight(self) -> Amount:
        """All live tickets, with the trajectories and tokens of the finished and taken ones."""
        amount = Amount(groups=len(self.live))
        for ticket in self.live.values():
            amount.add(groups=0, trajectories=ticket.trajectories, tokens=ticket.tokens)
        return amount

    def check(self) -> None:
        """Raises InvariantError unless generated = trained + refunded + returned + in flight."""
        counted = self.trained, self.in_flight(), *self.refunded.values()
        for unit, generated in {
            "groups": self.issued,
            **{unit: getattr(self.generated, unit) for unit in UNITS},
        }.items():
            accounted = sum(getattr(amount, unit) for amount in counted) + getattr(self, f"returned_{unit}", 0)
            if generated != accounted:
                raise InvariantError(f"ledger: {generated} {unit} generated, {accounted} accounted for")

    def summary(self) -> dict[str, object]:
        """The ledger for the run's summary. Raises InvariantError if it does not balance."""
        self.check()
        flight, refunds = self.in_flight(), sorted(self.refunded.items())
        return {
            "leased": self.issued,
            "trained": self.trained.groups,
            "refunded": {reason: amount.groups for reason, amount in refunds},
            "in_flight": flight.groups,
            **{
                unit: {
                    "generated": getattr(self.generated, unit),
                    "trained": getattr(self.trained, unit),
                    "refunded": {reason: getattr(amount, unit) for reason, amount in refunds},
                    "returned": getattr(self, f"returned_{unit}"),
                    "in_flight": getattr(flight, unit),
                }
                for unit in UNITS
            },
        }


class Ledger(LedgerCounts, kw_only=True):
    """Counts every group, trajectory and token in exactly one category: trained, refunded, returned or in flight.

    Raises InvariantError for a transition that does not exist in the life of a ticket.
    """

    groups_per_step: int
    max_staleness: int
    _versions: dict[State, Counter[int]] = field(default_factory=lambda: {state: Counter[int]() for state in State})
    """Number of live tickets in each state, by start version."""

    def __post_init__(self) -> None:
        self.admission_limit = self.max_staleness if self.admission_limit < 0 else self.admission_limit

    def recount(self) -> None:
        """Counts the live tickets by version; needed after the counts were replaced."""
        self._versions = {state: Counter() for state in State}
        for ticket in self.live.values():
            self._enter(ticket)

    @property
    def charged(self) -> int:
        """Groups that count against admission: trained and live ones (k above)."""
        return self.trained.groups + len(self.live)

    @property
    def next_step(self) -> int:
        """The step whose batch is taken next."""
        return self.steps + self.count(State.TAKEN) // self.groups_per_step + 1

    @property
    def num_waiting(self) -> int:
        """The number of finished groups that are not part of the step in progress."""
        return self.count(State.FINISHED) + max(0, self.count(State.TAKEN) - self.groups_per_step)

    def deadline(self, ticket: Ticket) -> int:
        """The last learner version that may train on the ticket."""
        return ticket.start_version + self.max_staleness

    def capacity(self, version: int) -> int:
        """The number of groups that a generator with `version` loaded may start now."""
        return max(0, (version + self.admission_limit + 1) * self.groups_per_step - self.charged)

    def per_generator_limit(self, generators: int) -> int:
        """Maximum number of leases of one of `generators` generators: an equal share of the admitted groups."""
        return -(-(self.admission_limit + 1) * self.groups_per_step // generators)

    def lease(self, version: int) -> Ticket:
        """Charges a new ticket, or leases a returned one again. Call it only while `can_lease(version)`."""
        if not self.can_lease(version):
            raise InvariantError(f"ledger: no group may start at version {version} with {self.charged} charged")
        if self.returned:
            again = self.live[self.returned.pop(0)]
            self._leave(again)
            again.state, again.start_version, again.attempt = State.LEASED, version, again.attempt + 1
            self._enter(again)
            return again
        ticket = Ticket(number=self.issued, state=State.LEASED, attempt=0, start_version=version)
        self.live[ticket.number] = ticket
        self._enter(ticket)
        self.issued += 1
        return ticket

    def can_lease(self, version: int) -> bool:
        """True if a generator with `version` loaded may start a group."""
        return self.num_leasable(version) > 0

    def num_leasable(self, version: int) -> int:
        """The number of leases that generators with `version` loaded may get now: those of returned tickets, which are
        already charged, and then those of new ones."""
        if self.returned and self.charged > (version + self.max_staleness + 1) * self.groups_per_step:
            return 0
        return len(self.returned) + self.capacity(version)

    def next_leases(self, count: int) -> list[tuple[int, int]]:
        """The ticket and attempt of each of the next `count` leases."""
        again = [(number, self.live[number].attempt + 1) for number in self.returned[:count]]
        return again + [(number, 0) for number in range(self.issued, self.issued + count - len(again))]

    def is_current(self, number: int, attempt: int) -> bool:
        """True if this attempt holds the lease of the ticket."""
        ticket = self.live.get(number)
        return ticket is not None and ticket.state is State.LEASED and ticket.attempt == attempt

    def accepts(self, number: int, start_version: int) -> bool:
        """True if the ticket is unfinished, and a group for it that started at `start_version` can be trained in time
        without making another group miss its deadline."""
        ticket = self.live.get(number)
        if ticket is None or ticket.state not in (State.LEASED, State.RETURNED) or start_version < 0:
            return False
        if start_version >= ticket.start_version:
            return True
        # The schedule as it would be if the ticket had started at `start_version`.
        starts = Counter({min(start_version, ticket.start_version): 1, ticket.start_version: -1})
        for versions in self._untaken():
            starts.update(versions)
        due = 0
        for version in sorted(starts):
            due += starts[version]
            if due > max(0, version + self.max_staleness - self.next_step + 2) * self.groups_per_step:
                return False
        return True

    def finish(self, number: int, *, trajectories: int, tokens: int, start_version: int | None = None) -> None:
        """Moves an unfinished ticket to FINISHED. `start_version` is the group's, which may be older than the
        current lease if the ledger `accepts` it."""
        ticket = self.live.get(number)
        if ticket is None or ticket.state is not State.RETURNED:
            ticket = self._expect(number, State.LEASED)
        else:
            self.returned.remove(number)
        self._leave(ticket)
        ticket.state = State.FINISHED
        if start_version is not None:
            ticket.start_version = min(ticket.start_version, start_version)
        self._enter(ticket)
        ticket.trajectories, ticket.tokens = trajectories, tokens
        self.generated.add(trajectories=trajectories, tokens=tokens)

    def refund(self, number: int, reason: str) -> None:
        """Ends a finished group untrained; its place goes to another prompt."""
        ticket = self._expect(number, State.FINISHED)
        del self.live[number]
        self._leave(ticket)
        self.refunded.setdefault(reason, Amount()).add(trajectories=ticket.trajectories, tokens=ticket.tokens)

    def return_lease(self, number: int, *, tokens: int) -> None:
        """Ends an unfinished attempt; the ticket will be leased again."""
        self._move(self._expect(number, State.LEASED), State.RETURNED)
        self.returned.append(number)
        self.count_lost(tokens)

    def revoke(self, number: int) -> None:
        """Returns the ticket of a finished or taken group whose data is lost; it will be leased again."""
        ticket = self.live[number]
        if ticket.state not in (State.FINISHED, State.TAKEN):
            raise InvariantError(f"ledger: ticket {number} is {ticket.state.value}, expected finished or taken")
        self.returned_tokens += ticket.tokens
        self.returned_trajectories += ticket.trajectories
        self._move(ticket, State.RETURNED)
        ticket.trajectories = ticket.tokens = ticket.step = 0
        self.returned.append(number)

    def count_lost(self, tokens: int) -> None:
        """Counts the tokens of an attempt whose group is not used."""
        self.generated.tokens += tokens
        self.returned_tokens += tokens

    def select(self) -> list[int] | None:
        """The tickets of the batch of `next_step`, or None while it is not complete."""
        if self.count(State.FINISHED) < self.groups_per_step or not self._others_can_follow():
            return None
        finished = [ticket for ticket in self.live.values() if ticket.state is State.FINISHED]
        batch = nsmallest(self.groups_per_step, finished, key=lambda ticket: (self.deadline(ticket), ticket.number))
        return [ticket.number for ticket in batch]

    def take(self, numbers: Sequence[int]) -> None:
        """Moves finished tickets to TAKEN, for `next_step`. Raises InvariantError if one is past its deadline then, or
        if MAX_TAKEN batches are taken already."""
        step = self.next_step
        if step > self.steps + MAX_TAKEN:
            raise InvariantError(f"ledger: batch of step {step} after {self.steps} steps, {MAX_TAKEN} are taken")
        for number in numbers:
            ticket = self._expect(number, State.FINISHED)
            if self.deadline(ticket) < step - 1:
                raise InvariantError(
                    f"ledger: ticket {number} started at version {ticket.start_version} cannot be trained at "
                    f"version {step - 1} with max_staleness {self.max_staleness}"
                )
            self._move(ticket, State.TAKEN)
            ticket.step = step

    def taken(self) -> list[int]:
        """The tickets of the step in progress."""
        step = self.steps + 1
        return [t.number for t in self.live.values() if t.state is State.TAKEN and t.step == step]

    def commit(self) -> list[int]:
        """Ends the tickets of the step in progress as trained and counts the step. Returns their numbers."""
        numbers = self.taken()
        if len(numbers) != self.groups_per_step:
            raise InvariantError(f"ledger: commit of {len(numbers)} groups, a step has {self.groups_per_step}")
        for number in numbers:
            ticket = self.live.pop(number)
            self._leave(ticket)
            self.trained.add(trajectories=ticket.trajectories, tokens=ticket.tokens)
        self.steps += 1
        return numbers

    def count(self, state: State) -> int:
        """The number of tickets in this state."""
        return self._versions[state].total()

    def _others_can_follow(self) -> bool:
        """True if all other untaken tickets can still meet their deadlines after a step that trains the finished
        tickets with the earliest ones."""
        # Earliest-deadline-first feasibility. A leased ticket may be due before the finished ones of this batch; then
        # training the batch now could use up the last step in which the leased one is allowed. So `next_step` is
        # counted as done, and for each deadline version + S in ascending order the tickets due until it must fit into
        # the steps that are left until then: version + S - next_step + 1 of them.
        finished, free, due = self._versions[State.FINISHED], self.groups_per_step, 0
        for version in sorted({version for versions in self._untaken() for version in versions}):
            trained = min(free, finished[version])
            free -= trained
            due += sum(versions[version] for versions in self._untaken()) - trained
            if due > (version + self.max_staleness - self.next_step + 1) * self.groups_per_step:
                return False
        return True

    def _untaken(self) -> list[Counter[int]]:
        """The numbers of tickets by start version, in each state before TAKEN."""
        return [versions for state, versions in self._versions.items() if state is not State.TAKEN]

    def _move(self, ticket: Ticket, state: State) -> None:
        self._leave(ticket)
        ticket.state = state
        self._enter(ticket)

    def _enter(self, ticket: Ticket) -> None:
        self._versions[ticket.state][ticket.start_version] += 1

    def _leave(self, ticket: Ticket) -> None:
        versions = self._versions[ticket.state]
        versions[ticket.start_version] -= 1
        if not versions[ticket.start_version]:
            del versions[ticket.start_version]

    def _expect(self, number: int, state: State) -> Ticket:
        ticket = self.live.get(number)
        if ticket is None or ticket.state is not state:
            found = "not live" if ticket is None else ticket.state.value
            raise InvariantError(f"ledger: ticket {number} is {found}, expected {state.value}")
        return ticket


def wanted_groups(max_running_groups: int) -> int:
    """Returns the number of groups that a generator keeps in its engine, of which at most `max_running_groups` run at
    once. The others wait there, so that a free slot is filled in the next engine step, without a round trip to the
    replay queue."""
    return max_running_groups + -(-max_running_groups // _RUNNING_PER_WAITING)


FRACTION = "learner/lr_fraction"
"""The metric that the limit follows: the fraction of the scheduled learning rate that the bound has left."""
LOWER, RAISE = 0.5, 0.95
"""The limit falls by one while the mean fraction is below LOWER, and rises by one while it is above RAISE."""


class ControllerState(Durable):
    """The controller's state between two steps."""

    fractions: list[float] = field(default_factory=list[float])
    """Fractions of the steps since the last change, except those that train groups admitted before it."""
    waited_steps: int = 0
    """Steps since the last change."""


class StalenessController(ControllerState, kw_only=True):
    """Lowers the limit that groups are admitted by while `algorithm.max_divergence` holds the learning rate down. In a
    bound on the divergence, a step may move the policy by 1 / staleness of it: a lower limit leaves more to each.

    After a change it waits until the groups admitted before are trained, and then as long again. It depends on the
    metrics of the steps only."""

    low: int
    high: int

    @classmethod
    def of(cls, config: Config) -> Self | None:
        """The controller that the config asks for; None for a fixed limit."""
        low, high = max(1, config.replay.min_staleness), config.replay.max_staleness
        if config.algorithm.max_divergence is None or low >= high:
            return None
        return cls(low=low, high=high)

    def next(self, limit: int, metrics: Mapping[str, float]) -> int:
        """Returns the limit after a step with these metrics."""
        self.waited_steps += 1
        if (fraction := metrics.get(FRACTION)) is not None and self.waited_steps > limit + 1:
            self.fractions.append(fraction)
        if len(self.fractions) <= limit:
            return limit
        mean = sum(self.fractions) / len(self.fractions)
        wanted = limit
        if mean < LOWER:
            wanted = max(limit - 1, self.low)
        elif mean > RAISE and metrics.get("staleness/max", 0.0) >= limit:
            wanted = min(limit + 1, self.high)
        self.fractions = self.fractions[1:] if wanted == limit else []
        self.waited_steps = self.waited_steps if wanted == limit else 0
        return wanted
