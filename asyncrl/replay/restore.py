"""From a snapshot back to the state of the queue."""

from __future__ import annotations

from collections import Counter

from asyncrl.replay.journal.retention import Coverage
from asyncrl.replay.ledger_counts import State
from asyncrl.replay.snapshot import QueueSnapshot, check_rules
from asyncrl.replay.state import QueueState
from asyncrl.replay.tickets import Load, TicketEntry
from asyncrl.util.durable import restore
from asyncrl.wire.messages import ReleasedEvaluation

PARTS = frozenset({"rules", "position", "ledger", "measure", "selection", "evaluation", "staleness_controller", "held"})
"""Fields of a snapshot that are restored by other means than setting an attribute."""


def restore_queue(state: QueueState, stored: QueueSnapshot, *, load: Load | None, now_s: float) -> None:
    """Restores a snapshot, with leases renewed at `now_s` and the frames of finished groups read by `load`.

    Without `load` every ticket is returned, to be leased again. Raises ConfigError if the run's settings do not fit
    the state.
    """
    check_rules(stored.rules, state.rules)
    state.prompts.seek(stored.position)
    state.ledger.load(stored.ledger)
    restore(state.measure, stored.measure)
    state.measure.recent.clear()
    state.selection.load(stored.selection)
    restore(state.evaluation, stored.evaluation)
    state.evaluation.wake(now_s)
    if state.staleness_controller is not None and stored.staleness_controller is not None:
        restore(state.staleness_controller, stored.staleness_controller)
    for name in stored.__struct_fields__:
        if name not in PARTS:
            setattr(state, name, getattr(stored, name))
    state.held = {
        number: TicketEntry.of_held(held, state.prompts.prompt(held.row), load, now_s)
        for number, held in stored.held.items()
    }
    if load is None:
        _return_all(state)
    state.held_bytes = sum(held.num_bytes for held in state.held.values())
    leased = (t.number for t in state.ledger.live.values() if t.state is State.LEASED)
    state.leased_by = Counter(state.held[number].generator for number in leased)


def _return_all(state: QueueState) -> None:
    """Returns every ticket; the data of finished groups is lost."""
    for ticket in state.ledger.live.values():
        if ticket.state is State.LEASED:
            state.ledger.return_lease(ticket.number, tokens=0)
        elif ticket.state is not State.RETURNED:
            state.ledger.revoke(ticket.number)
    state.taken, state.coverage = [], Coverage()
    state.evaluation.release([ReleasedEvaluation(t, attempt) for _, t, attempt in list(state.evaluation.held())])
