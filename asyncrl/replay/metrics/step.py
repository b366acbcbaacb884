"""The queue's own metrics of a step, from all parts of its state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.replay.evaluation import eval_metrics
from asyncrl.replay.ledger import State

if TYPE_CHECKING:
    from asyncrl.replay.state import QueueState


def step_metrics(state: QueueState, step: int, at_s: float) -> dict[str, float]:
    """The metrics of the step in progress when it is committed at `at_s`, including the oldest unreported evaluation
    result. Changes nothing."""
    ledger, groups = state.ledger, [state.held[number] for number in state.ledger.taken()]
    queue = {
        "replay/finished_groups": float(ledger.num_waiting),
        "replay/leased_groups": float(ledger.count(State.LEASED)),
        "replay/held_bytes": float(state.held_bytes - sum(held.num_bytes for held in groups)),
        "replay/staleness_limit": float(ledger.admission_limit),
        "replay/refunded_groups": float(sum(amount.groups for amount in ledger.refunded.values())),
    }
    queue |= state.results.metrics(left_out=state.left_out)
    wanted = state.generators_wanted
    measured = state.measure.step_metrics(step, groups, ledger.trained, at_s, generators=wanted)
    return queue | measured | eval_metrics(state.evaluation.unreported(0) or {})
