"""The messages of the replay queue and of critics: every kind, with the schema of its body.

Unknown and missing keys are refused.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict

from asyncrl.types import Status

_CLOSED = with_config(ConfigDict(extra="forbid", strict=True))


@_CLOSED
class StatsBody(TypedDict):
    tokens: int
    idle_s: float
    busy_s: float
    stall_ms: list[float]
    rewards_failed: int


@_CLOSED
class AskBody(TypedDict):
    generator: int
    version: int
    num_groups: int
    num_evaluations: int
    stats: StatsBody


@_CLOSED
class LeaseMeta(TypedDict):
    ticket: int
    attempt: int
    row: int
    ground_truth: str
    data_source: str
    extra_info: dict[str, Any]
    chat: list[dict[str, Any]] | None
    columns: dict[str, Any]
    evaluation: bool


@_CLOSED
class LeasesBody(TypedDict):
    leases: list[LeaseMeta]
    done: bool
    reason: str
    evaluations_left: bool


@_CLOSED
class GroupMeta(TypedDict):
    """A group without its arrays; its frames are tokens, action_mask, behavior_logprobs and versions of all
    trajectories end to end."""

    ticket: int
    attempt: int
    generator: int
    row: int
    data_source: str
    start_version: int
    end_version: int
    started_s: float
    finished_s: float
    greedy_reward: float | None
    greedy_tokens: int
    lengths: list[int]
    rewards: list[float]
    parts: list[dict[str, float]]
    status: list[Status]
    errors: list[str]


@_CLOSED
class EvaluatedBody(TypedDict):
    """One evaluation prompt, completed and scored."""

    ticket: int
    attempt: int
    version: int
    """The policy version that sampled every token."""
    data_source: str
    rewards: list[float]
    """Of each completion; 0 where its status is failed."""
    status: list[Status]
    tokens: int
    """Of all completions."""


@_CLOSED
class ReleasedLease(TypedDict):
    ticket: int
    attempt: int
    tokens: int


@_CLOSED
class ReleasedEvaluation(TypedDict):
    ticket: int
    attempt: int


@_CLOSED
class ReleaseBody(TypedDict):
    generator: int
    leases: list[ReleasedLease]
    evaluations: list[ReleasedEvaluation]


@_CLOSED
class TakeBody(TypedDict):
    rank: int
    step: int


@_CLOSED
class ShardBody(TypedDict):
    step: int
    outcome: Literal["shard", "wait", "stop"]
    groups: list[GroupMeta]


@_CLOSED
class CommitBody(TypedDict):
    step: int
    metrics: dict[str, float]


@_CLOSED
class MetricsBody(TypedDict):
    metrics: dict[str, float]


@_CLOSED
class EvaluationBody(TypedDict):
    outcome: Literal["ended", "wait", "none"]
    step: int
    metrics: dict[str, float]


@_CLOSED
class AckBody(TypedDict):
    ticket: int
    attempt: int
    evaluation: bool


@_CLOSED
class ValueBody(TypedDict):
    """Packed rows to be valued; the frames are tokens, sequence lengths and valued positions of each."""

    rank: int
    step: int
    minibatches: list[int]
    """Rows of each mini-batch."""
    names: list[list[list[int]]]
    """Ticket and number of every sequence of each row."""


@_CLOSED
class StepBody(TypedDict):
    step: int


@_CLOSED
class SaveBody(TypedDict):
    rank: int
    folder: str


@_CLOSED
class LeaveBody(TypedDict):
    rank: int


@_CLOSED
class TextBody(TypedDict):
    text: str


@_CLOSED
class EmptyBody(TypedDict):
    pass


BODIES: dict[str, TypeAdapter[Any]] = {
    "ask": TypeAdapter(AskBody),
    "leases": TypeAdapter(LeasesBody),
    "finish": TypeAdapter(GroupMeta),
    "finished": TypeAdapter(AckBody),
    "evaluated": TypeAdapter(EvaluatedBody),
    "release": TypeAdapter(ReleaseBody),
    "take": TypeAdapter(TakeBody),
    "shard": TypeAdapter(ShardBody),
    "commit": TypeAdapter(CommitBody),
    "committed": TypeAdapter(MetricsBody),
    "value": TypeAdapter(ValueBody),
    "values": TypeAdapter(StepBody),
    "train": TypeAdapter(TakeBody),
    "trained": TypeAdapter(MetricsBody),
    "save": TypeAdapter(SaveBody),
    "leave": TypeAdapter(LeaveBody),
    "next_evaluation": TypeAdapter(EmptyBody),
    "evaluation": TypeAdapter(EvaluationBody),
    "status": TypeAdapter(EmptyBody),
    "summary": TypeAdapter(EmptyBody),
    "shutdown": TypeAdapter(EmptyBody),
    "stop": TypeAdapter(TextBody),
    "ok": TypeAdapter(dict[str, Any]),
    "error": TypeAdapter(TextBody),
}
"""Every kind of message there is, with the schema of its body."""
