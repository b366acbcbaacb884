"""The simulator's inputs: the workload (lengths and costs of a job) and the setup (the chosen numbers)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.observe.stats import bare_tokens_per_s

SYNTHETIC_GROUPS = 4096
"""Number of groups in a synthetic workload. The simulator draws from them."""

MAX_TOKENS = 2.0**27
"""Maximum length of a completion or prompt, since the lengths of a group and their sums are 32-bit numbers."""
Time = Annotated[float, msgspec.Meta(ge=0, le=1e9)]

ZeroVariance = Literal["refund", "train", "drop"]
"""The treatment of groups without signal by `replay.zero_variance`."""
CHOICES: tuple[ZeroVariance, ...] = ("refund", "train", "drop")

TURNS = 1.1
"""Additional factor of an engine step's time while engines share a device, beyond their number, since they evict one
another's cache lines: approximately the measured value of two engines of 32 sequences on one core."""


def slowdown(computing: int) -> float:
    """Returns the factor by which steps are slower while `computing` engines compute on one device."""
    return computing * TURNS if computing > 1 else 1.0


@dataclass(frozen=True, slots=True)
class EngineCost:
    """Costs of an engine in seconds: `base_s + sequence_s * n` for a step that decodes one token of each of n
    sequences, and `request_s` once for each sequence (its prompt and other one-time work)."""

    base_s: float
    sequence_s: float
    request_s: float = 0.0
    bare_fraction: float = 1.0
    """Part of these costs that the engine takes, without the generator's work between its steps."""

    def step_s(self, running: int) -> float:
        """Returns the seconds of a step with `running` sequences."""
        return self.base_s + self.sequence_s * running

    def bare_tokens_per_s(self, slots: int, mean_tokens: float) -> float:
        """Returns the rate of the engine alone, with all slots busy."""
        costs, fraction = (self.base_s, self.sequence_s, self.request_s), self.bare_fraction
        return bare_tokens_per_s(*costs, slots=slots, mean_tokens=mean_tokens, bare_fraction=fraction)


@dataclass(frozen=True, slots=True)
class LearnerCost:
    """Costs of an optimizer step in seconds: `base_s + token_s * tokens / learners`, where tokens include prompts.
    Before it, the learner waits `take_s` for the transfer of the batch."""

    base_s: float
    token_s: float
    take_s: float = 0.0

    def step_s(self, tokens: int, learners: int) -> float:
        """Returns the seconds of an optimizer step."""
        return self.base_s + self.token_s * tokens / learners


@dataclass(frozen=True, slots=True)
class SyncCost:
    """Costs of a weight broadcast in seconds: from the end of an optimizer step until generators can load its weights
    (`broadcast_s`), the time that the hand-over blocks the learner (`hold_s`), and the time that a swap stalls an
    engine (`swap_s`). The learner waits for the former broadcast."""

    broadcast_s: float = 0.0
    hold_s: float = 0.0
    swap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of the groups to draw from. The lengths of a group stay together, since completions of one prompt are
    similar."""

    completions: NDArray[np.int32]
    """[groups, group_size] action tokens."""
    prompts: NDArray[np.int32]
    """[groups] tokens."""
    signal: NDArray[np.bool_]
    """[groups], true for groups whose training changes the policy."""
    failed: NDArray[np.bool_]
    """[groups], true for groups that are refunded for another reason than equal rewards."""
    episodes: EpisodeLengths | None = None
    """Turns and waits of the completions with an environment; None without one."""

    @classmethod
    def log_normal(
        cls, *, mean_tokens: float, sigma: float, max_tokens: int, group_size: int, prompt_tokens: int = 0,
        refunded_fraction: float = 0.0, seed: int = 0,
    ) -> Self:  # fmt: skip
        """Returns independent log-normal lengths with this mean before truncation; `sigma` is the standard deviation of
        the logarithm, and a `refunded_fraction` of the groups has no signal."""
        dice = np.random.default_rng(seed)
        shape = SYNTHETIC_GROUPS, group_size
        drawn = dice.lognormal(np.log(mean_tokens) - sigma**2 / 2, sigma, shape)
        signal = dice.random(SYNTHETIC_GROUPS) >= refunded_fraction
        prompts = np.full(SYNTHETIC_GROUPS, prompt_tokens, dtype=np.int32)
        completions = np.clip(np.rint(drawn), 1, max_tokens).astype(np.int32)
        return cls(completions, prompts, signal, np.zeros(SYNTHETIC_GROUPS, dtype=np.bool_))

    @property
    def group_size(self) -> int:
        """Number of completions per group."""
        return self.completions.shape[1]

    def of_size(self, group_size: int, *, seed: int = 0) -> Self:
        """Returns groups of another size, with members drawn from each group."""
        if group_size == self.group_size:
            return self
        chosen = np.random.default_rng(seed).integers(self.group_size, size=(len(self.completions), group_size))
        episodes = None if self.episodes is None else self.episodes.take(chosen)
        return replace(self, completions=np.take_along_axis(self.completions, chosen, axis=1), episodes=episodes)

    def cut(self, max_tokens: int) -> Self:
        """Returns the same groups with completions, or the turns of episodes, truncated to `max_tokens`."""
        most = max_tokens if self.episodes is None else max_tokens * self.episodes.turns
        return replace(self, completions=np.minimum(self.completions, most))


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths and costs of a job. Raises ConfigError if no step could ever be trained."""

    lengths: Lengths
    engine: EngineCost
    learner: LearnerCost
    sync: SyncCost = SyncCost()
    reward_s: float = 0.0
    """Seconds from the last token of a group until it is in the replay queue."""

    def __post_init__(self) -> None:
        if self.engine.step_s(1) <= 0 or self.learner.step_s(1, 1) <= 0:
            raise ConfigError(
                f"workload: an engine step of one sequence takes {self.engine.step_s(1):g} s and an optimizer step "
                f"{self.learner.step_s(1, 1):g} s; both must take time"
            )
        if not (self.lengths.signal & ~self.lengths.failed).any():
            raise ConfigError("workload: no group has a training signal, so nothing can ever be learned")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The chosen settings of a run. Raises ConfigError for settings with which a run cannot start."""

    generators: int
    learners: int
    max_staleness: int
    groups_per_step: int
    group_size: int
    max_running_groups: int
    """Limit of one generator."""
    steps: int
    generators_per_device: int = 1
    """Generators that share one core or GPU."""
    zero_variance: ZeroVariance = "refund"
    max_episodes: int | None = None
    """Limit of the episodes that a generator plays at once; None if there is none."""

    def __post_init__(self) -> None:
        if self.zero_variance not in CHOICES:
            raise ConfigError(f"simulate: zero_variance = {self.zero_variance}, must be one of {', '.join(CHOICES)}")
        for name in (name for name in self.__slots__ if name not in ("zero_variance", "max_episodes")):
            least = 0 if name == "max_staleness" else 1
            if getattr(self, name) < least:
                raise ConfigError(f"simulate: {name} = {getattr(self, name)}, must be at least {least}")
        if self.max_episodes is not None and self.max_episodes < self.group_size:
            raise ConfigError(
                f"simulate: max_episodes = {self.max_episodes}, must be at least group_size = {self.group_size}"
            )
        if self.groups_per_step % self.learners:
            raise ConfigError(
                f"simulate: groups_per_step = {self.groups_per_step} cannot be divided among {self.learners} learners; "
                "make it a multiple"
            )


class SyntheticJob(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A job that is described by numbers."""

    mean_tokens: Annotated[float, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    """Mean length of a completion; the lengths are log-normal."""
    engine_base_ms: Time
    """Engine step: fixed time, and (`engine_sequence_us`) time of each sequence in it."""
    learner_token_us: Time
    """Optimizer step: time of each token on one learner, and (`learner_base_s`) fixed time."""
    sigma: Annotated[float, msgspec.Meta(ge=0, le=10)] = 1.0
    """Standard deviation of the logarithm of the lengths."""
    max_tokens: Annotated[float, msgspec.Meta(ge=1, le=MAX_TOKENS)] | None = None
    """Longest completion; 8 times the mean by default."""
    prompt_tokens: Annotated[float, msgspec.Meta(ge=0, le=MAX_TOKENS)] = 0.0
    refunded_fraction: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Fraction of the groups without signal."""
    episode_turns: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1
    """Turns of an episode, with a wait of `turn_wait_s` after a `turn_wait_share` of those that another follows."""
    turn_wait_s: Time = 0.0
    turn_wait_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    engine_sequence_us: Time = 0.0
    engine_request_ms: Time = 0.0
    """Time of a sequence once: its prompt."""
    learner_base_s: Time = 0.0
    broadcast_s: Time = 0.0
    """Time until generators have new weights."""
    swap_ms: Time = 0.0
    """Stall of an engine by a swap of weights."""
    reward_s: Time = 0.0
    """Time until a group has its rewards."""

    @classmethod
    def parse(cls, numbers: Sequence[str]) -> Self:
        """The job of `KEY=VALUE` texts. Raises ConfigError."""
        try:
            job = msgspec.convert(
                {key: value for key, _, value in (text.partition("=") for text in numbers)}, cls, strict=False
            )
        except (ValueError, msgspec.ValidationError) as error:
            names = ", ".join(cls.__struct_fields__)
            raise ConfigError(
                f"simulate: {error}; use --from runs/NAME, or KEY=VALUE with mean_tokens, engine_base_ms and "
                f"learner_token_us at least; the keys are {names}"
            ) from None
        if job.episode_turns == 1 and job.turn_wait_s:
            raise ConfigError("episode_turns: is missing or 1: an episode waits after the turns that another follows")
        return job

    def workload(self, group_size: int) -> Workload:
        """Returns the workload of groups of this size."""
        lengths = Lengths.log_normal(
            mean_tokens=self.mean_tokens,
            sigma=self.sigma,
            max_tokens=round(self.max_tokens or min(8 * self.mean_tokens, MAX_TOKENS)),
            group_size=group_size,
            prompt_tokens=round(self.prompt_tokens),
            refunded_fraction=self.refunded_fraction,
        )
        if self.episode_turns > 1:
            shape, wait_s, share = lengths.completions.shape, self.turn_wait_s, self.turn_wait_share
            episodes = EpisodeLengths.of_shape(shape, turns=self.episode_turns, wait_s=wait_s, wait_share=share, seed=0)
            lengths = replace(lengths, episodes=episodes)
        return Workload(
            lengths,
            EngineCost(self.engine_base_ms / 1e3, self.engine_sequence_us / 1e6, self.engine_request_ms / 1e3),
            LearnerCost(self.learner_base_s, self.learner_token_us / 1e6),
            SyncCost(self.broadcast_s, 0.0, self.swap_ms / 1e3),
            self.reward_s,
        )


class SimulatedTurn(NamedTuple):
    """A turn of the policy."""

    tokens: int
    wait_s: float
    """Seconds after it for which the episode waits, without a place in the engine."""


@dataclass(frozen=True, slots=True)
class EpisodeLengths:
    """Turns and waits of the trajectories of a workload, [groups, group_size] each."""

    turns: NDArray[np.int32]
    """At least 1."""
    wait_s: NDArray[np.float64]
    """Seconds of waiting after the turns, in all."""
    slow_turns: NDArray[np.int32]
    """Turns among which these seconds are divided; 0 if among all."""

    @classmethod
    def of_shape(cls, shape: tuple[int, int], *, turns: int, wait_s: float, wait_share: float, seed: int) -> Self:
        """Returns episodes of this many turns, with `wait_s` after a `wait_share` of those that another follows."""
        slow = np.random.default_rng(seed).binomial(turns - 1, wait_share, shape).astype(np.int32)
        return cls(np.full(shape, turns, dtype=np.int32), (slow * wait_s).astype(np.float64), slow)

    def take(self, chosen: NDArray[np.int64]) -> Self:
        """Returns groups with these members, [groups, new group size]."""
        names = ("turns", "wait_s", "slow_turns")
        return replace(self, **{name: np.take_along_axis(getattr(self, name), chosen, axis=1) for name in names})

    def without_waits(self) -> Self:
        """Returns the same turns of environments that answer at once."""
        return replace(self, wait_s=np.zeros_like(self.wait_s))

    @property
    def mean_turns(self) -> float:
        """Mean number of turns."""
        return float(self.turns.mean())

    @property
    def wait_per_turn_s(self) -> float:
        """Mean seconds of waiting after a turn."""
        return float(self.wait_s.sum() / self.turns.sum())

    @property
    def slow_fraction(self) -> float:
        """Fraction of the turns with a slow answer."""
        return float(self.slow_turns.sum() / self.turns.sum())

    @property
    def slow_wait_s(self) -> float:
        """Seconds of a slow answer: median over the episodes with one; 0 without any."""
        slow = self.slow_turns > 0
        return float(np.median(self.wait_s[slow] / self.slow_turns[slow])) if slow.any() else 0.0


def turns_of(tokens: int, turns: int, wait_s: float, slow_turns: int, dice: np.random.Generator) -> list[SimulatedTurn]:
    """Returns an episode of this many tokens, divided evenly among its turns. The waits are after `slow_turns` of the
    turns that another follows, or of all if those are too few."""
    turns = min(turns, tokens)
    each, more = divmod(tokens, turns)
    followed = range(turns - 1 if 0 < slow_turns < turns else turns)
    slow: Sequence[int] = followed
    if 0 < slow_turns < len(followed):
        slow = dice.choice(len(followed), slow_turns, replace=False).tolist()
    waits_s = dict.fromkeys(slow, wait_s / len(slow))
    return [SimulatedTurn(each + (number < more), waits_s.get(number, 0.0)) for number in range(turns)]
