"""The messages of the other servers (critics, the reward model, stores), and the answers of every server."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from asyncrl.wire.bounds import MAX_NUMBER, Body, Count, Duration, Finite, Index, Items, Metrics, Number, Text

MAX_KEY_CHARACTERS = 512
MAX_KEYS_ASKED = 1 << 10
StoreAction = Literal["set", "get", "wait", "add", "delete"]


class Value(Body):
    """Sent by a learner rank to its critic for each step; answered by `Values`.

    Packed rows; the frames are the tokens, sequence lengths and positions to value of each row. The answer has the
    values of positions that are not the last of their sequence, then of those that are."""

    rank: Index
    step: Count
    minibatches: Items[Count]
    """Number of rows of each mini-batch."""
    names: Items[Items[tuple[Number, Number]]]
    """Ticket and number of every sequence of each row."""


class Values(Body):
    """The answer of a critic to `Value`; the values are arrays of the message."""

    step: Count


class Train(Body):
    """Sent by a learner rank to its critic with the returns of the step; answered by `Trained`."""

    rank: Index
    step: Count


class Trained(Body):
    """The answer of a critic to `Train`: its metrics of the step."""

    metrics: Metrics


class Save(Body):
    """Sent by a learner rank to its critic; answered by `Ok`."""

    rank: Index
    step: Count
    what: Literal["model", "state"]
    """The model in Hugging Face format as the run's result, or the training state for the checkpoint of the step. The
    critic knows the folders."""


class Restore(Body):
    """Sent by a learner rank to its critic before training resumes; answered by `Ok`."""

    rank: Index
    step: Count
    """Step of the checkpoint to load."""


class Leave(Body):
    """Sent by a learner rank to its critic when it ends; not answered."""

    rank: Index


class Score(Body):
    """Sent by a reward worker to the reward model for the completions of one prompt; answered by `Scores`."""

    prompt: str | list[dict[str, Any]]
    """Text or messages."""
    completions: Items[str]
    timeout_s: Duration
    """Time after which nobody waits for the answer."""
    template_options: dict[str, Any]
    """The row's template options, for messages."""


class Scores(Body):
    """The answer of the reward model to `Score`."""

    scores: Items[Finite | None]
    """The score of each completion; None with an error."""
    errors: Items[str]
    """The error of each completion; "" with a score."""


class StoreRequest(Body):
    """Sent to a store by a member of a process group; answered by `StoreReply`.

    Sets the value of a key; gets the values of keys; waits until all of them exist; adds to a counter, which starts at
    0; deletes a key."""

    number: Number
    action: StoreAction
    keys: Annotated[list[Annotated[str, Meta(max_length=MAX_KEY_CHARACTERS)]], Meta(max_length=MAX_KEYS_ASKED)]
    value: bytes
    """The value to set; otherwise empty."""
    amount: Annotated[int, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
    """The amount to add; otherwise 0."""


class StoreReply(Body):
    """The answer of a store to the `StoreRequest` of the same number."""

    number: Number
    values: list[bytes | None]
    """The value of each key, None if it is missing."""
    count: int
    """The new value of the counter, or the number of keys deleted."""
    error: Text
    """Why the request is refused; "" if it is not."""


class Ok(Body):
    """The answer to requests without an answer of their own."""

    result: dict[str, Any]
    """The requested values; empty if there are none."""


class Error(Body):
    """The answer to a bad request."""

    text: Text
