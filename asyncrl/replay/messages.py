"""The messages of the replay queue: every kind, with the schema of its body. Unknown and missing keys are refused."""

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
    stats: StatsBody


@_CLOSED
class LeaseMeta(TypedDict):
    ticket: int
    attempt: int
    row: int
    ground_truth: str
    data_source: str
    extra_info: dict[str, Any]


@_CLOSED
class LeasesBody(TypedDict):
    leases: list[LeaseMeta]
    done: bool
    reason: str


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
    lengths: list[int]
    rewards: list[float]
    parts: list[dict[str, float]]
    status: list[Status]
    errors: list[str]


@_CLOSED
class ReleasedLease(TypedDict):
    ticket: int
    attempt: int
    tokens: int


@_CLOSED
class ReleaseBody(TypedDict):
    generator: int
    leases: list[ReleasedLease]


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
class AckBody(TypedDict):
    ticket: int
    attempt: int


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
    "release": TypeAdapter(ReleaseBody),
    "take": TypeAdapter(TakeBody),
    "shard": TypeAdapter(ShardBody),
    "commit": TypeAdapter(CommitBody),
    "committed": TypeAdapter(MetricsBody),
    "status": TypeAdapter(EmptyBody),
    "summary": TypeAdapter(EmptyBody),
    "shutdown": TypeAdapter(EmptyBody),
    "stop": TypeAdapter(TextBody),
    "ok": TypeAdapter(dict[str, Any]),
    "error": TypeAdapter(TextBody),
}
"""Every kind of message there is, with the schema of its body."""
