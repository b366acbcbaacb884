"""The messages between a generator and its environment hosts. Tokens are beside the body (`token_lists.py`).

    generator -> host    turns     episodes that start, what the policy said, episodes that are dropped
    host -> generator    wishes    what environments say, episodes that ended; empty as a sign of life

The host deals in text, the generator in tokens. It keeps the arrays that are trained: a host never sees log-probs and
versions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from asyncrl.types import EpisodeEnd
from asyncrl.wire.bounds import MAX_PARTS, Body, Document, Index, Items, Name, Number, Reward, Text, Time

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 200
TurnStatus = Literal["completed", "truncated"]
EpisodeStatus = Literal["completed", "truncated", "failed"]
Parts = Annotated[dict[Name, float], Meta(max_length=MAX_PARTS)]


class GroupPlace(Body):
    """Part of `EpisodeStart`: the place of an episode in its group."""

    group: Name
    member: Index
    size: Annotated[int, Meta(ge=1)]
    """Members of the group."""


class EpisodeStart(Body):
    """Part of `Turns`: an episode that starts. Its prompt's tokens are a list of the message."""

    episode: Name
    row: Number
    ground_truth: Document
    data_source: Name
    extra_info: dict[str, Any]
    chat: list[dict[str, Any]] | None
    columns: dict[str, Any]
    seed: Number
    evaluation: bool
    place: GroupPlace | None
    """None for an episode that is played alone."""


class Said(Body):
    """Part of `Turns`: the policy's turn in a branch, whose tokens are a list of the message."""

    episode: Name
    branch: Index
    status: TurnStatus


class Turns(Body):
    """Sent by a generator to a host. Its lists are the tokens of `started`, then those of `said`."""

    started: Items[EpisodeStart]
    said: Items[Said]
    dropped: Items[Name]


class SayNext(Body):
    """Part of `Wishes`: the policy's next turn is to be sampled, behind what the environment says, which is a list of
    the message.

    A branch is one sequence of tokens; an episode has several if its conversation was rewritten, and those are numbered
    from 0. A branch that is named for the first time begins with the first `keep` tokens of the branch `source`, and
    branch 0 with those of the row's prompt. Of others `keep` is their length.
    """

    episode: Name
    branch: Index
    source: Index
    keep: Number
    max_tokens: Annotated[int, Meta(ge=1)]
    stop: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]], Meta(max_length=MAX_STOPS)
    ]
    """Texts that end the turn, beside those of `generator.stop`."""


class EpisodeEnded(Body):
    """Part of `Wishes`: an episode is over."""

    episode: Name
    status: EpisodeStatus
    ended: EpisodeEnd
    reward: Reward
    parts: Parts
    turn_rewards: Items[Reward]
    """Reward of each turn, in the order in which they were asked for; none if the reward is only one of the complete
    episode."""
    unused: Items[Index]
    """Numbers of the turns, in the same order, that nobody has read. Each is the last of its branch."""
    environment_s: Time
    """Time in the environment's methods."""
    error: Text
    """Why it failed; empty otherwise."""
    scored_together: bool
    """The members of its group are scored together: without it the others have no reward."""
    group_wait_s: Time
    """Time in which it waited for the others, to be scored with them."""
    messages: bytes
    """What was said under a chat template from the policy's first turn to its last one, as JSON: for reward functions,
    and empty if there are none."""


class Wishes(Body):
    """Sent by a host to its generator, also as a sign of life."""

    says: Items[SayNext]
    ended: Items[EpisodeEnded]
    stuck: Index
    """Calls of the user's methods that did not return in time, and occupy a thread each."""
