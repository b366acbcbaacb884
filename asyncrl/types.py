"""The data that passes through the system: prompt, lease, trajectory, group, shard.

Array index is token index everywhere; arrays of one trajectory have the same length T, with prompt tokens
first and then action tokens (chosen by the policy) and environment tokens in the order the model saw them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from asyncrl.errors import InvariantError

STALENESS_BOUNDS = (0, 1, 2, 4, 8, 16)
"""Highest staleness of each bucket except the last."""
STALENESS_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9-16", "17+")
"""Names of the buckets, as in the metrics `staleness/NAME/...`."""
STALENESS_METRICS = {
    "tokens_fraction": "share of the tokens",
    "ratio_mean": "importance ratio, mean",
    "ratio_max": "importance ratio, max",
    "kl": "KL (k3, nats)",
    "ess": "effective sample size",
    "clip_positive": "clipped, advantage > 0",
    "clip_negative": "clipped, advantage < 0",
    "mask_positive": "masked, advantage > 0",
    "mask_negative": "masked, advantage < 0",
}
"""Metrics of each bucket, with their descriptions."""
GOODPUT_FACTORS = {
    "engine": "of what bare engines make in the time in which generators work",
    "admitted": "of the time, in which generators have work",
    "signal": "of the tokens, in groups with a training signal",
    "trained": "of these, trained by now",
}
"""The factors of the goodput, and what each is a fraction of, as in the metrics `goodput/NAME`."""


def goodput_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics `goodput/NAME` of a step by NAME: "total", the factors and "bare_tokens_per_s"; empty while they are
    unknown."""
    prefix = "goodput/"
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def mean_staleness(histogram: Sequence[int]) -> float:
    """The mean staleness of a histogram (tokens by staleness); 0 for an empty one."""
    return sum(staleness * tokens for staleness, tokens in enumerate(histogram)) / max(sum(histogram), 1)


Status = Literal["completed", "truncated", "failed"]
"""completed: ended by the policy; truncated: cut at the token limit; failed: no reward could be computed, so that the
member is neither trained nor part of its group's baseline (in an evaluation, of its mean reward)."""

NO_VERSION = -1
"""Version of a token that no policy sampled."""


MAX_NAME_CHARACTERS = 200
"""Maximum length of the name of a data source."""
MAX_DOCUMENT_CHARACTERS = 1 << 24
MAX_ITEMS = 1 << 16
MAX_COUNT = (1 << 31) - 1
MAX_NUMBER = 1 << 62
MAX_TIME_S = 1e12
MAX_REWARD = 1e30
"""Larger rewards do not fit float32, or their squares do not fit float64."""

_T = TypeVar("_T")
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
"""A ticket, a row, or a sum over the run."""
Time = Annotated[float, Meta(ge=-MAX_TIME_S, le=MAX_TIME_S)]
"""Seconds. NaN is refused, as by every type with bounds."""
Reward = Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)]
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]
Document = Annotated[str, Meta(max_length=MAX_DOCUMENT_CHARACTERS)]
Items = Annotated[list[_T], Meta(max_length=MAX_ITEMS)]


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of the training data, tokenized."""

    row: Number
    """Row number in the dataset, counted over its files in order."""
    tokens: NDArray[np.int32]
    ground_truth: Document
    data_source: Name
    extra_info: dict[str, Any] = {}
    chat: list[dict[str, Any]] | None = None
    """The messages that `tokens` were rendered from; None for a plain-text prompt."""
    columns: dict[str, Any] = {}
    """The row's other columns, for reward functions that ask for them by name."""
    text: Document = ""
    """The plain-text prompt as the row has it; empty for a chat."""


class PoolPosition(msgspec.Struct, forbid_unknown_fields=True):
    """The position in the shuffled rows of one file, or of all files."""

    rows: int
    """Rows of the files; the stream does not continue on a dataset of another size."""
    epoch: int = 0
    taken: int = 0
    """Rows taken in this epoch."""


class PromptPosition(msgspec.Struct, forbid_unknown_fields=True):
    """The position in the stream of prompts."""

    drawn: int = 0
    """Rows drawn so far."""
    pools: list[PoolPosition] = []
    skipped: bytes = b""
    """A compressed bitmap of the rows that were skipped because of their length."""
    filtered: bytes = b""
    """The same of the rows that `data.custom.filter` left out."""
    sampler: bytes = b""
    """The state of `data.custom.sampler` as msgpack; empty without one."""


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Permission to generate one group, granted to one generator."""

    ticket: Number
    """Order in which groups were admitted; never reused for another prompt."""
    attempt: Count
    """0 at first; increases by 1 each time the ticket is leased again."""
    prompt: Prompt
    evaluation: bool = False
    """Completions are scored and not trained on; evaluation tickets have a separate numbering."""


EpisodeEnd = Literal["done", "max_turns", "window", "environment", "timeout", "overlong", "host"]
"""Why an episode with an environment ended. "window": the next turn does not fit the engine's window. The last four are
failures: the environment raised, or returned an invalid answer; it took too long; its messages before the first turn
do not fit the window; its host died."""
EPISODE_ENDS: tuple[EpisodeEnd, ...] = ("done", "max_turns", "window")
"""The ends of an episode that has a reward."""


class EpisodeOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome of the episode of a trajectory with several turns. If the episode has several rows, the times, tries
    and lost tokens stand in its first row, and are 0 in the others."""

    ended: EpisodeEnd
    turn_rewards: Items[Reward]
    """Reward of each turn of the row, in order. The sum over the rows of an episode, and the reward of the complete
    episode, are the trajectory's reward."""
    observation_tokens: Count
    """Tokens of the environment in the row after its first action token."""
    environment_s: Time
    """Time in the environment's methods."""
    tries: Count
    """Number of failed tries before this one."""
    lost_tokens: Count
    """Action tokens of the failed tries."""
    reset_s: Time = 0.0
    """Time in which the generator waited for the first turn. This and the next two are sums over all tries."""
    wait_s: Time = 0.0
    """Time in which it waited after turns, for the next turn or the end."""
    slow_turns: Count = 0
    """Turns after which it waited longer than a tenth of a second."""


@dataclass(slots=True)
class Trajectory:
    """One completion, or one episode of several turns, with everything that training needs. An episode whose
    conversation was rewritten has several: one for each sequence of tokens, its rows."""

    tokens: NDArray[np.int32]
    """[T]"""
    action_mask: NDArray[np.bool_]
    """[T], true where the policy sampled the token. The only place that decides which tokens are trainable."""
    behavior_logprobs: NDArray[np.float32]
    """[T], nats, at the sampling temperature; 0 where action_mask is false."""
    versions: NDArray[np.int32]
    """[T], policy version that sampled the token; NO_VERSION where action_mask is false."""
    status: Status
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict[str, float])
    error: str = ""
    """Why no reward could be computed: the status is "failed", or with `replay.failed: zero` the reward is 0."""
    episode: EpisodeOutcome | None = None
    """None without an environment."""
    member: int | None = None
    """Number of the episode in its group, if it may have several rows; these are adjacent and have the same reward,
    parts, status and error. None: the only row of its member."""
    routing: NDArray[np.uint8] | None = None
    """[T, layers, chosen], the experts that each token was routed to (`asyncrl.util.model_files`), with
    `algorithm.routing_replay` only. The last token was never an input: its experts have no meaning."""

    @property
    def num_tokens(self) -> int:
        """All tokens."""
        return len(self.tokens)

    @property
    def num_action_tokens(self) -> int:
        """Tokens sampled by the policy."""
        return int(self.action_mask.sum())

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first action token."""
        actions = np.flatnonzero(self.action_mask)
        return int(actions[0]) if len(actions) else len(self.tokens)

    @property
    def oldest_version(self) -> int:
        """The smallest version among the action tokens; NO_VERSION without action tokens."""
        versions = self.versions[self.action_mask]
        return int(versions.min()) if len(versions) else NO_VERSION

    @property
    def num_turns(self) -> int:
        """Turns of the policy: runs of action tokens."""
        return int(self.action_mask[:1].sum()) + int((self.action_mask[1:] > self.action_mask[:-1]).sum())

    def check(self) -> None:
        """Raises InvariantError if the arrays are inconsistent."""
        length = len(self.tokens)
        for name in ("action_mask", "behavior_logprobs", "versions"):
            if getattr(self, name).shape != (length,):
                raise InvariantError(f"trajectory: {name} has shape {getattr(self, name).shape}, tokens ({length},)")
        if np.any((self.versions == NO_VERSION) == self.action_mask):
            raise InvariantError("trajectory: a token has a version if and only if the policy chose it")
        if not np.all(np.isfinite(self.behavior_logprobs)):
            raise InvariantError("trajectory: behavior_logprobs are not finite")
        if self.routing is not None and (self.routing.ndim != 3 or len(self.routing) != length):
            raise InvariantError(
                f"trajectory: routing has shape {self.routing.shape}, expected ({length}, layers, experts of a token)"
            )


@dataclass(slots=True)
class Group:
    """All trajectories of one lease, by its members, which are completions or episodes."""

    ticket: int
    attempt: int
    generator: int
    row: int
    data_source: str
    start_version: int
    """The version the generator had loaded when the group started."""
    end_version: int
    trajectories: list[Trajectory]
    """The rows of the members, in the order of the members."""
    started_s: float = 0.0
    """Seconds on the monotonic clock of the generator's machine, as `finished_s`."""
    finished_s: float = 0.0
    reward_s: float = 0.0
    """Seconds of these from the last token to the rewards."""
    greedy_reward: float | None = None
    """Reward of the prompt's greedy completion, for advantages that use it as their baseline."""
    greedy_tokens: int = 0
    arrays: list[NDArray[Any]] | None = field(default=None, repr=False, compare=False)
    """tokens, action_mask, behavior_logprobs and versions of all trajectories end to end, and their routing as a flat
    array if they have one, of which theirs are views; None if they lie apart."""

    @property
    def members(self) -> list[int]:
        """The member of each trajectory, counted from 0 without gaps."""
        number, before, found = -1, None, list[int]()
        for trajectory in self.trajectories:
            number += trajectory.member is None or trajectory.member != before
            before = trajectory.member
            found.append(number)
        return found

    @property
    def firsts(self) -> list[Trajectory]:
        """The first row of each member."""
        members = self.members
        pairs = zip(self.trajectories, members, [-1, *members], strict=False)
        return [row for row, member, before in pairs if member != before]

    @property
    def num_action_tokens(self) -> int:
        """Tokens sampled by the policy, of all trajectories."""
        return sum(t.num_action_tokens for t in self.trajectories)

    @property
    def num_tokens(self) -> int:
        """Tokens of the learner's forward pass: prompt and completion of every trajectory."""
        return sum(len(t.tokens) for t in self.trajectories)

    @property
    def oldest_version(self) -> int:
        """The smallest version among the action tokens; `start_version` without action tokens."""
        return min((t.oldest_version for t in self.trajectories if t.num_action_tokens), default=self.start_version)


@dataclass(slots=True)
class Shard:
    """One learner rank's part of the batch of a step: complete groups."""

    step: int
    """Number of the optimizer step, from 1; it trains policy version step - 1 into version step."""
    groups: list[Group]
