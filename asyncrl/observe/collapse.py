"""Detects that a training collapses: from the metrics of its steps alone, so that a replay from the journal repeats it.

    divergence    the policy has left the one that sampled its tokens        > DIVERGENCE nats a token and update
    ess           few tokens carry all the weight                            < ESS of the tokens by update
    entropy       the policy becomes random, or repeats itself while it      outside the range of the first steps
                  gets worse
    reward        the policy has become worse                                < REWARD of its best

An alarm is raised when a signal has lasted for its number of steps, and ends when it has been away for CALM_STEPS. A
step that lacks the metric of a signal, as one without tokens, changes nothing.

With several updates a step the metrics are of all of them: they include how far the first ones have moved the policy,
within the bounds of the loss. So the limits are wider by the number of updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from msgspec import field, structs

from asyncrl.config.config import Config
from asyncrl.util.durable import Durable
from asyncrl.util.files import read_json

COLLAPSE = "collapse"
"""The reason of a stop by `learner.on_collapse`."""

Signal = Literal["divergence", "ess", "entropy", "reward"]

LASTS_STEPS: dict[Signal, int] = {"divergence": 3, "ess": 3, "entropy": 3, "reward": 10}
"""Steps in a row after which a signal is an alarm."""
CALM_STEPS = 10
DIVERGENCE, ESS, REWARD = 0.1, 0.3, 0.7
ENTROPY_STEPS = 10
"""First steps whose mean entropy is the norm."""
ENTROPY_RISE, ENTROPY_NATS, ENTROPY_FALL, WORSE = 2.0, 0.5, 0.05, 0.9
"""Entropy is out of range above ENTROPY_RISE times the norm and ENTROPY_NATS more, and below ENTROPY_FALL of it while
the reward is below WORSE of its best: a policy that solves its task also has a low entropy."""
SMOOTHED_STEPS = 5
"""Steps that a reward is the mean of."""
NOISE = 6.0
"""Standard errors by which a smoothed reward falls at least: the best of many steps is above their mean by chance."""
MAX_VALUE = 1e100
"""A larger metric, or one that is not a number, counts as missing: squares stay finite."""
MISMATCH = 0.5
"""Share of the divergence that the tokens of staleness 0 have, from which on the engine's numerics are the cause."""


class Reading(NamedTuple):
    """A step's value of a signal."""

    signal: Signal
    value: float
    limit: float
    is_seen: bool


class Alarm(Durable):
    """A signal that lasted."""

    signal: Signal
    since_step: int
    """First step of the signal."""
    raised_step: int
    last_step: int
    """Latest step of the signal."""
    value: float
    """Its most extreme value so far."""
    limit: float
    staleness: float
    """Mean staleness of the tokens of the step in which it was raised, in learner steps."""
    mismatch: float
    """Divergence of the engine's log-probs from the learner's for tokens of staleness 0 in this step, in nats."""
    ended_step: int | None = None
    """`last_step` once the alarm has ended; None while it lasts."""


class CollapseWatch(Durable):
    """The signals of a run so far."""

    alarms: list[Alarm] = field(default_factory=list[Alarm])
    """The first and the latest of each signal, in the order of their first steps."""
    lasting: dict[str, list[tuple[int, float]]] = field(default_factory=dict[str, list[tuple[int, float]]])
    """The latest steps in a row that have a signal which is no alarm yet, and its values."""
    entropies: list[float] = field(default_factory=list[float])
    """Entropies of the first ENTROPY_STEPS steps."""
    rewards: list[float] = field(default_factory=list[float])
    """Rewards of the latest SMOOTHED_STEPS steps."""
    num_rewards: int = 0
    noise: float = 0.0
    """Variance of a step's reward, from the differences of adjacent steps, which a trend leaves as they are."""
    best_reward: float = -math.inf
    """Largest smoothed reward."""
    lowest_reward: float = 0.0
    """Smallest smoothed reward, at most 0."""
    stop_step: int | None = None
    """First step with an active alarm and a worse reward, in which `learner.on_collapse` acts. None before, and
    after all alarms have ended. An alarm alone is no reason to stop: some runs learn at a large divergence."""

    @property
    def active(self) -> list[Alarm]:
        """The alarms whose signals last."""
        return [alarm for alarm in self.alarms if alarm.ended_step is None]

    @property
    def latest(self) -> list[Alarm]:
        """The active alarms, and those that lasted when the first of them began; all alarms if none is active."""
        since_step = min((alarm.since_step for alarm in self.active), default=0)
        return [alarm for alarm in self.alarms if alarm.last_step >= since_step]

    @property
    def is_worse(self) -> bool:
        """True if the reward is below WORSE of its best, or was never above 0."""
        if len(self.rewards) < SMOOTHED_STEPS:
            return False
        smoothed = fmean(self.rewards)
        return smoothed < self._below_best(WORSE) or smoothed == self.best_reward == 0.0

    @property
    def has_collapsed(self) -> bool:
        """True if an alarm is active and the reward is worse."""
        return bool(self.active) and (self.is_worse or any(alarm.signal == "reward" for alarm in self.active))

    def raised(self, step: int) -> bool:
        """Returns True if an alarm was raised in this step."""
        return any(alarm.raised_step == step for alarm in self.alarms)

    def stops(self, step: int, config: Config) -> bool:
        """Returns True if `learner.on_collapse` stops the run after this step."""
        return config.learner.on_collapse != "warn" and self.stop_step == step

    def after_step(self, step: int, metrics: Mapping[str, float], config: Config) -> CollapseWatch:
        """Returns the watch after a step with these metrics."""
        watch = deepcopy(self)
        known = {name: value for name, value in metrics.items() if abs(value) < MAX_VALUE}
        for reading in watch._read(known, config):
            watch._note(reading, step, known)
        watch.alarms.sort(key=lambda alarm: (alarm.since_step, alarm.raised_step))
        if not watch.active:
            watch.stop_step = None
        elif watch.stop_step is None and watch.is_worse:
            watch.stop_step = step
        return watch

    def _read(self, metrics: Mapping[str, float], config: Config) -> list[Reading]:
        """Returns what the step tells."""
        found: list[Reading] = []
        updates = config.learner.updates
        if (kl := metrics.get("correction/behavior_kl")) is not None:
            found.append(Reading("divergence", kl, DIVERGENCE * updates, kl > DIVERGENCE * updates))
        # The effective sample size of sequences is small by nature.
        if config.algorithm.correction.level == "token" and (ess := metrics.get("correction/ess")) is not None:
            found.append(Reading("ess", ess, ESS / updates, ess < ESS / updates))
        if (reward := metrics.get("reward/mean")) is not None:
            self._add_reward(reward)
            if len(self.rewards) == SMOOTHED_STEPS:
                smoothed = fmean(self.rewards)
                self.best_reward = max(self.best_reward, smoothed)
                self.lowest_reward = min(self.lowest_reward, smoothed)
                limit = self._below_best(REWARD)
                found.append(Reading("reward", smoothed, limit, smoothed < limit))
        if (entropy := metrics.get("learner/entropy")) is not None:
            if len(self.entropies) < ENTROPY_STEPS:
                self.entropies.append(entropy)
            norm = fmean(self.entropies)
            high, low = ENTROPY_RISE * norm + ENTROPY_NATS, ENTROPY_FALL * norm
            is_seen = entropy > high or (entropy < low and self.is_worse)
            found.append(Reading("entropy", entropy, low if entropy < low else high, is_seen))
        return found

    def _add_reward(self, reward: float) -> None:
        if self.rewards:
            self.num_rewards += 1
            self.noise += ((reward - self.rewards[-1]) ** 2 / 2 - self.noise) / self.num_rewards
        self.rewards = [*self.rewards, reward][-SMOOTHED_STEPS:]

    def _below_best(self, fraction: float) -> float:
        """Returns the reward that is this fraction of the best one, or lower where that is within the noise. A reward
        that may be negative has no natural zero: its lowest value takes that place."""
        scale = max(abs(self.best_reward), self.best_reward - self.lowest_reward)
        return self.best_reward - max((1 - fraction) * scale, NOISE * math.sqrt(self.noise / SMOOTHED_STEPS))

    def _note(self, reading: Reading, step: int, metrics: Mapping[str, float]) -> None:
        signal, value, limit, is_seen = reading
        active = next((alarm for alarm in self.active if alarm.signal == signal), None)
        if not is_seen:
            self.lasting.pop(signal, None)
            if active is not None and step - active.last_step >= CALM_STEPS:
                active.ended_step = active.last_step
            return
        extreme = max if value > limit else min
        if active is not None:
            active.value, active.last_step = extreme(active.value, value), step
            return
        seen = self.lasting.setdefault(signal, [])
        seen.append((step, value))
        if len(seen) < LASTS_STEPS[signal]:
            return
        del self.lasting[signal]
        for former in [alarm for alarm in self.alarms if alarm.signal == signal][1:]:
            self.alarms.remove(former)
        most = extreme(value for _, value in seen)
        staleness, mismatch = metrics.get("staleness/mean", 0.0), metrics.get("correction/mismatch_kl", 0.0)
        self.alarms.append(Alarm(signal, seen[0][0], step, step, most, limit, staleness, mismatch))

    def summary(self, config: Config) -> dict[str, Any]:
        """Returns the alarms of a run, with a sentence on what happened, in order, and what to change. Empty without an
        alarm."""
        if not self.alarms:
            return {}
        return {
            "step": self.latest[0].since_step,
            "raised_step": min(alarm.raised_step for alarm in self.latest),
            "collapsed": self.has_collapsed,
            "active": bool(self.active),
            "alarms": [structs.asdict(alarm) for alarm in self.alarms],
            "sentence": _sentence(self, config),
        }


def _sentence(watch: CollapseWatch, config: Config) -> str:
    first, events = watch.latest[0], [_event(alarm) for alarm in watch.latest]
    if watch.has_collapsed:
        outcome = f"collapsed at step {first.since_step}"
        if all(alarm.signal != "reward" for alarm in watch.active):
            now, best = fmean(watch.rewards), watch.best_reward
            events.append(
                f"the reward fell from {best:.3g} to {now:.3g}" if now < best else f"the reward was {now:.3g}"
            )
    elif watch.active:
        outcome = f"has been diverging since step {first.since_step}"
    else:
        outcome = f"diverged at step {first.since_step}, and recovered"
    return f"{outcome}: {', then '.join(events)}. {_advice(first, config)}"


def _event(alarm: Alarm) -> str:
    where = f"from step {alarm.since_step} " + ("on" if alarm.ended_step is None else f"to {alarm.ended_step}")
    match alarm.signal:
        case "divergence":
            return f"{where} the policy was up to {alarm.value:.2g} nats a token from the one that sampled the tokens"
        case "ess":
            return f"{where} the effective sample size fell to {alarm.value:.2g}"
        case "entropy":
            return f"{where} the entropy was out of its range ({alarm.value:.2g} nats, limit {alarm.limit:.2g})"
        case "reward":
            return f"{where} the reward was below {alarm.limit:.3g}, down to {alarm.value:.3g}"


def _advice(alarm: Alarm, config: Config) -> str:
    """Returns the cause of a run's first alarm, and what to change, on resuming it or in a new run."""
    rate = f"resume with a lower learner.lr ({config.learner.lr:g} -> {config.learner.lr / 2:g})"
    if alarm.signal == "divergence" and alarm.mismatch > MISMATCH * alarm.value:
        cause = "The engine's log-probs differ from the learner's at the same version"
        return f"{cause}: use the same model.dtype and kernels on both sides, and see correction/mismatch_kl"
    if alarm.signal == "reward":
        return f"The policy did not diverge before: see what it writes (`asyncrl samples`) and its data, or {rate}"
    replay, algorithm = config.replay, config.algorithm
    if alarm.staleness < 0.5 or not replay.max_staleness:
        return f"The updates are too large: {rate}"
    lower = replay.max_staleness // 2
    changes = ["algorithm.loss=ppo_clip, which bounds that"] if algorithm.loss == "decoupled_ppo" else []
    changes += ["algorithm.max_divergence=0.02"] if algorithm.max_divergence is None else []
    changes += [f"replay.max_staleness={lower}" + (f" replay.min_staleness={lower}" * (replay.min_staleness > lower))]
    cause = f"The policy moves too far in the {alarm.staleness:.2g} steps after which a token is trained"
    return f"{cause}: {rate}, or start a new run with {', or '.join(changes)}"


ROLLBACKS = "rollbacks.json"
"""File with the rollbacks of a run, as they are in its summary."""


def read_rollbacks(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the rollbacks of a run so far, the last of which may not be complete."""
    file = run_dir / ROLLBACKS
    return read_json(file, kind=list) if file.is_file() else []


def rollback_line(summary: Mapping[str, Any]) -> str:
    """Returns a line about the rollbacks of a run; empty if it had none."""
    rollbacks: Sequence[Mapping[str, Any]] = summary.get("rollbacks", [])
    if not rollbacks:
        return ""
    steps = ", ".join(f"{record['stopped_at_step']} -> {record['to_step']}" for record in rollbacks)
    return f"was rolled back (steps {steps}), the last time since it {rollbacks[-1]['sentence']}"
