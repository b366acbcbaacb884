"""The replay queue's metrics of a run: reward, staleness, idle time and rates."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from msgspec import field

from asyncrl.config.config import Config
from asyncrl.replay.ledger import Amount, Ledger
from asyncrl.replay.live_group import LiveGroup
from asyncrl.replay.metrics.collapse import CollapseWatch
from asyncrl.replay.metrics.episodes import episode_states
from asyncrl.replay.metrics.goodput import GoodputSums
from asyncrl.replay.metrics.resources import LearnerUse, generator_metrics, peaks_bytes, rates
from asyncrl.replay.metrics.rewards import RewardsSinceStep
from asyncrl.replay.metrics.stats import (
    DownsampledSeries,
    GeneratorState,
    OutcomeStats,
    ReportedStats,
    StalenessBreakdown,
)
from asyncrl.util.durable import Durable
from asyncrl.util.processes import ACTIVITIES, GENERATOR_ACTIVITIES, fractions
from asyncrl.wire.messages import MAX_COUNT, MAX_NUMBER, GeneratorStats, GroupHeader

RATE_WINDOW_S = 10.0
LEARNER_TIMES = {
    "waiting": "learner/wait_s", "working": "learner/step_s", "syncing": "learner/sync_s", "writing": "learner/write_s",
}  # fmt: skip
"""The learner's metric of each activity."""
SKIPPED_UPDATES = ("learner/skipped_updates", "critic/skipped_updates")
COSTS = ("generator/step_base_s", "generator/step_sequence_s", "generator/request_s", "generator/reward_s")
"""Metrics of the generators' engine costs, in the order of `GeneratorStats.costs`."""


class RunSums(Durable):
    """Sums over the run. Rewards count every scored group, trained or refunded; staleness is in learner steps and
    counts action tokens when they are trained. Times are the run's (`RunClock`)."""

    first_lease_s: float | None = None
    last_step_s: float | None = None
    step_rewards: DownsampledSeries = field(default_factory=DownsampledSeries)
    rewards_since_step: RewardsSinceStep = field(default_factory=RewardsSinceStep)
    outcomes: dict[str, OutcomeStats] = field(default_factory=dict[str, OutcomeStats])
    """Stats by outcome: "trained", or the reason of the refund."""
    goodput: GoodputSums = field(default_factory=GoodputSums)
    greedy_tokens: int = 0
    """Tokens of the greedy completions of scored groups; the ledger does not count them."""
    histogram: list[int] = field(default_factory=list[int])
    breakdown: StalenessBreakdown = field(default_factory=StalenessBreakdown)
    learner_wait_s: float = 0.0
    learner_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACTIVITIES, 0.0))
    """Seconds of learner rank 0, by activity."""
    learner_use: LearnerUse = field(default_factory=LearnerUse)
    syncs: int = 0
    """Versions that the current learner process has sent."""
    syncs_before: int = 0
    """Versions that previous learner processes have sent."""
    skipped_updates: int = 0
    """Updates of policy and critic that were skipped because they were not finite."""
    collapse: CollapseWatch = field(default_factory=CollapseWatch)
    last_metrics: dict[str, float] = field(default_factory=dict[str, float])
    """All metrics of the last step, including those of the learner."""


class RunMetrics(RunSums, kw_only=True):
    """The sums, what processes report, and the metrics made of both."""

    config: Config
    reported: ReportedStats = field(default_factory=ReportedStats)
    recent: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])
    """End time and tokens of each recent step."""

    @property
    def generators(self) -> dict[int, GeneratorState]:
        """The stats of each generator."""
        return self.reported.generators

    def heartbeat(self, generator: int, session: str, version: int, stats: GeneratorStats, now_s: float) -> None:
        """Records the stats of an ask."""
        self.generators.setdefault(generator, GeneratorState()).heartbeat(session, version, stats, now_s)

    def lost(self, generator: int) -> None:
        """The generator is no longer up."""
        if generator in self.generators:
            self.generators[generator].last_heartbeat_s = None

    def leased(self, now_s: float) -> None:
        """Starts the clock of the run at the first lease."""
        if self.first_lease_s is None:
            self.first_lease_s = now_s

    def scored(self, header: GroupHeader, completion: Sequence[int], *, signal: bool, failed: bool) -> None:
        """Counts a group that arrived; `completion` has the action tokens of each trajectory, `signal` is `has_signal`,
        and `failed` is true if it is refunded for lack of rewards."""
        self.goodput.arrived(sum(completion), signal=signal)
        self.rewards_since_step.count_group(header, signal=signal)
        if not failed:
            self.rewards_since_step.add(header, completion)
            self.greedy_tokens += header.greedy_tokens

    def ended(self, outcome: str, header: GroupHeader, completion: Sequence[int]) -> None:
        """Counts a group that was trained or refunded."""
        self.outcomes.setdefault(outcome, OutcomeStats()).add(header, completion)

    def step_metrics(
        self, step: int, groups: Sequence[LiveGroup], trained: Amount, now_s: float, *, generators: int
    ) -> dict[str, float]:
        """The metrics of a step that trains these groups and is committed at `now_s`; `trained` is what the steps
        before have trained, and `generators` the wanted number. Changes nothing."""
        counts, breakdown = staleness_counts(groups, step - 1), breakdown_of(groups, step - 1, now_s)
        tokens, staleness = int(counts.sum()), np.arange(len(counts))
        scored, generator_s = self.rewards_since_step.table(), self.generator_s
        reward = self._reward
        elapsed_s = now_s - (self.first_lease_s or 0.0)
        own = {
            "reward/mean": reward or 0.0,
            "staleness/mean": float((counts * staleness).sum() / max(tokens, 1)),
            "staleness/max": float(staleness[counts > 0].max(initial=0)),
            **{f"staleness/{name}": mean for name, mean in breakdown.staleness.items()},
            **{f"group/{name}_s": mean_s for name, mean_s in breakdown.phases_s.items()},
            "time/elapsed_s": elapsed_s,
            "generator/idle_fraction": fractions(generator_s)["waiting"],
            "generator/busy_s": sum(g.busy_s for g in self.generators.values()),
            "generator/tokens": float(sum(g.tokens for g in self.generators.values())),
            "generator/recomputed_tokens": float(self.recomputed_tokens),
        }
        tokens, samples = (
            trained.tokens + tokens,
            trained.trajectories + sum(held.finished.num_members for held in groups),
        )
        own |= {f"throughput/{name}": rate for name, rate in self.rates(tokens, samples, elapsed_s).items()}
        own |= {f"{role}/peak_memory_bytes": float(peak) for role, peak in peaks_bytes(self.reported).items()}
        settings, goodput = self.config.generator, self._goodput_after(groups, now_s, generators)
        slots = settings.max_running_groups * settings.group_size
        own |= goodput.metrics(self.generators, slots=slots)
        if self.config.environment.name is not None:
            own |= episode_states(self.generators.values())
        return scored | self._costs() | generator_metrics(self.generators.values()) | own

    def committed(
        self, step: int, groups: Sequence[LiveGroup], metrics: dict[str, float], now_s: float, *, generators: int
    ) -> None:
        """Counts a step that trained these groups; `metrics` are all of the step, including those of the learner, and
        `generators` is the wanted number."""
        self.goodput = self._goodput_after(groups, now_s, generators)
        counts = staleness_counts(groups, step - 1)
        self.histogram.extend([0] * (len(counts) - len(self.histogram)))
        for staleness, count in enumerate(counts.tolist()):
            self.histogram[staleness] += count
        self.breakdown.join(breakdown_of(groups, step - 1, now_s))
        waited_s = metrics.get("learner/wait_s", 0.0) + metrics.get("learner/sync_s", 0.0)
        if not waited_s >= 0.0:  # a learner's metric may have any value, including NaN
            waited_s = 0.0
        self.learner_wait_s += min(waited_s, now_s - (self.last_step_s or self.first_lease_s or 0.0))
        for name, metric in LEARNER_TIMES.items():
            seconds = metrics.get(metric, 0.0)
            self.learner_s[name] += min(seconds, MAX_NUMBER) if seconds >= 0.0 else 0.0
        self.learner_use.add(metrics)
        self.last_step_s = now_s
        self._count_syncs(metrics.get("weights/broadcasts", 0.0))
        for skipped in (metrics.get(name, 0.0) for name in SKIPPED_UPDATES):
            self.skipped_updates += int(skipped) if 0 <= skipped <= MAX_COUNT else 0
        self.recent.append((now_s, int(counts.sum())))
        while now_s - self.recent[0][0] >= RATE_WINDOW_S:
            self.recent.popleft()
        if (reward := self._reward) is not None:
            self.step_rewards.add(reward)
        self.rewards_since_step = RewardsSinceStep()
        self.last_metrics = metrics
        self.collapse = self.collapse_after(step, metrics)

    def collapse_after(self, step: int, metrics: dict[str, float]) -> CollapseWatch:
        """Returns the watch after a step with these metrics, which are all of the step. Changes nothing."""
        return self.collapse.after_step(step, metrics, self.config)

    @property
    def generator_idle(self) -> float:
        """Fraction of the generators' time, up to their last heartbeats, in which they had nothing to generate."""
        return fractions(self.generator_s)["waiting"]

    @property
    def generator_environments(self) -> float:
        """Fraction of it in which all their episodes waited for their environments."""
        return fractions(self.generator_s)["environments"]

    @property
    def generator_s(self) -> dict[str, float]:
        """Seconds of all generators together, by activity."""
        return {name: sum(getattr(g, f"{name}_s") for g in self.generators.values()) for name in GENERATOR_ACTIVITIES}

    @property
    def stall_ms_mean(self) -> float:
        """Mean duration for which a weight swap stalled an engine."""
        stall_ms = sum(g.stall_ms_sum for g in self.generators.values())
        return stall_ms / max(sum(g.stalls for g in self.generators.values()), 1)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens whose keys and values engines have computed again."""
        return sum(g.recomputed_tokens for g in self.generators.values())

    @property
    def learner_idle(self) -> float:
        """Fraction of the wall time, up to the last step, in which learner rank 0 waited for data or weights."""
        return min(1.0, self.learner_wait_s / self.training_s) if self.training_s else 0.0

    @property
    def training_s(self) -> float:
        """Seconds from the first lease to the last step."""
        if self.first_lease_s is None or self.last_step_s is None:
            return 0.0
        return self.last_step_s - self.first_lease_s

    def tokens_per_s(self, ledger: Ledger) -> float:
        """Trained tokens per second of `training_s`."""
        return ledger.trained.tokens / self.training_s if self.training_s else 0.0

    def rates(self, tokens: int, samples: int, elapsed_s: float) -> dict[str, float]:
        """The rates of a run that has trained this number of action tokens and of trajectories."""
        generators, learners = self.generators.values(), self.config.launch.learners
        return rates(generators, tokens=tokens, samples=samples, elapsed_s=elapsed_s, learners=learners)

    def _goodput_after(self, groups: Sequence[LiveGroup], now_s: float, generators: int) -> GoodputSums:
        """The sums of the goodput after a step that trains these groups and is committed at `now_s`."""
        since_s = self.first_lease_s if self.last_step_s is None else self.last_step_s
        return self.goodput.after_step(
            offered_s=generators * (now_s - (now_s if since_s is None else since_s)),
            trained_signal=sum(sum(held.completion) for held in groups if held.signal),
        )

    def _costs(self) -> dict[str, float]:
        """Means over the generators that know their engine costs; empty if none does."""
        known = [g.costs for g in self.generators.values() if len(g.costs) == len(COSTS)]
        costs = {name: sum(column) / len(column) for name, column in zip(COSTS, zip(*known, strict=True), strict=False)}
        return costs | ({"weights/stall_ms": self.stall_ms_mean} if known else {})

    def _count_syncs(self, broadcasts: float) -> None:
        """Records the number of versions that the learner has sent since its start, unless the value is implausible."""
        syncs = int(broadcasts) if 0 <= broadcasts <= MAX_COUNT else self.syncs
        if syncs < self.syncs:
            self.syncs_before += self.syncs
        self.syncs = syncs

    @property
    def _reward(self) -> float | None:
        """Mean reward of the trajectories scored since the last step, or of that step if there are none."""
        mean = self.rewards_since_step.means.get("reward/mean")
        return self.step_rewards.latest if mean is None else mean.mean


def staleness_counts(groups: Sequence[LiveGroup], version: int) -> np.ndarray:
    """Action tokens of the groups by staleness at `version`, [max staleness + 1]."""
    sampled = [pair for held in groups for pair in held.by_version.items()]
    counts = np.zeros(1 + max((version - by for by, _ in sampled), default=-1), dtype=np.int64)
    for by, tokens in sampled:
        counts[version - by] += tokens
    return counts


def breakdown_of(groups: Sequence[LiveGroup], version: int, trained_s: float) -> StalenessBreakdown:
    """The breakdown of groups that are trained together at `version`."""
    made = StalenessBreakdown()
    for held in groups:
        made.add(held.finished, held.by_version, taken_s=held.taken_s, trained_s=trained_s, train_version=version)
    return made
