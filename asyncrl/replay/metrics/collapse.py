"""Detects that a training collapses: from the metrics of its steps alone, so that a replay from the journal repeats it.

    divergence    the policy has left the one that sampled its tokens        > DIVERGENCE nats a token
    ess           few tokens carry all the weight                            < ESS of the tokens
    entropy       the policy becomes random, or repeats itself while it      outside the range of the first steps
                  gets worse
    reward        the policy has become worse                                < REWARD of its best

An alarm is raised when a signal has lasted for its number of steps, and ends when it has been away for CALM_STEPS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import field, structs

from asyncrl.config import Config
from asyncrl.util.durable import Durable

Signal = Literal["divergence", "ess", "entropy", "reward"]

LASTS_STEPS: dict[Signal, int] = {"divergence": 3, "ess": 3, "entropy": 3, "reward": 10}
"""Steps in a row after which a signal is an alarm."""
ALARM_STEPS = max(LASTS_STEPS.values())
CALM_STEPS = 10
DIVERGENCE, ESS, REWARD = 0.1, 0.3, 0.7
ENTROPY_STEPS = 10
"""First steps whose mean entropy is the norm."""
ENTROPY_RISE, ENTROPY_NATS, ENTROPY_FALL, WORSE = 2.0, 0.5, 0.05, 0.9
"""Entropy is out of range above ENTROPY_RISE times the norm and ENTROPY_NATS more, and below ENTROPY_FALL of it while
the reward is below WORSE of its best: a policy that solves its task has a low entropy, too."""
SMOOTHED_STEPS = 5
"""Steps that a reward is the mean of."""
MISMATCH = 0.5
"""Share of the divergence that the tokens of staleness 0 have, from which on the engine's numerics are the cause."""


class Alarm(Durable):
    """A signal that lasted."""

    signal: Signal
    since_step: int
    """First step of the signal."""
    raised_step: int
    value: float
    """Its most extreme value so far."""
    limit: float
    staleness: float
    """Mean staleness of the tokens of the step in which it was raised, in learner steps."""
    mismatch: float
    """Divergence of the engine's log-probs from the learner's for tokens of staleness 0 in this step, in nats."""
    ended_step: int | None = None
    """Last step of the signal; None while it lasts."""


class CollapseWatch(Durable):
    """The signals of a run so far."""

    alarms: list[Alarm] = field(default_factory=list[Alarm])
    """In the order of their first steps."""
    lasting: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Values of each signal in the latest steps in a row that have it."""
    calm_steps: dict[str, int] = field(default_factory=dict[str, int])
    """Steps since each active alarm's signal was last seen."""
    entropies: list[float] = field(default_factory=list[float])
    """Of the first ENTROPY_STEPS steps."""
    rewards: list[float] = field(default_factory=list[float])
    """Of the latest SMOOTHED_STEPS steps."""
    best_reward: float | None = None
    """Largest smoothed reward."""
    lowest_reward: float = 0.0
    """Smallest smoothed reward."""

    @property
    def active(self) -> list[Alarm]:
        """The alarms whose signals last."""
        return [alarm for alarm in self.alarms if alarm.ended_step is None]

    def after_step(self, step: int, metrics: Mapping[str, float], *, by_token: bool) -> CollapseWatch:
        """Returns the watch after a step with these metrics. `by_token`: the metric `correction/ess` is that of tokens,
        not of sequences, which is naturally small."""
        watch = CollapseWatch(
            [structs.replace(alarm) for alarm in self.alarms],
            {name: list(values) for name, values in self.lasting.items()},
            dict(self.calm_steps), list(self.entropies), list(self.rewards), self.best_reward, self.lowest_reward,
        )  # fmt: skip
        for signal, (value, limit, is_seen) in watch._signals(metrics, by_token=by_token).items():
            watch._note(signal, step, metrics, value, limit, is_seen=is_seen)
        watch.alarms.sort(key=lambda alarm: (alarm.since_step, alarm.raised_step))
        return watch

    def _signals(self, metrics: Mapping[str, float], *, by_token: bool) -> dict[Signal, tuple[float, float, bool]]:
        """Returns value, limit and whether it is beyond, of the signals that this step can tell."""
        found: dict[Signal, tuple[float, float, bool]] = {}
        if (kl := metrics.get("correction/behavior_kl")) is not None:
            found["divergence"] = kl, DIVERGENCE, kl > DIVERGENCE
        if by_token and (ess := metrics.get("correction/ess")) is not None:
            found["ess"] = ess, ESS, ess < ESS
        worse = False
        if "learner/tokens" in metrics and (reward := metrics.get("reward/mean")) is not None:
            self.rewards = [*self.rewards, reward][-SMOOTHED_STEPS:]
            if len(self.rewards) == SMOOTHED_STEPS:
                smoothed = sum(self.rewards) / SMOOTHED_STEPS
                best = self.best_reward = smoothed if self.best_reward is None else max(self.best_reward, smoothed)
                self.lowest_reward = min(self.lowest_reward, smoothed)
                # A reward that may be negative has no natural zero; its lowest value takes that place.
                scale = best - min(self.lowest_reward, 0.0)
                limit = best - (1 - REWARD) * scale
                found["reward"] = smoothed, limit, smoothed < limit
                worse = smoothed < best - (1 - WORSE) * scale
        if (entropy := metrics.get("learner/entropy")) is not None:
            if len(self.entropies) < ENTROPY_STEPS:
                self.entropies.append(entropy)
            norm = sum(self.entropies) / len(self.entropies)
            high, low = ENTROPY_RISE * norm + ENTROPY_NATS, ENTROPY_FALL * norm
            limit = low if entropy < low else high
            found["entropy"] = entropy, limit, entropy > high or (entropy < low and worse)
        return found

    def _note(
        self, signal: Signal, step: int, metrics: Mapping[str, float], value: float, limit: float, *, is_seen: bool
    ) -> None:
        active = next((alarm for alarm in self.active if alarm.signal == signal), None)
        extreme = min if signal in ("ess", "reward") or value < limit else max
        if not is_seen:
            self.lasting.pop(signal, None)
            if active is not None:
                calm_steps = self.calm_steps[signal] = self.calm_steps.get(signal, 0) + 1
                if calm_steps == CALM_STEPS:
                    active.ended_step = step - CALM_STEPS
            return
        self.calm_steps[signal] = 0
        if active is not None:
            active.value = extreme(active.value, value)
            return
        values = self.lasting[signal] = [*self.lasting.get(signal, []), value]
        if len(values) == LASTS_STEPS[signal]:
            staleness, mismatch = metrics.get("staleness/mean", 0.0), metrics.get("correction/mismatch_kl", 0.0)
            self.alarms.append(Alarm(signal, step - len(values) + 1, step, extreme(values), limit, staleness, mismatch))

    def summary(self, config: Config) -> dict[str, Any]:
        """The alarms of a run, with a sentence that says what happened, in its order, and what to change. Empty without
        an alarm."""
        if not self.alarms:
            return {}
        return {
            "step": self.alarms[0].since_step,
            "raised_step": min(alarm.raised_step for alarm in self.alarms),
            "collapsed": any(alarm.signal == "reward" for alarm in self.active),
            "active": bool(self.active),
            "alarms": [structs.asdict(alarm) for alarm in self.alarms],
            "sentence": _sentence(self, config),
        }


def _sentence(watch: CollapseWatch, config: Config) -> str:
    alarms, active = watch.alarms, watch.active
    first = alarms[0]
    if any(alarm.signal == "reward" for alarm in active):
        what = f"collapsed at step {first.since_step}"
    elif active:
        what = f"diverges since step {first.since_step}"
    else:
        what = f"diverged at step {first.since_step}, and recovered"
    events = ", then ".join(map(_event, alarms))
    return f"{what}: {events}. {_cause(first)}: {_remedy(first, config)}"


def _event(alarm: Alarm) -> str:
    where = f"from step {alarm.since_step} on"
    if alarm.ended_step is not None:
        where = f"from step {alarm.since_step} to {alarm.ended_step}"
    match alarm.signal:
        case "divergence":
            return f"the policy was up to {alarm.value:.2g} nats a token from the one that sampled its tokens {where}"
        case "ess":
            return f"the effective sample size fell to {alarm.value:.2g} {where}"
        case "entropy":
            return f"the entropy left its range ({alarm.value:.2g} nats, limit {alarm.limit:.2g}) {where}"
        case "reward":
            return f"the reward fell below {alarm.limit:.3g}, {REWARD:.0%} of its best, to {alarm.value:.3g} {where}"


def _cause(alarm: Alarm) -> str:
    if alarm.signal == "divergence" and alarm.mismatch > MISMATCH * alarm.value:
        return "The engine's log-probs differ from the learner's at the same version"
    if alarm.staleness >= 0.5:
        return f"The policy moves too far in the {alarm.staleness:.2g} steps after which a token is trained"
    return "The updates are too large"


def _remedy(alarm: Alarm, config: Config) -> str:
    if alarm.signal == "divergence" and alarm.mismatch > MISMATCH * alarm.value:
        return "use the same model.dtype and kernels on both sides, and see correction/mismatch_kl"
    rate = f"lower learner.lr ({config.learner.lr:g} -> {config.learner.lr / 2:g})"
    limit = config.replay.max_staleness
    if alarm.staleness < 0.5 or not limit:
        return rate
    return f"{rate}, or replay.max_staleness ({limit} -> {limit // 2})"
