"""Running statistics of bounded size, whose state is stored in the journal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod

import numpy as np
from msgspec import field
from msgspec.structs import replace

from asyncrl.types import MAX_NUMBER, MAX_TIME_S, NO_VERSION
from asyncrl.util.durable import Durable
from asyncrl.util.processes import GENERATOR_ACTIVITIES, GENERATOR_PHASES, IDLE_ACTIVITIES, fractions
from asyncrl.wire.frames import Array
from asyncrl.wire.messages import GeneratorStats, GroupHeader

QUANTILES = {"p50": 0.5, "p95": 0.95}
BIAS_FRACTION = 0.2
"""Relative difference of the mean lengths below which there is no alarm."""
BIAS_ERRORS = 3.0
"""The same in standard errors."""


def exact_mean(values: Sequence[float]) -> float:
    """The mean of at least one value, which does not depend on their order: they are summed without rounding. Not
    finite if a value is not."""
    finite = list(filter(math.isfinite, values))
    if len(finite) < len(values):
        return sum(value for value in values if not math.isfinite(value))
    return math.fsum(finite) / len(finite)


def quantiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """`NAME/p50` and `NAME/p95`: the smallest value up to which at least this part of the values lies; empty without
    values."""
    ordered = sorted(values)
    return {
        f"{name}/{quantile}": ordered[math.ceil(part * len(ordered)) - 1]
        for quantile, part in QUANTILES.items()
        if ordered
    }


class RunningMoments(Durable):
    """Count, mean and variance of numbers that arrive in groups (Chan, Golub and LeVeque 1983)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations from the mean."""

    def add(self, values: Sequence[float]) -> None:
        """Adds numbers."""
        if values:
            mean = sum(values) / len(values)
            squares = sum((value - mean) ** 2 for value in values)
            both = self.merged(RunningMoments(len(values), mean, squares))
            self.count, self.mean, self.squares = both.count, both.mean, both.squares

    def merged(self, other: RunningMoments) -> RunningMoments:
        """The moments of both sets of numbers together."""
        count = self.count + other.count
        if not count:
            return RunningMoments()
        distance = other.mean - self.mean
        squares = self.squares + other.squares + distance**2 * self.count * other.count / count
        return RunningMoments(count, self.mean + distance * other.count / count, squares)

    @property
    def variance(self) -> float:
        """Sample variance; 0 for fewer than two numbers."""
        return self.squares / (self.count - 1) if self.count > 1 else 0.0


class OutcomeStats(Durable):
    """Completion tokens and rewards of the members of groups with one outcome."""

    tokens: RunningMoments = field(default_factory=RunningMoments)
    rewards: RunningMoments = field(default_factory=RunningMoments)
    """Rewards of the members that have one."""

    def add(self, header: GroupHeader, completion: Sequence[int]) -> None:
        """`completion` has the action tokens of each trajectory."""
        self.tokens.add(header.sums_of_members(completion))
        pairs = zip(header.of_members(header.rewards), header.of_members(header.errors), strict=True)
        self.rewards.add([reward for reward, error in pairs if not error])

    def summary(self) -> dict[str, float]:
        """The stats for the run's summary."""
        return {
            "trajectories": self.tokens.count,
            "tokens_mean": self.tokens.mean,
            "tokens_std": math.sqrt(self.tokens.variance),
            "reward_mean": self.rewards.mean,
            "reward_std": math.sqrt(self.rewards.variance),
            "rewards_failed": self.tokens.count - self.rewards.count,
        }


def completion_tokens(header: GroupHeader, action_mask: Array) -> list[int]:
    """Action tokens of each trajectory of a group."""
    ends = list(accumulate(header.lengths))
    return [int(np.count_nonzero(action_mask[begin:end])) for begin, end in pairwise([0, *ends])]


def tokens_by_version(versions: Array, action_mask: Array) -> dict[int, int]:
    """Action tokens of a group by the policy version that sampled them, oldest first."""
    newest = int(versions.max())
    if newest == NO_VERSION:
        return {}
    oldest = int(versions.view(np.uint32).min())  # as uint32, NO_VERSION is the largest number
    if oldest == newest:
        return {oldest: int(np.count_nonzero(action_mask))}
    counts = np.bincount(versions[action_mask] - oldest)
    return {oldest + staleness: count for staleness, count in enumerate(counts.tolist()) if count}


def bias_alarms(outcomes: dict[str, OutcomeStats]) -> list[str]:
    """Returns a warning if refunded trajectories differ in length from trained ones.

    Refunds that depend on length change what the policy learns from: if long completions are refunded more often,
    only short ones are ever reinforced, and the policy drifts to short answers with no metric of the loss showing it.
    """
    trained = outcomes.get("trained", OutcomeStats()).tokens
    refunded = RunningMoments()
    for outcome in (outcome for name, outcome in outcomes.items() if name != "trained"):
        refunded = refunded.merged(outcome.tokens)
    if min(trained.count, refunded.count) < 2 or not trained.mean:
        return []
    difference = refunded.mean - trained.mean
    error = math.sqrt(trained.variance / trained.count + refunded.variance / refunded.count)
    if abs(difference) <= max(BIAS_FRACTION * trained.mean, BIAS_ERRORS * error):
        return []
    longer = "longer" if difference > 0 else "shorter"
    reasons = ", ".join(sorted(name for name in outcomes if name != "trained"))
    return [
        f"refunded trajectories ({reasons}) are {abs(difference) / trained.mean:.0%} {longer} than trained ones: "
        f"{refunded.mean:.1f} tokens against {trained.mean:.1f} on average, so that training sees too few "
        f"{'long' if difference > 0 else 'short'} completions"
    ]


def count_rewards(outcomes: Iterable[OutcomeStats]) -> dict[str, int]:
    """The numbers of trajectories with a reward ("scored") and without one because it could not be computed ("failed"),
    and whether every reward is 0 ("all_zero")."""
    stats = list(outcomes)
    scored = sum(outcome.rewards.count for outcome in stats)
    failed = sum(outcome.tokens.count for outcome in stats) - scored
    all_zero = all(outcome.rewards.mean == 0.0 and outcome.rewards.variance == 0.0 for outcome in stats)
    return {"scored": scored, "failed": failed, "all_zero": all_zero}


SUMS = (
    "tokens", "samples", *(f"{name}_s" for name in (*GENERATOR_ACTIVITIES, *GENERATOR_PHASES, "engine_cpu")),
    "recomputed_tokens", "rewards_failed",
)  # fmt: skip
"""Fields of `GeneratorStats` that are added over the sessions of a generator."""


def _bounded(value: float) -> float:
    """The number within the bounds of a field of `GeneratorStats`: one outside could be stored, but not read again."""
    limit = MAX_NUMBER if isinstance(value, int) else MAX_TIME_S
    return max(-limit, min(value, limit))


class GeneratorState(Durable):
    """What a generator reports."""

    session: str = ""
    last_heartbeat_s: float | None = None
    """None if it is not up."""
    version: int = NO_VERSION
    stats: GeneratorStats = field(default_factory=GeneratorStats.of)
    """The latest stats, with the sums and the highest peak of the memory of all its sessions, without durations of
    swaps."""
    before: list[int | float] = field(default_factory=lambda: [0] * len(SUMS))
    """The sums at the start of the session."""
    stalls: int = 0
    stall_ms_sum: float = 0.0
    stall_ms_max: float = 0.0

    def heartbeat(self, session: str, version: int, stats: GeneratorStats, now_s: float) -> None:
        """Records the stats of an ask. A new session counts from 0 and adds to the sums of those before."""
        if session != self.session:
            self.session, self.before = session, [getattr(self.stats, name) for name in SUMS]
        self.last_heartbeat_s, self.version = now_s, version
        pairs = zip(SUMS, self.before, strict=True)
        sums = {name: _bounded(before + getattr(stats, name)) for name, before in pairs}
        peak_bytes = max(self.stats.peak_memory_bytes, stats.peak_memory_bytes)
        self.stats = replace(stats, **sums, peak_memory_bytes=peak_bytes, stall_ms=[], weights=None)
        for stall_ms in stats.stall_ms:
            self.stalls += 1
            self.stall_ms_sum += stall_ms
            self.stall_ms_max = max(self.stall_ms_max, stall_ms)

    @property
    def idle(self) -> float:
        """Fraction of the time without a running request or a live episode."""
        return fractions(self.seconds)["waiting"]

    @property
    def busy_s(self) -> float:
        """Seconds in which it had something to generate."""
        return sum(seconds for name, seconds in self.seconds.items() if name not in IDLE_ACTIVITIES)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each activity."""
        return {name: getattr(self.stats, f"{name}_s") for name in GENERATOR_ACTIVITIES}

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds of each phase of its work."""
        return {name: getattr(self.stats, f"{name}_s") for name in GENERATOR_PHASES}


class ReportedStats(Durable):
    """The reports of generators and learners, and their signs of life. It cannot be rebuilt from the events before, so
    every commit record has it. Times are seconds of the run."""

    generators: dict[int, GeneratorState] = field(default_factory=dict[int, GeneratorState])
    learners: dict[int, float | None] = field(default_factory=dict[int, float | None])
    """Time of the last request for a batch, by learner rank; None if it is not up."""
    loaded: dict[int, tuple[int, float]] = field(default_factory=dict[int, tuple[int, float]])
    """Generator -> version loaded at its last heartbeat, and the time of that heartbeat."""
    peaks_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """Highest peak of the memory of the roles that report nothing else."""
    duplicates: int = 0
    """Groups that arrived more than once."""

    def note_memory(self, role: str, peak_memory_bytes: int) -> None:
        """Counts the peak memory that a role has reported."""
        self.peaks_bytes[role] = max(self.peaks_bytes.get(role, 0), peak_memory_bytes)

    def wake(self, now_s: float | None) -> None:
        """Processes that were up count as alive at `now_s`; with None no process does."""
        for generator in self.generators.values():
            generator.last_heartbeat_s = None if generator.last_heartbeat_s is None else now_s
        self.learners = {rank: None if heard_s is None else now_s for rank, heard_s in self.learners.items()}
        loaded = {} if now_s is None else {index: (version, now_s) for index, (version, _) in self.loaded.items()}
        self.loaded = loaded


ENGINE_PHASES, LOOP_PHASES = ("engine", "requests"), ("rewards", "messages")
"""The phases of a generator's work that a bare engine has too, and those that it lacks."""


def goodput_factors(
    *, bare_tokens_per_s: float, offered_s: float, busy_s: float,
    generated: float, finished: float, finished_signal: float, trained_signal: float,
) -> dict[str, float]:  # fmt: skip
    """The goodput `trained_signal / (bare_tokens_per_s * offered_s)` as "total", and its factors.

    Seconds are those of all generators together: `offered_s` in which they could work and `busy_s` in which they did.
    The last four are action tokens: generated, of finished groups, and of groups with signal, which may be 0.
    """
    factors = {
        "engine": generated / (bare_tokens_per_s * busy_s),
        "admitted": busy_s / offered_s,
        "signal": finished_signal / finished,
        "trained": trained_signal * finished / (generated * finished_signal) if finished_signal else 0.0,
    }
    return {"total": prod(factors.values())} | factors


class GoodputSums(Durable):
    """The sums over a run that its goodput is made of. Tokens are action tokens."""

    offered_s: float = 0.0
    """Seconds in which the generators could work, up to the last step: each step's seconds times the wanted
    generators."""
    finished: int = 0
    """Tokens of groups that arrived. The next two are those of groups with signal."""
    finished_signal: int = 0
    trained_signal: int = 0

    def arrived(self, tokens: int, *, signal: bool) -> None:
        """Counts a group."""
        self.finished += tokens
        self.finished_signal += tokens if signal else 0

    def after_step(self, *, offered_s: float, trained_signal: int) -> GoodputSums:
        """The sums after another step with these seconds and tokens."""
        return replace(self, offered_s=self.offered_s + offered_s, trained_signal=self.trained_signal + trained_signal)

    def metrics(self, generators: Mapping[int, GeneratorState], *, slots: int) -> dict[str, float]:
        """`goodput/NAME` with the rate of a bare engine; empty while there is no goodput. `slots` are the sequences
        that run at once in an engine."""
        every = generators.values()
        known = {
            "bare_tokens_per_s": mean_bare_tokens_per_s(every, slots=slots),
            "offered_s": self.offered_s,
            "busy_s": sum(g.busy_s for g in every),
            "generated": sum(g.stats.tokens for g in every),
            "finished": self.finished,
        }
        if not min(known.values()) > 0:
            return {}
        signal = {"finished_signal": self.finished_signal, "trained_signal": self.trained_signal}
        table = goodput_factors(**known, **signal) | {"bare_tokens_per_s": known["bare_tokens_per_s"]}
        return {f"goodput/{name}": value for name, value in table.items()}


def mean_bare_tokens_per_s(generators: Iterable[GeneratorState], *, slots: int) -> float:
    """Mean of `bare_tokens_per_s` over the time of the generators that know their costs; 0 if none does."""
    known = [g for g in generators if len(g.stats.costs) >= 3 and g.stats.tokens and g.stats.samples]
    rates = [
        bare_tokens_per_s(
            *g.stats.costs[:3],
            slots=slots,
            mean_tokens=g.stats.tokens / g.stats.samples,
            bare_fraction=bare_fraction(g.phases_s),
        )
        for g in known
    ]
    seconds = [sum(g.seconds.values()) for g in known]
    total_s = sum(seconds)
    return sum(rate * own_s for rate, own_s in zip(rates, seconds, strict=True)) / total_s if total_s else 0.0


def bare_tokens_per_s(
    base_s: float, sequence_s: float, request_s: float, *, slots: int, mean_tokens: float, bare_fraction: float
) -> float:
    """The rate of an engine with all slots busy, from its seconds per step, per sequence in a step and per request; 0
    if they are 0. `bare_fraction` is the part of them that the engine takes, without the generator's loop."""
    step_s = (base_s + sequence_s * slots + request_s * slots / mean_tokens) * bare_fraction
    return slots / step_s if step_s > 0 else 0.0


def bare_fraction(phases: Mapping[str, float]) -> float:
    """The part of a generator's steps, with the work around them, that a bare engine has too; `phases` are the seconds
    or fractions of GENERATOR_PHASES."""
    engine, loop = (sum(phases[name] for name in names) for names in (ENGINE_PHASES, LOOP_PHASES))
    return engine / (engine + loop) if engine else 1.0
