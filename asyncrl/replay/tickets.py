"""The data of a ticket: its prompt, its lease and its finished group; and the source of prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import msgspec
import numpy as np
from msgspec import field

from asyncrl.errors import InvariantError, ProtocolError
from asyncrl.observe.stats import completion_tokens, tokens_by_version
from asyncrl.replay.codec import header_bytes, prompt_bytes
from asyncrl.replay.journal.reader import Location
from asyncrl.replay.journal.records import Record
from asyncrl.replay.prompts.selection import RowChoice
from asyncrl.types import Prompt, PromptPosition, RowPlace
from asyncrl.util.durable import Durable
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
    signal: bool = True
    """As in `asyncrl.replay.refunds.has_signal`."""

    @classmethod
    def of_record(cls, body: Any, arrays: list[Array]) -> Self:
        """The group in a journal record. The record also holds the reason for a refund, which is left out here. Raises
        ValidationError if it is not what the replay queue writes."""
        values = {name: value for name, value in body.items() if name not in ("refunded", "signal")}
        return cls(msgspec.convert(values, GroupHeader), arrays, msgspec.convert(body.get("signal"), bool))


class HeldTicket(Durable):
    """A ticket's lease, and where its group is. Times are seconds of the run."""

    row: int
    """The row of its prompt."""
    holders: list[int]
    """The generator of each attempt so far."""
    choice: RowChoice
    """How the row was chosen."""
    session: str = ""
    number: int = -1
    """Number, in its session, of the ask that got the lease."""
    counted: list[int] = field(default_factory=list[int])
    """Attempts that were returned or arrived too late to be used; their tokens are in the ledger."""
    location: Location | None = None
    """Location of the finished group in the journal."""
    taken_s: float = 0.0

    @property
    def generator(self) -> int:
        """The generator of the last attempt."""
        return self.holders[-1]

    @property
    def attempt(self) -> int:
        """The last attempt."""
        return len(self.holders) - 1


class TicketEntry(HeldTicket, kw_only=True):
    """A ticket's prompt and lease, and its group once it is finished."""

    prompt: Prompt
    renewed_s: float
    """When it was leased, or when its generator last renewed the lease."""
    header: GroupHeader | None = None
    arrays: list[Array] = field(default_factory=list[Array])
    completion: list[int] = field(default_factory=list[int])
    """Action tokens of each trajectory."""
    by_version: dict[int, int] = field(default_factory=dict[int, int])
    """Action tokens by the policy version that sampled them."""
    num_bytes: int = 0
    """Size of frames, header and prompt."""
    signal: bool = True
    """As in `asyncrl.replay.refunds.has_signal`."""

    @property
    def awaited(self) -> dict[int, int]:
        """The latest attempts whose tokens are not in the ledger yet, with their generators: their groups may still
        arrive."""
        known = {*self.counted, -1 if self.header is None else self.header.attempt}
        first = max(0, self.attempt + 1 - MAX_AWAITED)
        return {attempt: self.holders[attempt] for attempt in range(first, self.attempt + 1) if attempt not in known}

    @property
    def finished(self) -> GroupHeader:
        """Header of the finished group. Raises InvariantError if there is none."""
        if self.header is None:
            raise InvariantError("replay: a group without data counts as finished")
        return self.header

    def keep(self, group: FinishedGroup, location: Location | None) -> None:
        """Stores the finished group."""
        _, mask, _, versions = group.arrays[:4]
        self.header, self.arrays, self.location, self.signal = group.header, group.arrays, location, group.signal
        frames = sum(array.nbytes for array in group.arrays)
        self.num_bytes = frames + header_bytes(group.header) + prompt_bytes(self.prompt)
        self.completion, self.by_version = completion_tokens(group.header, mask), tokens_by_version(versions, mask)

    def check_prompt(self, header: GroupHeader, tokens: Array, action_mask: Array) -> None:
        """Raises ProtocolError unless the group belongs to this prompt: same row, same data source, and the prompt's
        tokens, none of them an action, at the start of every trajectory, which an environment may replace. The arrays
        are those of all trajectories end to end."""
        prompt, where = self.prompt, f"ticket {header.ticket}"
        if header.row != prompt.row:
            raise ProtocolError(f"{where} is for row {prompt.row}, not {header.row}")
        if header.data_source != prompt.data_source:
            raise ProtocolError(f"{where} is for data source {prompt.data_source!r}, not {header.data_source!r}")
        if header.episodes:
            return
        expected, size, begin = np.asarray(prompt.tokens, dtype=np.int32).tobytes(), len(prompt.tokens), 0
        for number, length in enumerate(header.lengths):
            if tokens[begin : begin + min(size, length)].tobytes() != expected:
                raise ProtocolError(f"{where}: trajectory {number} does not begin with the tokens of row {prompt.row}")
            if action_mask[begin : begin + min(size, length)].any():
                raise ProtocolError(f"{where}: trajectory {number} has actions in the prompt of row {prompt.row}")
            begin += length

    @classmethod
    def of_held(cls, held: HeldTicket, prompt: Prompt, load: Load | None, now_s: float) -> Self:
        """The entry of a stored ticket, with its lease renewed at `now_s`; `load` reads the frames, and without it the
        group is lost."""
        kept = {"location": None, "taken_s": 0.0} if load is None else {}
        entry = cls(**msgspec.structs.asdict(held) | kept, prompt=prompt, renewed_s=now_s)
        if load is not None and held.location is not None:
            record = load(held.location)
            entry.keep(FinishedGroup.of_record(record.body, record.arrays), held.location)
        return entry


class TakenStep(Durable):
    """A batch that is taken and not trained yet."""

    number: int
    """The step."""
    shards: list[list[int]]
    """The tickets of each learner rank."""
    dropped: list[int]
    """Tickets of groups without signal that no rank computes (`replay.zero_variance: drop`)."""

    @property
    def tickets(self) -> list[int]:
        """All tickets of the batch."""
        return [*(ticket for shard in self.shards for ticket in shard), *self.dropped]


class PromptSource(Protocol):
    """An endless stream of prompts that can be resumed."""

    @property
    def skipped_rows(self) -> int:
        """Rows skipped so far because they do not fit the model's context window."""
        ...

    @property
    def filtered_rows(self) -> int:
        """Rows that the user's filter has left out so far."""
        ...

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""
        ...

    def next_kept(self, keeps: Callable[[int], bool]) -> tuple[Prompt, RowPlace]:
        """The next prompt of a row for which `keeps` is True, and the row's place. The place of another row goes to the
        next one of the same pool."""
        ...

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
