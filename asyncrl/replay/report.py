"""The metrics of a run as live views and its summary show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncrl.observe.collapse import COLLAPSE
from asyncrl.observe.run_metrics import (
    RATE_WINDOW_S,
    RunMetrics,
    group_phases_s,
    peaks_bytes,
    rates,
    staleness_parts,
    times,
)
from asyncrl.observe.stats import bias_alarms, count_rewards
from asyncrl.replay.evaluation import eval_metrics
from asyncrl.replay.ledger import Ledger, State
from asyncrl.types import goodput_of, mean_staleness
from asyncrl.util.processes import fractions

if TYPE_CHECKING:
    from asyncrl.replay.state import QueueState


def run_status(run: RunMetrics, ledger: Ledger, now_s: float) -> dict[str, Any]:
    """The state of the run for live views and the launcher."""
    tokens = sum(tokens for ended_s, tokens in run.recent if now_s - ended_s < RATE_WINDOW_S)
    span_s = min(RATE_WINDOW_S, now_s - (now_s if run.first_lease_s is None else run.first_lease_s)) or 1.0
    up = [
        (index, g, now_s - g.last_heartbeat_s)
        for index, g in sorted(run.generators.items())
        if g.last_heartbeat_s is not None
    ]
    known = sorted(run.reported.learners.items())
    learners = {rank: now_s - heard_s for rank, heard_s in known if heard_s is not None}
    return {
        "step": ledger.steps,
        "reward": run.reward,
        "rewards": count_rewards(run.outcomes.values()),
        "staleness_mean": run.last_metrics.get("staleness/mean", 0.0),
        "staleness_max": len(run.histogram) - 1 if run.histogram else 0,
        "tokens_per_s": tokens / span_s,
        "generator_idle": run.generator_idle,
        "generator_environments": run.generator_environments,
        "learner_idle": run.learner_idle,
        "generators": {
            str(index): {
                "version": g.version,
                "tokens": g.stats.tokens,
                "idle": g.idle,
                "environments": fractions(g.seconds)["environments"],
                "live_episodes": g.stats.live_episodes,
                "waiting_episodes": g.stats.waiting_episodes,
                "heard_ago_s": silent_s,
                "session": g.session,
            }
            for index, g, silent_s in up
        },
        "learners": {str(rank): silent_s for rank, silent_s in learners.items()},
        "heard": [f"generator-{index}" for index, _, _ in up] + [f"learner-{rank}" for rank in learners],
        "leased": ledger.count(State.LEASED),
        "finished": ledger.num_waiting,
        "trained": ledger.trained.groups,
        "refunded": {reason: amount.groups for reason, amount in ledger.refunded.items()},
        "collapse": run.collapse.summary(run.config),
        "metrics": run.last_metrics,
    }


def run_summary(run: RunMetrics, ledger: Ledger, *, stop_reason: str) -> dict[str, Any]:
    """The queue's part of the run's summary."""
    collapse = run.collapse.summary(run.config)
    return {
        "steps": ledger.steps,
        "policy_version": ledger.steps,
        "tokens_generated": ledger.generated.tokens,
        "greedy_tokens": run.greedy_tokens,
        "tokens_trained": ledger.trained.tokens,
        "tokens_per_s": ledger.trained.tokens / run.training_s if run.training_s else 0.0,
        "skipped_updates": run.skipped_updates,
        "staleness": {
            "limit": run.config.replay.max_staleness,
            "max": len(run.histogram) - 1 if run.histogram else 0,
            "mean": mean_staleness(run.histogram),
            **staleness_parts(run.breakdown),
            "histogram": run.histogram,
        },
        "idle": {
            "generator": run.generator_idle,
            "environments": run.generator_environments,
            "learner": run.learner_idle,
        },
        **({"goodput": goodput} if (goodput := goodput_of(run.last_metrics)) else {}),
        "rates": rates(
            run.generators.values(),
            tokens=ledger.trained.tokens,
            samples=ledger.trained.trajectories,
            elapsed_s=run.training_s,
            learners=run.config.launch.learners,
        ),
        "peak_memory_bytes": peaks_bytes(run.reported) | run.learner_peaks_bytes,
        "time": times(run.generators.values(), run.learner_s),
        "phases_s": group_phases_s(run.breakdown),
        "weight_sync": {
            "count": run.syncs + run.syncs_before,
            "stall_ms_mean": run.stall_ms_mean,
            "stall_ms_max": max((g.stall_ms_max for g in run.generators.values()), default=0.0),
        },
        "recomputed_tokens": run.recomputed_tokens,
        "rewards_failed": sum(g.stats.rewards_failed for g in run.generators.values()),
        "ledger": ledger.summary(),
        "outcomes": {name: outcome.summary() for name, outcome in sorted(run.outcomes.items())},
        "bias": bias_alarms(run.outcomes),
        **({"collapse": collapse | {"stopped": stop_reason == COLLAPSE}} if collapse else {}),
    }


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
    trained = {"tokens": ledger.trained.tokens, "samples": ledger.trained.trajectories}
    measured = state.measure.step_metrics(step, groups, at_s, **trained, generators=state.generators_wanted)
    return queue | measured | eval_metrics(state.evaluation.unreported(0) or {})
