"""The messages of the replay queue and of critics: every kind, with the schema of its body.

Unknown and missing keys are refused, and every number, text and list has bounds: a valid message fits the columns and
arrays that it is written to. Each body says who sends it and which kind of message answers it (`ANSWERS`); "error"
(TextBody) may answer any request.
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
    """Part of "ask": the `GeneratorStats` of the sender."""

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
    """Identifies a lease in other messages."""

    ticket: Number
    attempt: Count
    evaluation: bool


@_CLOSED
class AskBody(TypedDict):
    """ "ask", sent by a generator for more leases, and to renew those it has; answered by "leases"."""

    generator: Index
    session: Name
    """Name of this start of the generator."""
    number: Number
    """Number of the ask in its session, increasing; an ask that is sent again has the same number."""
    version: Version
    """Policy version loaded; NO_VERSION before the first one."""
    num_groups: Count
    num_evaluations: Count
    stats: StatsBody
    working_on: Items[LeaseName]
    """Leases to renew: the generator is working on them."""


@_CLOSED
class LeaseMeta(TypedDict):
    """Part of "leases": a lease without its prompt tokens, which are an array of the message."""

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
    """ "leases", the answer of the queue to "ask"; `LeaseReply` documents the fields."""

    leases: Items[LeaseMeta]
    done: bool
    leave: bool
    """The generator is not needed any more: it finishes its leases and exits."""
    reason: Text
    evaluations_left: bool
    progress: Number
    """Changes whenever a learner begins, takes or commits."""
    pause_s: Time
    """Minimum pause before the next ask of a generator that got fewer leases than it asked for, unless it loads another
    version first."""


@_CLOSED
class GroupMeta(TypedDict):
    """ "finish", sent by a generator for each finished group; answered by "finished". Also part of "shard".

    A group without its arrays, which are the tokens, action_mask, behavior_logprobs and versions of all trajectories
    end to end."""

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
    """ "evaluated", sent by a generator for each evaluation prompt it has completed; answered by "finished"."""

    ticket: Number
    attempt: Count
    version: Version
    """The policy version that sampled every token."""
    data_source: Name
    rewards: Items[Reward]
    """Reward of each completion; 0 where its status is failed."""
    status: Items[Status]
    tokens: Count
    """Tokens of all completions."""


@_CLOSED
class ReleasedLease(TypedDict):
    """Part of "release": a lease, and the action tokens generated for it so far."""

    ticket: Number
    attempt: Count
    tokens: Count


@_CLOSED
class ReleasedEvaluation(TypedDict):
    """Part of "release": a lease of an evaluation prompt."""

    ticket: Number
    attempt: Count


@_CLOSED
class ReleaseBody(TypedDict):
    """ "release", sent by a generator for leases it will not finish; answered by "ok"."""

    generator: Index
    leases: Items[ReleasedLease]
    evaluations: Items[ReleasedEvaluation]


@_CLOSED
class TakeBody(TypedDict):
    """ "take", sent by each learner rank for its part of a step's batch; answered by "shard". Also "train", sent by a
    learner rank to its critic with the returns of the step; answered by "trained"."""

    rank: Index
    step: Count


@_CLOSED
class ShardBody(TypedDict):
    """ "shard", the answer of the queue to "take". "wait": the batch is not complete, ask again; "stop": there are no
    more batches."""

    step: Count
    outcome: Literal["shard", "wait", "stop"]
    groups: Items[GroupMeta]


@_CLOSED
class BeginBody(TypedDict):
    """ "begin", sent by each learner rank when it starts; answered by "begun"."""

    rank: Index
    step: Count
    """Step of the checkpoint that the rank starts from; 0 without one."""


@_CLOSED
class BegunBody(TypedDict):
    """ "begun", the answer of the queue to "begin"."""

    steps: Count
    """Committed steps: up to this one the rank takes the same batches again."""


@_CLOSED
class CommitBody(TypedDict):
    """ "commit", sent by learner rank 0 after each optimizer step; answered by "committed"."""

    step: Count
    metrics: Metrics
    saving: bool
    """A checkpoint of this step follows: the answer contains the queue's state."""
    checkpoints: Items[Count]
    """Steps of the complete checkpoints that exist."""


@_CLOSED
class CommittedBody(TypedDict):
    """ "committed", the answer of the queue to "commit"."""

    metrics: Metrics
    """The queue's own metrics of the step; the same when it is committed again."""
    state: bytes
    """The queue's part of a checkpoint of this step; empty unless asked for."""
    checkpoint_wanted: bool
    """The journal approaches its size limit: a checkpoint would allow segments to be dropped."""


@_CLOSED
class LostBody(TypedDict):
    """ "lost", sent by the launcher when the process of a generator has ended; answered by "ok"."""

    generator: Index


@_CLOSED
class ScaleBody(TypedDict):
    """ "scale", sent by `asyncrl scale` to set the number of generators; answered by "ok"."""

    generators: Index


@_CLOSED
class MetricsBody(TypedDict):
    """ "trained", the answer of a critic to "train": its metrics of the step."""

    metrics: Metrics


@_CLOSED
class NextEvaluationBody(TypedDict):
    """ "next_evaluation", sent by learner rank 0 after its last commit; answered by "evaluation"."""

    after: Count
    """Number of evaluations that the sender has received in this way."""


@_CLOSED
class EvaluationBody(TypedDict):
    """ "evaluation", the answer of the queue to "next_evaluation". "ended": a result; "wait": evaluations are running,
    ask again; "none": there are no more."""

    outcome: Literal["ended", "wait", "none"]
    step: Count
    metrics: Metrics


@_CLOSED
class FinishedBody(TypedDict):
    """ "finished", the answer of the queue to "finish" and "evaluated": groups and evaluated prompts of one generator
    that need not be sent again."""

    kept: Items[LeaseName]


@_CLOSED
class ValueBody(TypedDict):
    """ "value", sent by a learner rank to its critic for each step; answered by "values".

    Packed rows; the frames are the tokens, sequence lengths and positions to value of each row. The answer has the
    values of positions that are not the last of their sequence, then of those that are."""

    rank: Index
    step: Count
    minibatches: Items[Count]
    """Number of rows of each mini-batch."""
    names: Items[Items[Annotated[list[Number], Field(min_length=2, max_length=2)]]]
    """Ticket and number of every sequence of each row."""


@_CLOSED
class StepBody(TypedDict):
    """ "values", the answer of a critic to "value"; the values are arrays of the message."""

    step: Count


@_CLOSED
class SaveBody(TypedDict):
    """ "save", sent by a learner rank to its critic; answered by "ok"."""

    rank: Index
    step: Count
    what: Literal["model", "state"]
    """The model in Hugging Face format as the run's result, or the training state for the checkpoint of the step. The
    critic knows the folders."""


@_CLOSED
class RestoreBody(TypedDict):
    """ "restore", sent by a learner rank to its critic before training resumes; answered by "ok"."""

    rank: Index
    step: Count
    """Step of the checkpoint to load."""


@_CLOSED
class LeaveBody(TypedDict):
    """ "leave", sent by a learner rank to its critic when it ends; not answered."""

    rank: Index


@_CLOSED
class TextBody(TypedDict):
    """ "stop", sent by the launcher with its reason; answered by "ok". Also "error", the answer to a bad request."""

    text: Text


@_CLOSED
class EmptyBody(TypedDict):
    """ "status", "summary" and "shutdown", sent by the launcher; answered by "ok", with the result as its body."""


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
"""Every kind of message, with the schema of its body."""

WITH_ARRAYS = frozenset({"leases", "finish", "shard", "value", "values", "train"})
"""Kinds that may carry arrays."""

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
"""Kinds that are sent to a listening socket."""
