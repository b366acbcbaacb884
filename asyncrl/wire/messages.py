"""The messages of the replay queue and of critics: every kind, with the schema of its body.

Unknown and missing keys are refused, and every number, text and list has bounds: what the schema lets through fits
the columns and arrays that it is written to.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from asyncrl.types import Status
from asyncrl.wire.bounds import (
    MAX_PARTS,
    Count,
    Document,
    Index,
    Items,
    Metrics,
    Name,
    Number,
    Reward,
    Text,
    Time,
    Version,
)

_CLOSED = with_config(ConfigDict(extra="forbid", strict=True))


@_CLOSED
class StatsBody(TypedDict):
    tokens: Number
    waiting_s: Time
    working_s: Time
    syncing_s: Time
    writing_s: Time
    stall_ms: Items[Time]
    rewards_failed: Count
    costs: Annotated[list[Time], Field(max_length=4)]


@_CLOSED
class LeaseName(TypedDict):
    ticket: Number
    attempt: Count
    evaluation: bool


@_CLOSED
class AskBody(TypedDict):
    generator: Index
    session: Name
    """Name of this start of the generator."""
    number: Number
    """Of the ask in its session, increasing; an ask that is sent again has the same."""
    version: Version
    """Policy version loaded; NO_VERSION before the first."""
    num_groups: Count
    num_evaluations: Count
    stats: StatsBody
    working_on: Items[LeaseName]
    """Leases that the generator works on: they are renewed."""


@_CLOSED
class LeaseMeta(TypedDict):
    ticket: Number
    attempt: Count
    row: Number
    ground_truth: Document
    data_source: Name
    extra_info: dict[str, Any]
    chat: list[dict[str, Any]] | None
    columns: dict[str, Any]
    evaluation: bool


@_CLOSED
class LeasesBody(TypedDict):
    leases: Items[LeaseMeta]
    done: bool
    leave: bool
    """The generator is not wanted any more: it finishes what it has and ends."""
    reason: Text
    evaluations_left: bool
    progress: Number
    """Changes whenever a learner begins, takes or commits."""
    pause_s: Time
    """Who got fewer leases than it asked for should not ask again before, unless it has loaded another version."""


@_CLOSED
class GroupMeta(TypedDict):
    """A group without its arrays; its frames are tokens, action_mask, behavior_logprobs and versions of all
    trajectories end to end."""

    ticket: Number
    attempt: Count
    generator: Index
    row: Number
    data_source: Name
    start_version: Version
    end_version: Version
    started_s: Time
    finished_s: Time
    greedy_reward: Reward | None
    greedy_tokens: Count
    lengths: Items[Count]
    rewards: Items[float]
    parts: Items[Annotated[dict[Name, float], Field(max_length=MAX_PARTS)]]
    status: Items[Status]
    errors: Items[Text]


@_CLOSED
class EvaluatedBody(TypedDict):
    """One evaluation prompt, completed and scored."""

    ticket: Number
    attempt: Count
    version: Version
    """The policy version that sampled every token."""
    data_source: Name
    rewards: Items[Reward]
    """Of each completion; 0 where its status is failed."""
    status: Items[Status]
    tokens: Count
    """Of all completions."""


@_CLOSED
class ReleasedLease(TypedDict):
    ticket: Number
    attempt: Count
    tokens: Count


@_CLOSED
class ReleasedEvaluation(TypedDict):
    ticket: Number
    attempt: Count


@_CLOSED
class ReleaseBody(TypedDict):
    generator: Index
    leases: Items[ReleasedLease]
    evaluations: Items[ReleasedEvaluation]


@_CLOSED
class TakeBody(TypedDict):
    rank: Index
    step: Count


@_CLOSED
class ShardBody(TypedDict):
    step: Count
    outcome: Literal["shard", "wait", "stop"]
    groups: Items[GroupMeta]


@_CLOSED
class BeginBody(TypedDict):
    rank: Index
    step: Count
    """Of the checkpoint that the rank starts from; 0 without one."""


@_CLOSED
class BegunBody(TypedDict):
    steps: Count
    """Committed so far: steps up to this are taken again as they were."""


@_CLOSED
class CommitBody(TypedDict):
    step: Count
    metrics: Metrics
    saving: bool
    """A checkpoint of this step follows; the answer has the queue's state."""
    checkpoints: Items[Count]
    """Steps of the checkpoints that are whole and kept."""


@_CLOSED
class CommittedBody(TypedDict):
    metrics: Metrics
    """Of the replay side; the same when a step is committed again."""
    state: bytes
    """What the queue needs to go on from this step; empty unless asked for."""
    checkpoint_wanted: bool
    """The journal grows towards its ceiling."""


@_CLOSED
class LostBody(TypedDict):
    generator: Index


@_CLOSED
class ScaleBody(TypedDict):
    generators: Index


@_CLOSED
class MetricsBody(TypedDict):
    metrics: Metrics


@_CLOSED
class NextEvaluationBody(TypedDict):
    after: Count
    """Evaluations that the sender has had so."""


@_CLOSED
class EvaluationBody(TypedDict):
    outcome: Literal["ended", "wait", "none"]
    step: Count
    metrics: Metrics


@_CLOSED
class FinishedBody(TypedDict):
    """Groups and evaluated prompts of one generator that need not be sent again."""

    kept: Items[LeaseName]


@_CLOSED
class ValueBody(TypedDict):
    """Packed rows to be valued; the frames are tokens, sequence lengths and valued positions of each. The answer has
    the values of positions that are not the last of their sequence, then of those that are."""

    rank: Index
    step: Count
    minibatches: Items[Count]
    """Rows of each mini-batch."""
    names: Items[Items[Annotated[list[Number], Field(min_length=2, max_length=2)]]]
    """Ticket and number of every sequence of each row."""


@_CLOSED
class StepBody(TypedDict):
    step: Count


@_CLOSED
class SaveBody(TypedDict):
    rank: Index
    step: Count
    what: Literal["model", "state"]
    """The model in Hugging Face format as the run's result, or what training needs to continue in the checkpoint of
    the step. The critic knows the folders."""


@_CLOSED
class RestoreBody(TypedDict):
    rank: Index
    step: Count
    """Of the checkpoint."""


@_CLOSED
class LeaveBody(TypedDict):
    rank: Index


@_CLOSED
class TextBody(TypedDict):
    text: Text


@_CLOSED
class EmptyBody(TypedDict):
    pass


BODIES: dict[str, TypeAdapter[Any]] = {
    "ask": TypeAdapter(AskBody),
    "leases": TypeAdapter(LeasesBody),
    "finish": TypeAdapter(GroupMeta),
    "finished": TypeAdapter(FinishedBody),
    "evaluated": TypeAdapter(EvaluatedBody),
    "release": TypeAdapter(ReleaseBody),
    "take": TypeAdapter(TakeBody),
    "shard": TypeAdapter(ShardBody),
    "begin": TypeAdapter(BeginBody),
    "begun": TypeAdapter(BegunBody),
    "commit": TypeAdapter(CommitBody),
    "committed": TypeAdapter(CommittedBody),
    "value": TypeAdapter(ValueBody),
    "values": TypeAdapter(StepBody),
    "train": TypeAdapter(TakeBody),
    "trained": TypeAdapter(MetricsBody),
    "save": TypeAdapter(SaveBody),
    "restore": TypeAdapter(RestoreBody),
    "leave": TypeAdapter(LeaveBody),
    "next_evaluation": TypeAdapter(NextEvaluationBody),
    "evaluation": TypeAdapter(EvaluationBody),
    "lost": TypeAdapter(LostBody),
    "scale": TypeAdapter(ScaleBody),
    "status": TypeAdapter(EmptyBody),
    "summary": TypeAdapter(EmptyBody),
    "shutdown": TypeAdapter(EmptyBody),
    "stop": TypeAdapter(TextBody),
    "ok": TypeAdapter(dict[str, Any]),
    "error": TypeAdapter(TextBody),
}
"""Every kind of message there is, with the schema of its body."""

WITH_ARRAYS = frozenset({"leases", "finish", "shard", "value", "values", "train"})
"""Kinds that may have frames of arrays."""

ANSWERS: dict[str, str] = {
    "ask": "leases",
    "finish": "finished",
    "evaluated": "finished",
    "release": "ok",
    "begin": "begun",
    "take": "shard",
    "commit": "committed",
    "next_evaluation": "evaluation",
    "value": "values",
    "train": "trained",
    "save": "ok",
    "restore": "ok",
    "lost": "ok",
    "scale": "ok",
    "status": "ok",
    "summary": "ok",
    "stop": "ok",
    "shutdown": "ok",
}
"""The kind of the answer to each request."""

REQUESTS = frozenset(BODIES) - frozenset(ANSWERS.values()) - {"error"}
"""Kinds that are sent to a socket that listens."""
