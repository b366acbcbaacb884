"""The messages of services: environment hosts, critics, the reward model, stores, and the transfer of weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from asyncrl.types import MAX_ITEMS, MAX_NUMBER, Count, Document, EpisodeEnd, Items, Name, Number, Prompt, Reward, Time
from asyncrl.wire.messages import (
    MAX_INDEX,
    MAX_PARTS,
    AnswerBody,
    Body,
    Duration,
    Finite,
    Index,
    Metrics,
    RequestBody,
    Text,
)

MAX_TEXT_HEADER_BYTES = 1 << 26
"""Maximum size of the header of a request to the reward model, which has prompt and completions as text, and to an
environment host, which has rows of the data."""
StoreAction = Literal["set", "get", "wait", "add", "delete"]


class Values(AnswerBody):
    """The answer of a critic to `Value`; the values are arrays of the message."""

    has_arrays = True

    step: Count


class Value(RequestBody):
    """Sent by a learner rank to its critic for each step.

    Packed rows; the frames are the tokens, sequence lengths and positions to value of each row. The answer has the
    values of positions that are not the last of their sequence, then of those that are."""

    answer = Values
    has_arrays = True

    rank: Index
    step: Count
    minibatches: Items[Count]
    """Number of rows of each mini-batch."""
    names: Items[Items[tuple[Number, Number]]]
    """Ticket and number of every sequence of each row."""


class Trained(AnswerBody):
    """The answer of a critic to `Train`: its metrics of the step."""

    metrics: Metrics


class Train(RequestBody):
    """Sent by a learner rank to its critic with the returns of the step."""

    answer = Trained
    has_arrays = True

    rank: Index
    step: Count


class Save(RequestBody):
    """Sent by a learner rank to its critic."""

    rank: Index
    step: Count
    what: Literal["model", "state"]
    """The model in Hugging Face format as the run's result, or the training state for the checkpoint of the step. The
    critic knows the folders."""


class Restore(RequestBody):
    """Sent by a learner rank to its critic before training resumes."""

    rank: Index
    step: Count
    """Step of the checkpoint to load."""


class Leave(RequestBody):
    """Sent by a learner rank to its critic when it ends; not answered."""

    rank: Index


class Scores(AnswerBody):
    """The answer of the reward model to `Score`."""

    scores: Items[Finite | None]
    """The score of each completion; None with an error."""
    errors: Items[str]
    """The error of each completion; "" with a score."""


class Score(RequestBody):
    """Sent by a reward worker to the reward model for the completions of one prompt."""

    answer = Scores
    max_header_bytes = MAX_TEXT_HEADER_BYTES

    prompt: str | list[dict[str, Any]]
    """Text or messages."""
    completions: Items[str]
    timeout_s: Duration
    """Time after which nobody waits for the answer."""
    template_options: dict[str, Any]
    """The row's template options, for messages."""


class StoreReply(AnswerBody):
    """The answer of a store to the `StoreRequest` of the same number."""

    number: Number
    values: list[bytes | None]
    """The value of each key, None if it is missing."""
    count: int
    """The new value of the counter, or the number of keys deleted."""
    error: Text
    """Why the request is refused; "" if it is not."""


class StoreRequest(RequestBody):
    """Sent to a store by a member of a process group.

    Sets the value of a key; gets the values of keys; waits until all of them exist; adds to a counter, which starts at
    0; deletes a key."""

    answer = StoreReply

    number: Number
    action: StoreAction
    keys: Annotated[list[Name], Meta(min_length=1, max_length=MAX_ITEMS)]
    value: bytes
    """The value to set; otherwise empty."""
    amount: Annotated[int, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
    """The amount to add; otherwise 0."""


MAX_STOPS = 16
MAX_STOP_CHARACTERS = 200
TurnStatus = Literal["completed", "truncated"]
EpisodeStatus = Literal["completed", "truncated", "failed"]
Parts = Annotated[dict[Name, float], Meta(max_length=MAX_PARTS)]


class EpisodeStart(Body):
    """Part of `HostRequest`: an episode that starts."""

    episode: Name
    prompt: Prompt
    seed: Number = 0
    """The seed of its task."""
    evaluation: bool = False


class SampledTurn(Body):
    """Part of `HostRequest`: the policy's turn in a branch, whose tokens are a list of the message."""

    episode: Name
    branch: Index
    status: TurnStatus


class NextTurn(Body):
    """Part of `HostReply`: the policy's next turn is to be sampled, after the observation, which is a list of
    the message.

    A branch is one sequence of tokens; an episode has several if its conversation was rewritten, and those are numbered
    from 0. A branch that is named for the first time begins with the first `keep` tokens of the branch `source`, and
    branch 0 with the row's prompt. Of others `keep` is their length.
    """

    episode: Name
    branch: Index
    source: Index
    keep: Number
    max_tokens: Annotated[int, Meta(ge=1)]
    stop: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]], Meta(max_length=MAX_STOPS)
    ]
    """Texts that end the turn, in addition to `generator.stop`."""


class EpisodeEnded(Body):
    """Part of `HostReply`: an episode is over."""

    episode: Name
    status: EpisodeStatus
    ended: EpisodeEnd
    reward: Reward = 0.0
    parts: Parts = msgspec.field(default_factory=dict)
    turn_rewards: Items[Reward] = msgspec.field(default_factory=list)
    """Reward of each turn, in the order in which they were asked for; none if the reward is only one of the complete
    episode."""
    unused: Items[Index] = msgspec.field(default_factory=list)
    """Numbers of the turns, in the same order, that nobody has read. Each is the last of its branch."""
    environment_s: Time = 0.0
    """Time in the environment's methods."""
    error: Text = ""
    """Why it failed; empty otherwise."""
    messages: bytes = b""
    """The messages under a chat template from the policy's first turn to its last one, as JSON: for reward functions,
    and empty if there are none."""


class HostReply(AnswerBody):
    """Sent by a host to its generator, also as a sign of life."""

    has_arrays = True

    turns: Items[NextTurn]
    ended: Items[EpisodeEnded]
    stuck: Index
    """Calls of the user's methods that did not return in time, and occupy a thread each."""


class HostRequest(RequestBody):
    """Sent by a generator to a host. Its lists are the tokens of `turns`."""

    answer = HostReply
    has_arrays = True
    max_header_bytes = MAX_TEXT_HEADER_BYTES

    started: Items[EpisodeStart]
    turns: Items[SampledTurn]
    dropped: Items[Name]


MIN_BUCKET_BYTES = 1 << 16
"""Minimum size of a bucket, so that a model does not have millions of them."""
_Name = Annotated[str, Meta(min_length=1, max_length=200)]
_Round = Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
_Rank = Annotated[int, Meta(ge=1, le=MAX_INDEX + 1)]


class ReceiverMessage(RequestBody):
    """A message of a receiver of weights to their sender."""


class Join(ReceiverMessage):
    """Begins a session. The sender answers with `Welcome`; a later session of the rank replaces this one."""

    rank: _Rank
    device: _Name
    host: _Name


class Up(ReceiverMessage):
    """The engine runs: the sender may make offers."""


class Ready(ReceiverMessage):
    """Staging is free for the next version; sent before the offer if it is free then. The sender answers with "go"."""

    round: _Round


class Holding(ReceiverMessage):
    """The engine keeps its version for now, or more buckets have come. Extends the deadline for the next answer."""

    round: _Round


class Received(ReceiverMessage):
    """The checksum of the bytes received, or the reason why the transfer failed."""

    round: _Round
    checksum: Number
    error: Text


class Left(ReceiverMessage):
    """Ends the session."""


class Ping(ReceiverMessage):
    """Asks whether the sender lives; answered by "pong", or by "dropped" if the session has ended."""


class SenderMessage(AnswerBody):
    """A message of the sender of weights to a receiver."""


class Welcome(SenderMessage):
    """Names, shapes and dtypes of the weights, as JSON (`WeightManifest.to_json`)."""

    text: Document
    senders: Annotated[int, Meta(ge=1, le=MAX_INDEX + 1)]
    """Learner ranks, each of which sends a share of them (`weights/layout.py`)."""
    by_parameter: bool
    """True if each bucket is a part of one parameter."""


class Offer(SenderMessage):
    """Starts a round. The receiver answers with "ready", unless it has sent that before."""

    round: _Round
    version: Number
    transport: _Name
    bucket_bytes: Annotated[int, Meta(ge=MIN_BUCKET_BYTES, le=MAX_NUMBER)]
    urgent: bool
    """True if the learner waits for the round: a receiver whose engine keeps its version sends "holding" at once."""


class Go(SenderMessage):
    """The rank of the receiver among the `size` members of the link number `group` of each sender, which it connects to
    now."""

    round: _Round
    group: Number
    rank: _Rank
    size: Annotated[int, Meta(ge=2, le=MAX_INDEX + 2)]


class Patience(SenderMessage):
    """The sender waits for other receivers, or sends to them. Extends the deadline for its next message."""

    round: _Round


class Sent(SenderMessage):
    """The checksum of the bytes sent."""

    round: _Round
    checksum: Number


class Abort(SenderMessage):
    """The reason why the broadcast was aborted. The receiver answers with "received", unless it has sent that."""

    round: _Round
    reason: Text


class Dropped(SenderMessage):
    """The reason why the sender has ended the session. The receiver joins again."""

    reason: Text


class Closed(SenderMessage):
    """The sender closes."""


class Pong(SenderMessage):
    """The sender lives."""
