"""The replay queue's metrics of a run: rewards, staleness, idle time, memory and rates."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import structlog
from msgspec import field

from asyncrl.config.config import Config
from asyncrl.observe.collapse import CollapseWatch
from asyncrl.observe.stats import (
    GeneratorState,
    GoodputSums,
    OutcomeStats,
    ReportedStats,
    exact_mean,
    quantiles,
)
from asyncrl.types import EPISODE_ENDS, MAX_COUNT, MAX_NUMBER, EpisodeEnd
from asyncrl.util.durable import Durable
from asyncrl.util.processes import (
    GENERATOR_ACTIVITIES,
    GENERATOR_PHASES,
    LEARNER_PHASES,
    fractions,
    peak_memory_bytes,
)
from asyncrl.wire.messages import GeneratorStats, GroupHeader

log = structlog.get_logger()

RATE_WINDOW_S = 10.0
LEARNER_TIMES = {
    "waiting": "learner/wait_s", "working": "learner/step_s", "syncing": "learner/sync_s", "writing": "learner/write_s",
}  # fmt: skip
"""The learner's metric of each activity."""
LEARNER_SECONDS = LEARNER_TIMES | {name: f"learner/{name}_s" for name in LEARNER_PHASES}
"""The same, and that of each phase of its steps."""
WAIT = "environment/wait_s"
SKIPPED_UPDATES = ("learner/skipped_updates", "critic/skipped_updates")
COSTS = ("generator/step_base_s", "generator/step_sequence_s", "generator/request_s", "generator/reward_s")
"""Metrics of the generators' engine costs, in the order of `GeneratorStats.costs`."""
EPISODE_FAILURES: tuple[EpisodeEnd, ...] = ("environment", "timeout", "overlong", "host")
"""The ends of a failed episode."""
LATEST_GROUPS, MAX_FAILED = 100, 0.05
"""Warn when more than this part of the rewards of the latest groups failed."""
EXAMPLES = 3


class TrainedGroup(Protocol):
    """The part of a trained group that the metrics of a step read."""

    completion: list[int]
    """Action tokens of each trajectory."""
    by_version: dict[int, int]
    """Action tokens by the policy version that sampled them."""
    signal: bool
    taken_s: float

    @property
    def finished(self) -> GroupHeader: ...


def breakdown_of(groups: Sequence[TrainedGroup], version: int, trained_s: float) -> dict[str, float]:
    """Sums over groups that are trained together at `version`: their number and action tokens, the learner steps from
    the version that sampled a token to the newest of its group and from there to `version` (over action tokens), and
    the seconds of being generated, in the queue and with the learner."""
    sums = Counter[str]()
    for group in groups:
        header, tokens = group.finished, sum(group.by_version.values())
        newest = header.end_version
        sums.update({
            "groups": 1,
            "tokens": tokens,
            "in_flight": sum((newest - sampled) * count for sampled, count in group.by_version.items()),
            "in_queue": (version - newest) * tokens,
            "generate_s": header.finished_s - header.started_s,
            "queue_s": group.taken_s - header.finished_s,
            "train_s": trained_s - group.taken_s,
        })  # fmt: skip
    return dict[str, float](sums)


def staleness_parts(breakdown: Mapping[str, float]) -> dict[str, float]:
    """Means over action tokens, in learner steps; their sum is the mean staleness."""
    return {name: breakdown.get(name, 0) / max(breakdown.get("tokens", 0), 1) for name in ("in_flight", "in_queue")}


def group_phases_s(breakdown: Mapping[str, float]) -> dict[str, float]:
    """Mean seconds of a group in each phase."""
    groups = max(breakdown.get("groups", 0), 1)
    return {name: breakdown.get(f"{name}_s", 0.0) / groups for name in ("generate", "queue", "train")}


class RewardsSinceStep(Durable):
    """Values of the members that have a reward, of groups since the last step: rewards, their parts, lengths. Their
    means do not depend on the order in which groups arrive."""

    values: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """By the metric that is their mean; for WAIT their quantiles."""

    @property
    def reward(self) -> float | None:
        """The mean reward; None before the first."""
        return exact_mean(self.values["reward/mean"]) if "reward/mean" in self.values else None

    def add(self, header: GroupHeader, completion: Sequence[int]) -> None:
        """Counts the members of a group that have a reward, and the lengths of all; `completion` has the action tokens
        of each trajectory."""
        rewards, all_parts = header.of_scored(header.rewards), header.of_scored(header.parts)
        self._count("reward/mean", rewards)
        self._count(f"reward/{header.data_source}", rewards)
        for name in {name for parts in all_parts for name in parts}:
            self._count(f"reward_part/{name}", [parts[name] for parts in all_parts if name in parts])
        self._count("completion/tokens", [float(tokens) for tokens in header.sums_of_members(completion)])
        if header.greedy_reward is not None:
            self._count("reward/greedy", [header.greedy_reward])
        if header.episodes:
            for name, values in _episode_values(header).items():
                self._count(name, header.of_scored(values))
            self._count(WAIT, [episode.wait_s for episode in header.of_scored(header.episodes)])
        truncated = [float(status == "truncated") for status in header.of_scored(header.status)]
        self._count("completion/truncated_fraction", truncated)

    def count_group(self, header: GroupHeader, *, signal: bool) -> None:
        """Counts any group: whether it has a training signal, and its members without a reward."""
        self._count("reward/signal_fraction", [float(signal)])
        self._count("reward/failed_fraction", [float(bool(error)) for error in header.of_members(header.errors)])
        if header.episodes:
            episodes = header.of_members(header.episodes)
            for end in EPISODE_FAILURES:
                self._count(f"environment/failed/{end}", [float(episode.ended == end) for episode in episodes])

    def table(self) -> dict[str, float]:
        """The means and quantiles, by name."""
        means = {name: exact_mean(self.values[name]) for name in sorted(self.values) if name != WAIT}
        return means | quantiles(WAIT, self.values.get(WAIT, []))

    def _count(self, name: str, values: Sequence[float]) -> None:
        if values:
            self.values.setdefault(name, []).extend(values)


def _episode_values(header: GroupHeader) -> dict[str, list[float]]:
    """A value of each episode of a group with rewards, by the metric that is their mean."""
    turns = header.sums_of_members([len(episode.turn_rewards) for episode in header.episodes])
    branches = header.sums_of_members([1] * len(header.episodes))
    observed = header.sums_of_members([episode.observation_tokens for episode in header.episodes])
    episodes = header.of_members(header.episodes)
    ends = {f"environment/ended_{end}": [float(episode.ended == end) for episode in episodes] for end in EPISODE_ENDS}
    return {
        "environment/turns": [float(count) for count in turns],
        "environment/branches": [float(count) for count in branches],
        "environment/observation_tokens": [float(tokens) for tokens in observed],
        "environment/episode_s": [episode.environment_s for episode in episodes],
        "environment/reset_s": [episode.reset_s for episode in episodes],
        "environment/tries": [float(episode.tries) for episode in episodes],
        **ends,
    }


class FailedRewards:
    """Logs failed rewards. Warns of groups that are refunded for them, and with examples each time that the fraction of
    failed ones passes MAX_FAILED."""

    def __init__(self) -> None:
        self._errors: deque[list[str]] = deque(maxlen=LATEST_GROUPS)
        """Error texts of the members of each of the latest groups; empty for a member with a reward."""
        self._are_many = False

    def add(self, header: GroupHeader, *, refunded: bool) -> None:
        """Counts a group; `refunded` is true if it has too few rewards."""
        self._errors.append([*header.of_members(header.errors)])
        errors = [error for error in self._errors[-1] if error]
        if refunded or errors:
            write, event = (log.warning, "group failed") if refunded else (log.info, "rewards failed")
            write(event, ticket=header.ticket, row=header.row, count=len(errors), error=(errors or [""])[0])
        failed = [error for group in self._errors for error in group if error]
        rewards, were_many = sum(map(len, self._errors)), self._are_many
        self._are_many = len(failed) >= EXAMPLES and len(failed) > MAX_FAILED * rewards
        if self._are_many and not were_many:
            examples = list(dict.fromkeys(reversed(failed)))[:EXAMPLES]
            log.warning("many rewards fail", failed=len(failed), rewards=rewards, examples=examples)


class RunSums(Durable):
    """Sums over the run. Rewards count every scored group, trained or refunded; staleness is in learner steps and
    counts action tokens when they are trained. Times are the run's (`RunClock`)."""

    first_lease_s: float | None = None
    last_step_s: float | None = None
    reward: float | None = None
    """Mean reward of the last step that had one."""
    rewards_since_step: RewardsSinceStep = field(default_factory=RewardsSinceStep)
    outcomes: dict[str, OutcomeStats] = field(default_factory=dict[str, OutcomeStats])
    """Stats by outcome: "trained", or the reason of the refund."""
    goodput: GoodputSums = field(default_factory=GoodputSums)
    greedy_tokens: int = 0
    """Tokens of the greedy completions of scored groups; the ledger does not count them."""
    histogram: list[int] = field(default_factory=list[int])
    breakdown: dict[str, float] = field(default_factory=dict[str, float])
    """As `breakdown_of`."""
    learner_wait_s: float = 0.0
    learner_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LEARNER_SECONDS, 0.0))
    """Seconds of learner rank 0, by activity and by phase of its steps."""
    learner_peaks_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """Highest peak of the memory of learner and critic, over all starts."""
    syncs: int = 0
    """Versions that the current learner process has sent."""
    syncs_before: int = 0
    """Versions that previous learner processes have sent."""
    skipped_updates: int = 0
    """Updates of policy and critic that were skipped because they were not finite."""
    collapse: CollapseWatch = field(default_factory=CollapseWatch)
    last_metrics: dict[str, float] = field(default_factory=dict[str, float])
    """All metrics of the last step, including the learner's."""


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
        self, step: int, groups: Sequence[TrainedGroup], now_s: float, *, tokens: int, samples: int, generators: int
    ) -> dict[str, float]:
        """The metrics of a step that trains these groups and is committed at `now_s`; `tokens` and `samples` are what
        the steps before have trained, and `generators` the wanted number. Changes nothing."""
        counts, breakdown = staleness_counts(groups, step - 1), breakdown_of(groups, step - 1, now_s)
        staleness = np.arange(len(counts))
        tokens += int(counts.sum())
        samples += sum(group.finished.num_members for group in groups)
        elapsed_s = now_s - (self.first_lease_s or 0.0)
        every, learners = self.generators.values(), self.config.launch.learners
        measured = {
            "reward/mean": self._reward or 0.0,
            "staleness/mean": float((counts * staleness).sum() / max(int(counts.sum()), 1)),
            "staleness/max": float(staleness[counts > 0].max(initial=0)),
            **{f"staleness/{name}": mean for name, mean in staleness_parts(breakdown).items()},
            **{f"group/{name}_s": mean_s for name, mean_s in group_phases_s(breakdown).items()},
            "time/elapsed_s": elapsed_s,
            "generator/idle_fraction": fractions(self.generator_s)["waiting"],
            "generator/busy_s": sum(g.busy_s for g in every),
            "generator/tokens": float(sum(g.stats.tokens for g in every)),
            "generator/recomputed_tokens": float(self.recomputed_tokens),
        }
        speed = rates(every, tokens=tokens, samples=samples, elapsed_s=elapsed_s, learners=learners)
        measured |= {f"throughput/{name}": rate for name, rate in speed.items()}
        measured |= {f"{role}/peak_memory_bytes": float(peak) for role, peak in peaks_bytes(self.reported).items()}
        settings, goodput = self.config.generator, self._goodput_after(groups, now_s, generators)
        measured |= goodput.metrics(self.generators, slots=settings.max_running_groups * settings.group_size)
        if self.config.environment.name is not None:
            measured |= self._episode_states()
        return self.rewards_since_step.table() | self._costs() | generator_metrics(every) | measured

    def committed(
        self, step: int, groups: Sequence[TrainedGroup], metrics: dict[str, float], now_s: float, *, generators: int
    ) -> None:
        """Counts a step that trained these groups; `metrics` are all of the step, including the learner's, and
        `generators` is the wanted number."""
        self.goodput = self._goodput_after(groups, now_s, generators)
        counts = staleness_counts(groups, step - 1)
        self.histogram.extend([0] * (len(counts) - len(self.histogram)))
        for staleness, count in enumerate(counts.tolist()):
            self.histogram[staleness] += count
        for name, value in breakdown_of(groups, step - 1, now_s).items():
            self.breakdown[name] = self.breakdown.get(name, 0) + value
        waited_s = metrics.get("learner/wait_s", 0.0) + metrics.get("learner/sync_s", 0.0)
        if not waited_s >= 0.0:  # a learner's metric may have any value, including NaN
            waited_s = 0.0
        self.learner_wait_s += min(waited_s, now_s - (self.last_step_s or self.first_lease_s or 0.0))
        for name, metric in LEARNER_SECONDS.items():
            self.learner_s[name] += _bounded(metrics.get(metric, 0.0))
        for role in ("learner", "critic"):
            if peak := _bounded(metrics.get(f"{role}/peak_memory_bytes", 0.0)):
                self.learner_peaks_bytes[role] = max(self.learner_peaks_bytes.get(role, 0), int(peak))
        self.last_step_s = now_s
        self._count_syncs(metrics.get("weights/broadcasts", 0.0))
        for skipped in (metrics.get(name, 0.0) for name in SKIPPED_UPDATES):
            self.skipped_updates += int(skipped) if 0 <= skipped <= MAX_COUNT else 0
        self.recent.append((now_s, int(counts.sum())))
        while now_s - self.recent[0][0] >= RATE_WINDOW_S:
            self.recent.popleft()
        self.reward = self._reward
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
        return _activities_s(self.generators.values())

    @property
    def stall_ms_mean(self) -> float:
        """Mean duration for which a weight swap stalled an engine."""
        stall_ms = sum(g.stall_ms_sum for g in self.generators.values())
        return stall_ms / max(sum(g.stalls for g in self.generators.values()), 1)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens whose keys and values engines have computed again."""
        return sum(g.stats.recomputed_tokens for g in self.generators.values())

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

    def _goodput_after(self, groups: Sequence[TrainedGroup], now_s: float, generators: int) -> GoodputSums:
        """The sums of the goodput after a step that trains these groups and is committed at `now_s`."""
        since_s = self.first_lease_s if self.last_step_s is None else self.last_step_s
        return self.goodput.after_step(
            offered_s=generators * (now_s - (now_s if since_s is None else since_s)),
            trained_signal=sum(sum(group.completion) for group in groups if group.signal),
        )

    def _costs(self) -> dict[str, float]:
        """Means over the generators that know their engine costs; empty if none does."""
        known = [g.stats.costs for g in self.generators.values() if len(g.stats.costs) == len(COSTS)]
        costs = {name: sum(column) / len(column) for name, column in zip(COSTS, zip(*known, strict=True), strict=False)}
        return costs | ({"weights/stall_ms": self.stall_ms_mean} if known else {})

    def _episode_states(self) -> dict[str, float]:
        """Numbers of episodes in the generators that are up, and the fraction of the time of all generators in which
        all their episodes waited."""
        up = [g for g in self.generators.values() if g.last_heartbeat_s is not None]
        return {
            "generator/environments_fraction": self.generator_environments,
            "environment/live_episodes": float(sum(g.stats.live_episodes for g in up)),
            "environment/waiting_episodes": float(sum(g.stats.waiting_episodes for g in up)),
        }

    def _count_syncs(self, broadcasts: float) -> None:
        """Records the number of versions that the learner has sent since its start, unless the value is implausible."""
        syncs = int(broadcasts) if 0 <= broadcasts <= MAX_COUNT else self.syncs
        if syncs < self.syncs:
            self.syncs_before += self.syncs
        self.syncs = syncs

    @property
    def _reward(self) -> float | None:
        """Mean reward of the trajectories scored since the last step, or of that step if there are none."""
        reward = self.rewards_since_step.reward
        return self.reward if reward is None else reward


def staleness_counts(groups: Sequence[TrainedGroup], version: int) -> np.ndarray:
    """Action tokens of the groups by staleness at `version`, [max staleness + 1]."""
    sampled = [pair for group in groups for pair in group.by_version.items()]
    counts = np.zeros(1 + max((version - by for by, _ in sampled), default=-1), dtype=np.int64)
    for by, tokens in sampled:
        counts[version - by] += tokens
    return counts


def generator_metrics(generators: Collection[GeneratorState]) -> dict[str, float]:
    """`generator/PHASE_fraction`: the fraction of the generators' time since the start that each phase takes, and
    `generator/engine_cpu_fraction`: that of their decoding steps in which the thread that runs them computes. Empty
    before the first generator is up."""
    total_s = sum(sum(g.seconds.values()) for g in generators)
    phases_s = _phases_s(generators)
    table = {f"generator/{name}_fraction": seconds / total_s for name, seconds in phases_s.items() if total_s}
    if engine_s := phases_s["engine"]:
        table["generator/engine_cpu_fraction"] = sum(g.stats.engine_cpu_s for g in generators) / engine_s
    return table


def peaks_bytes(reported: ReportedStats) -> dict[str, int]:
    """Peak of the memory by role: of this process, of the generator with the highest one, and of the roles that have
    reported theirs; without learner and critic."""
    highest = max((g.stats.peak_memory_bytes for g in reported.generators.values()), default=0)
    generator = {"generator": highest} if highest else {}
    return {"replay": peak_memory_bytes(), **generator, **reported.peaks_bytes}


def times(generators: Collection[GeneratorState], learner_s: dict[str, float]) -> dict[str, dict[str, Any]]:
    """By role the fraction of its time in each activity and, as "phases", in each phase of its work; `learner_s` are
    the seconds of learner rank 0 by activity and phase."""
    table: dict[str, dict[str, Any]] = {}
    by_activity, by_phase = ({name: learner_s[name] for name in names} for names in (LEARNER_TIMES, LEARNER_PHASES))
    for role, seconds, phases_s in (
        ("generator", _activities_s(generators), _phases_s(generators)),
        ("learner", by_activity, by_phase),
    ):
        total_s = sum(seconds.values())
        phases = {name: part / total_s if total_s else 0.0 for name, part in phases_s.items()}
        table[role] = {**fractions(seconds), "phases": phases}
    return table


def rates(
    generators: Collection[GeneratorState], *, tokens: int, samples: int, elapsed_s: float, learners: int
) -> dict[str, float]:
    """Rates per second since the first lease: `tokens` and `samples` that were trained, of all learner ranks and of
    each, and what each generator has generated. Empty before any time has passed."""
    trained = {"tokens": tokens, "samples": samples}
    table: dict[str, float] = {}
    for unit, count in trained.items() if elapsed_s > 0 else ():
        table[f"trained_{unit}_per_s"] = count / elapsed_s
        table[f"trained_{unit}_per_s_per_device"] = count / elapsed_s / learners
    generators_s = sum(sum(g.seconds.values()) for g in generators)
    for unit in ("tokens", "samples") if generators_s else ():
        table[f"generated_{unit}_per_s_per_device"] = sum(getattr(g.stats, unit) for g in generators) / generators_s
    return table


def _activities_s(generators: Collection[GeneratorState]) -> dict[str, float]:
    return {name: sum(g.seconds[name] for g in generators) for name in GENERATOR_ACTIVITIES}


def _phases_s(generators: Collection[GeneratorState]) -> dict[str, float]:
    return {name: sum(g.phases_s[name] for g in generators) for name in GENERATOR_PHASES}


def _bounded(value: float) -> float:
    return min(value, MAX_NUMBER) if value >= 0.0 else 0.0
