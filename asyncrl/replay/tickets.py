"""What the replay queue holds of a group on its way, and where its prompts come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, cast

import numpy as np

from asyncrl.errors import InvariantError, ProtocolError
from asyncrl.replay.journal.reader import Location
from asyncrl.replay.journal.records import Record
from asyncrl.replay.stats import completion_tokens, tokens_by_version
from asyncrl.types import Prompt
from asyncrl.wire.frames import Array
from asyncrl.wire.messages import GroupMeta

Load = Callable[[Location], Record]
MAX_AWAITED = 64
"""Attempts of one ticket whose groups may still come and be counted; those before them are not known any more."""


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A finished group as it goes to a learner."""

    meta: GroupMeta
    arrays: list[Array]
    """A Block when they are as they came, in one frame."""

    @classmethod
    def of_record(cls, body: Any, arrays: list[Array]) -> Self:
        """The group of a record of the journal, which also says why it was refunded, if it was."""
        return cls(cast(GroupMeta, {name: value for name, value in body.items() if name != "refunded"}), arrays)


@dataclass(slots=True)
class TicketEntry:
    """A ticket's data while it is leased, and its frames once it is finished. Times are the run's."""

    prompt: Prompt
    renewed_s: float
    """When it was leased, or its generator last said that it works on it."""
    generator: int
    attempt: int = 0
    session: str = ""
    number: int = -1
    """Of the ask that got the lease, in its session."""
    counted: list[int] = field(default_factory=list[int])
    """Attempts that were given back or came too late to be used; their tokens are in the ledger."""
    meta: GroupMeta | None = None
    arrays: list[Array] = field(default_factory=list[Array])
    location: Location | None = None
    """Of the finished group in the journal."""
    completion: list[int] = field(default_factory=list[int])
    """Action tokens of each trajectory."""
    by_version: dict[int, int] = field(default_factory=dict[int, int])
    """Action tokens by the policy version that sampled them."""
    num_bytes: int = 0
    """Of the frames."""
    taken_s: float = 0.0

    @property
    def awaited(self) -> list[int]:
        """The latest attempts of which the ledger has no tokens yet: their groups may still come."""
        known = {*self.counted, -1 if self.meta is None else self.meta["attempt"]}
        return [a for a in range(max(0, self.attempt + 1 - MAX_AWAITED), self.attempt + 1) if a not in known]

    @property
    def finished(self) -> GroupMeta:
        if self.meta is None:
            raise InvariantError("replay: a group without data counts as finished")
        return self.meta

    def keep(self, group: FinishedGroup, location: Location | None) -> None:
        """Takes the finished group in."""
        _, mask, _, versions = group.arrays
        self.meta, self.arrays, self.location = group.meta, group.arrays, location
        self.num_bytes = sum(array.nbytes for array in group.arrays)
        self.completion, self.by_version = completion_tokens(group.meta, mask), tokens_by_version(versions, mask)

    def check_prompt(self, meta: GroupMeta, tokens: Array) -> None:
        """Raises ProtocolError unless the group is of this prompt: its row, its data source, and its tokens at the
        start of every trajectory. `tokens` are those of all trajectories, of the lengths in `meta`."""
        prompt, where = self.prompt, f"ticket {meta['ticket']}"
        if meta["row"] != prompt.row:
            raise ProtocolError(f"{where} is for row {prompt.row}, not {meta['row']}")
        if meta["data_source"] != prompt.data_source:
            raise ProtocolError(f"{where} is for data source {prompt.data_source!r}, not {meta['data_source']!r}")
        expected, size, begin = np.asarray(prompt.tokens, dtype=np.int32).tobytes(), len(prompt.tokens), 0
        for number, length in enumerate(meta["lengths"]):
            if tokens[begin : begin + min(size, length)].tobytes() != expected:
                raise ProtocolError(f"{where}: trajectory {number} does not begin with the tokens of row {prompt.row}")
            begin += length

    def state(self) -> list[Any]:
        """Row of the prompt first; without the frames and the age of the lease."""
        location = None if self.location is None else list(self.location)
        asked = [self.generator, self.attempt, self.session, self.number]
        return [self.prompt.row, *asked, list(self.counted), location, self.taken_s]

    @classmethod
    def of_state(cls, values: Sequence[Any], prompt: Prompt, load: Load | None, now_s: float) -> Self:
        """From what `state` gives after the row; the frames are those that `load` has."""
        generator, attempt, session, number, counted, location, taken_s = values
        held = cls(prompt, now_s, generator, attempt, session, number, list(counted))
        if load is not None and location is not None:
            record = load(tuple(location))
            held.keep(FinishedGroup.of_record(record.body, record.arrays), tuple(location))
            held.taken_s = taken_s
        return held


@dataclass(slots=True)
class TakenStep:
    """The batch of the step in progress: tickets of each learner rank."""

    number: int
    shards: list[list[int]]


class PromptSource(Protocol):
    """An endless stream of prompts that can be resumed."""

    @property
    def skipped_rows(self) -> int:
        """Rows left out so far because they do not fit the model's window."""
        ...

    def __next__(self) -> Prompt: ...
    def prompt(self, row: int) -> Prompt:
        """The prompt of a row, whatever the place in the stream."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
