"""The data of a ticket: its prompt, its lease and its finished group; and the source of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import msgspec
import numpy as np

from asyncrl.errors import InvariantError, ProtocolError
from asyncrl.replay.journal.reader import Location
from asyncrl.replay.journal.records import Record
from asyncrl.replay.stats import completion_tokens, tokens_by_version
from asyncrl.types import Prompt, PromptPosition
from asyncrl.wire.frames import Array
from asyncrl.wire.messages import GroupHeader

Load = Callable[[Location], Record]
MAX_AWAITED = 64
"""Outstanding attempts of one ticket that are remembered; groups of older ones are not counted."""


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A finished group as it is sent to a learner."""

    header: GroupHeader
    arrays: list[Array]
    """A Block if they are in one frame, as they were received."""

    @classmethod
    def of_record(cls, body: Any, arrays: list[Array]) -> Self:
        """The group in a journal record. The record also holds the reason for a refund, which is dropped here. Raises
        ValidationError if it is not what the replay queue writes."""
        values = {name: value for name, value in body.items() if name != "refunded"}
        return cls(msgspec.convert(values, GroupHeader), arrays)


@dataclass(slots=True)
class TicketEntry:
    """A ticket's prompt and lease, and its group once it is finished. Times are seconds of the run."""

    prompt: Prompt
    renewed_s: float
    """When it was leased, or when its generator last renewed the lease."""
    generator: int
    attempt: int = 0
    session: str = ""
    number: int = -1
    """Number, in its session, of the ask that got the lease."""
    counted: list[int] = field(default_factory=list[int])
    """Attempts that were returned or arrived too late to be used; their tokens are in the ledger."""
    header: GroupHeader | None = None
    arrays: list[Array] = field(default_factory=list[Array])
    location: Location | None = None
    """Location of the finished group in the journal."""
    completion: list[int] = field(default_factory=list[int])
    """Action tokens of each trajectory."""
    by_version: dict[int, int] = field(default_factory=dict[int, int])
    """Action tokens by the policy version that sampled them."""
    num_bytes: int = 0
    """Size of the frames."""
    taken_s: float = 0.0

    @property
    def awaited(self) -> list[int]:
        """The latest attempts whose tokens are not in the ledger yet: their groups may still arrive."""
        known = {*self.counted, -1 if self.header is None else self.header.attempt}
        return [a for a in range(max(0, self.attempt + 1 - MAX_AWAITED), self.attempt + 1) if a not in known]

    @property
    def finished(self) -> GroupHeader:
        """Header of the finished group. Raises InvariantError if there is none."""
        if self.header is None:
            raise InvariantError("replay: a group without data counts as finished")
        return self.header

    def keep(self, group: FinishedGroup, location: Location | None) -> None:
        """Stores the finished group."""
        _, mask, _, versions = group.arrays
        self.header, self.arrays, self.location = group.header, group.arrays, location
        self.num_bytes = sum(array.nbytes for array in group.arrays)
        self.completion, self.by_version = completion_tokens(group.header, mask), tokens_by_version(versions, mask)

    def check_prompt(self, header: GroupHeader, tokens: Array) -> None:
        """Raises ProtocolError unless the group belongs to this prompt: same row, same data source, and the prompt's
        tokens at the start of every trajectory. `tokens` are those of all trajectories end to end."""
        prompt, where = self.prompt, f"ticket {header.ticket}"
        if header.row != prompt.row:
            raise ProtocolError(f"{where} is for row {prompt.row}, not {header.row}")
        if header.data_source != prompt.data_source:
            raise ProtocolError(f"{where} is for data source {prompt.data_source!r}, not {header.data_source!r}")
        expected, size, begin = np.asarray(prompt.tokens, dtype=np.int32).tobytes(), len(prompt.tokens), 0
        for number, length in enumerate(header.lengths):
            if tokens[begin : begin + min(size, length)].tobytes() != expected:
                raise ProtocolError(f"{where}: trajectory {number} does not begin with the tokens of row {prompt.row}")
            begin += length

    def state(self) -> list[Any]:
        """The state for msgpack, the prompt's row first; without the frames and the age of the lease."""
        location = None if self.location is None else list(self.location)
        asked = [self.generator, self.attempt, self.session, self.number]
        return [self.prompt.row, *asked, list(self.counted), location, self.taken_s]

    @classmethod
    def of_state(cls, values: Sequence[Any], prompt: Prompt, load: Load | None, now_s: float) -> Self:
        """Restores the values that follow the row in `state`; `load` reads the frames."""
        generator, attempt, session, number, counted, location, taken_s = values
        held = cls(prompt, now_s, generator, attempt, session, number, list(counted))
        if load is not None and location is not None:
            record = load(tuple(location))
            held.keep(FinishedGroup.of_record(record.body, record.arrays), tuple(location))
            held.taken_s = taken_s
        return held


@dataclass(slots=True)
class TakenStep:
    """The batch of the step in progress: the tickets of each learner rank."""

    number: int
    shards: list[list[int]]


class PromptSource(Protocol):
    """An endless stream of prompts that can be resumed."""

    @property
    def skipped_rows(self) -> int:
        """Rows skipped so far because they do not fit the model's context window."""
        ...

    def __next__(self) -> Prompt: ...
    def prompt(self, row: int) -> Prompt:
        """The prompt of a row, regardless of the position in the stream."""
        ...

    @property
    def position(self) -> PromptPosition:
        """The position in the stream."""
        ...

    def seek(self, position: PromptPosition) -> None:
        """Continues from a position."""
        ...
