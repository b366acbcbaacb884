"""The ledger's stored state: live tickets, and the amounts that were generated, trained, refunded and returned."""

from __future__ import annotations

from enum import StrEnum

from msgspec import field

from asyncrl.errors import InvariantError
from asyncrl.util.durable import Durable

UNITS = ("trajectories", "tokens")
"""The parts of a group, each of which is counted like the groups themselves."""


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
