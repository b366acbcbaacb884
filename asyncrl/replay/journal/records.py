"""Records of the journal as rows of Arrow record batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa

from asyncrl.errors import InvariantError
from asyncrl.wire.frames import DTYPES, Array

FRAMES = {
    "tokens": DTYPES["i4"],
    "action_mask": DTYPES["b1"],
    "behavior_logprobs": DTYPES["f4"],
    "versions": DTYPES["i4"],
}
"""The frames of a group, in order. A mask is stored as bytes, so that it is read without a copy."""
FRAME_BYTES = sum(dtype.itemsize for dtype in FRAMES.values())
"""Bytes of one token in all frames."""
STORED = {name: np.dtype("u1") if dtype.kind == "b" else dtype for name, dtype in FRAMES.items()}
ROUTING = "routing"
"""The flat routing of a group that has one: its length is that of `GroupHeader.routing`."""
FORMAT = 9
"""The number of the format of journals, and of the queue's part of checkpoints."""
_FORMER_SCHEMA = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),
        pa.field("body", pa.binary(), nullable=False),
        pa.field("ticket", pa.int64()),
        pa.field("attempt", pa.int32()),
        *(pa.field(name, pa.list_(pa.from_numpy_dtype(dtype))) for name, dtype in STORED.items()),
    ]
)
_NEW_SCHEMA = _FORMER_SCHEMA.append(pa.field(ROUTING, pa.large_list(pa.uint8())))
SCHEMA = _NEW_SCHEMA.with_metadata({"asyncrl.journal": str(FORMAT)})
"""One row is one record; ticket, attempt and frames are null unless it is a group."""
FORMER = {
    number: (_FORMER_SCHEMA if number < 8 else _NEW_SCHEMA).with_metadata({"asyncrl.journal": str(number)})
    for number in range(1, FORMAT)
}
"""The schema of each former format."""
KINDS, BODIES, TICKETS, ATTEMPTS, *LISTS, ROUTINGS = SCHEMA.types


@dataclass(frozen=True, slots=True)
class Record:
    """One event of the run."""

    kind: str
    body: Any
    """A value for msgpack; tuples are read back as lists."""
    arrays: list[Array] = field(default_factory=list[Array])
    """The four frames of a group, and its routing if it has one; or none."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The bytes of a record batch message, as a sequence of buffers."""

    pieces: list[Any]
    num_bytes: int


class BatchPacker:
    """Collects records and builds batches of them, without copying the frames.

    Arrow gets a placeholder of the right size for each column of frames, which is never read; `_Sink` replaces it with
    the frames when Arrow writes it.
    """

    def __init__(self) -> None:
        self._pack = msgpack.Packer().pack
        self._itemsizes = [dtype.itemsize for dtype in FRAMES.values()]
        marks = np.zeros((len(STORED) + 1, 64), dtype=np.uint8)
        self._marks = [(mark.ctypes.data, mark) for mark in marks]
        self._nulls: dict[int, list[pa.Array]] = {}
        """Columns for a number of records without a group, by that number."""
        self._sink = _Sink()
        self._stream = pa.ipc.new_stream(pa.PythonFile(self._sink, mode="w"), SCHEMA)
        # The schema comes before the first batch; segments have their own.
        self._stream.write_batch(pa.RecordBatch.from_pylist([], schema=SCHEMA))
        self._sink.take()
        self._begin()

    def __len__(self) -> int:
        """Records collected."""
        return len(self._kinds)

    @property
    def num_bytes(self) -> int:
        """Size of the bodies and frames collected."""
        return self._body_bytes + FRAME_BYTES * self._ends[-1] + self._routing_ends[-1]

    def add(self, record: Record) -> None:
        """Adds a record. Raises TypeError for a body that msgpack cannot encode."""
        body, frames, routing = self._pack(record.body), record.arrays[:4], record.arrays[4:]
        ticket = attempt = None
        length = 0
        if frames:
            ticket, attempt, length = record.body["ticket"], record.body["attempt"], frames[0].size
            if [frame.nbytes for frame in frames] != [length * size for size in self._itemsizes]:
                kinds = [f"{frame.dtype}{list(frame.shape)}" for frame in frames]
                raise InvariantError(f"journal: a {record.kind} with frames {', '.join(kinds)}")
            for column, frame in zip(self._frames, frames, strict=True):
                column.append(np.ascontiguousarray(frame))
            self._routings += [np.ascontiguousarray(frame) for frame in routing]
        self._kinds.append(record.kind)
        self._bodies.append(body)
        self._tickets.append(ticket)
        self._attempts.append(attempt)
        self._ends.append(self._ends[-1] + length)
        self._routing_ends.append(self._routing_ends[-1] + sum(frame.nbytes for frame in routing))
        self._body_bytes += len(body)

    def take(self) -> Packed:
        """Returns the batch of the collected records and starts a new one."""
        columns = [pa.array(self._kinds, KINDS), pa.array(self._bodies, BODIES)]
        columns += self._group_columns() if self._frames[0] else self._no_groups()
        self._begin()
        self._stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
        return self._sink.take()

    def _group_columns(self) -> list[pa.Array]:
        rows, length = len(self), self._ends[-1]
        columns = [pa.array(self._tickets, TICKETS), pa.array(self._attempts, ATTEMPTS)]
        validity = columns[0].buffers()[0]
        offsets = pa.array(self._ends, pa.int32()).buffers()[1]
        for mark, size, frames, lists in zip(self._marks, self._itemsizes, self._frames, LISTS, strict=False):
            values = self._values(mark, frames, length * size)
            children = [pa.Array.from_buffers(lists.value_type, length, [None, values])]
            columns.append(pa.Array.from_buffers(lists, rows, [validity, offsets], children=children))
        if not self._routings:
            return [*columns, pa.nulls(rows, ROUTINGS)]
        offsets, num_bytes = pa.array(self._routing_ends, pa.int64()).buffers()[1], self._routing_ends[-1]
        values = self._values(self._marks[-1], self._routings, num_bytes)
        children = [pa.Array.from_buffers(pa.uint8(), num_bytes, [None, values])]
        return [*columns, pa.Array.from_buffers(ROUTINGS, rows, [validity, offsets], children=children)]

    def _values(self, mark: tuple[int, Array], frames: list[Array], num_bytes: int) -> pa.Buffer:
        """Returns the placeholder of the frames of a column."""
        self._sink.frames[mark[0]] = frames
        return pa.foreign_buffer(mark[0], num_bytes, mark[1])

    def _no_groups(self) -> list[pa.Array]:
        rows = len(self)
        if rows not in self._nulls:
            self._nulls[rows] = [pa.nulls(rows, kind) for kind in (TICKETS, ATTEMPTS, *LISTS, ROUTINGS)]
        return self._nulls[rows]

    def _begin(self) -> None:
        self._kinds: list[str] = []
        self._bodies: list[bytes] = []
        self._tickets: list[int | None] = []
        self._attempts: list[int | None] = []
        self._frames: list[list[Array]] = [[] for _ in STORED]
        self._ends = [0]
        """Offsets of the frames, in tokens: 0, then the end of each record."""
        self._routings: list[Array] = []
        self._routing_ends = [0]
        """The same of the routings, in bytes."""
        self._body_bytes = 0


class _Sink:
    """A file object that collects the buffers Arrow writes, and replaces placeholders with frames.

    Arrow writes each column as one contiguous buffer, but the frames of a batch are separate arrays; joining them would
    copy the batch. Arrow therefore gets a `foreign_buffer` for each column: a valid address with the length of all
    frames, although the memory there is much smaller. It must not be read, so `write` recognizes it by its address
    and takes the frames instead; the lengths agree, so all offsets in the message are right. This holds as long as the
    stream is uncompressed and Arrow passes buffers through to a Python file unchanged.
    """

    closed = False

    def __init__(self) -> None:
        self.frames: dict[int, list[Array]] = {}
        """The frames that replace the placeholder at an address."""
        self._pieces: list[Any] = []
        self._begin = self._end = 0

    def take(self) -> Packed:
        """Returns what was written since the last call."""
        packed = Packed(self._pieces, self._end - self._begin)
        self.frames, self._pieces, self._begin = {}, [], self._end
        return packed

    def write(self, data: Any) -> int:
        frames = self.frames.get(data.address) if isinstance(data, pa.Buffer) else None
        self._pieces += [data] if frames is None else frames
        self._end += len(data)
        return len(data)

    def tell(self) -> int:
        return self._end

    def flush(self) -> None: ...

    def close(self) -> None: ...


class JournalBatch:
    """The records of a batch read from the journal; arrays are read-only views of its bytes."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._kinds = batch.column("kind").to_pylist()
        self._bodies = batch.column("body").to_pylist()
        self._frames: list[tuple[Array, Array]] = []
        for name, dtype in FRAMES.items():
            lists = batch.column(name)
            self._frames.append((lists.offsets.to_numpy(), lists.values.to_numpy().view(dtype)))
        routings = batch.column(ROUTING)
        self._routings = routings.offsets.to_numpy(), routings.values.to_numpy()
        self._has_frames = batch.column("ticket").is_valid().to_numpy(zero_copy_only=False)

    def __len__(self) -> int:
        return len(self._kinds)

    def record(self, row: int) -> Record:
        """Returns a record. Raises ValueError or TypeError if its body is not valid msgpack."""
        body = msgpack.unpackb(self._bodies[row], strict_map_key=False)
        frames = [*self._frames, self._routings] if self._has_frames[row] else []
        arrays = [values[offsets[row] : offsets[row + 1]] for offsets, values in frames]
        return Record(self._kinds[row], body, arrays if frames and len(arrays[-1]) else arrays[:4])
