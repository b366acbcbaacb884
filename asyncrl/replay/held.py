"""What the replay queue holds of a group on its way, and where its prompts come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from asyncrl.errors import InvariantError
from asyncrl.replay.messages import GroupMeta
from asyncrl.replay.wire import Array
from asyncrl.types import Prompt


@dataclass(slots=True)
class Held:
    """A ticket's data while it is leased, and its frames once it is finished."""

    prompt: Prompt
    leased_s: float
    generator: int
    attempt: int = 0
    meta: GroupMeta | None = None
    arrays: list[Array] = field(default_factory=list[Array])
    taken_s: float = 0.0

    @property
    def finished(self) -> GroupMeta:
        if self.meta is None:
            raise InvariantError("replay: a group without data counts as finished")
        return self.meta

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@dataclass(slots=True)
class Step:
    """The batch of the step in progress: tickets of each learner rank."""

    number: int
    shards: list[list[int]]


class PromptSource(Protocol):
    """An endless stream of prompts."""

    @property
    def skipped_rows(self) -> int:
        """Rows left out so far because they do not fit the model's window."""
        ...

    def __next__(self) -> Prompt: ...
