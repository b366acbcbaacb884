"""The messages of learner ranks to the replay queue, and their answers.

Each body says who sends it and how it is answered; `kinds` has the tables.
"""

from __future__ import annotations

from typing import Literal

from asyncrl.wire.bounds import Body, Count, Index, Items, Metrics
from asyncrl.wire.messages import GroupHeader

TakeOutcome = Literal["shard", "wait", "stop"]
EvaluationOutcome = Literal["ended", "wait", "none"]


class Begin(Body):
    """Sent by each learner rank when it starts; answered by `Begun`."""

    rank: Index
    epoch: Count
    """As in the run's endpoints. From now on, messages of lower epochs are refused."""
    step: Count
    """Step of the checkpoint that the rank starts from; 0 without one."""


class Begun(Body):
    """The answer of the queue to `Begin`."""

    steps: Count
    """Committed steps: up to this one the rank takes the same batches again."""


class Take(Body):
    """Sent by each learner rank for its part of a step's batch; answered by `ShardHeader`."""

    rank: Index
    epoch: Count
    step: Count


class ShardHeader(Body):
    """The answer of the queue to `Take`. "wait": the batch is not complete, ask again; "stop": there are no more
    batches."""

    step: Count
    outcome: TakeOutcome
    groups: Items[GroupHeader]


class Commit(Body):
    """Sent by learner rank 0 after each optimizer step; answered by `Committed`."""

    epoch: Count
    step: Count
    metrics: Metrics
    saving: bool
    """A checkpoint of this step follows: the answer contains the queue's state."""
    checkpoints: Items[Count]
    """Steps of the complete checkpoints that exist."""


class Committed(Body):
    """The answer of the queue to `Commit`."""

    metrics: Metrics
    """The queue's own metrics of the step; the same when it is committed again."""
    state: bytes
    """The queue's part of a checkpoint of this step; empty unless asked for."""
    checkpoint_wanted: bool
    """The journal approaches its size limit: a checkpoint would allow segments to be dropped."""
    stopping: bool
    """The run is to end with this step, even if the batch of the next one is taken already."""
    batches: Count
    """Batches that are not trained yet; 0 unless the next one is complete."""
    collapsed: bool
    """The run ends by `learner.on_collapse`: a checkpoint of this step would be of no use."""


class NextEvaluation(Body):
    """Sent by learner rank 0 after its last commit; answered by `EvaluationResult`."""

    epoch: Count
    after: Count
    """Number of evaluations that the sender has received in this way."""


class EvaluationResult(Body):
    """The answer of the queue to `NextEvaluation`. "ended": a result; "wait": evaluations are running, ask again;
    "none": there are no more."""

    outcome: EvaluationOutcome
    step: Count
    metrics: Metrics
