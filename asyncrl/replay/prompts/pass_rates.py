"""The pass rate of every training row, and how many of its latest groups in a row had equal rewards only."""

from __future__ import annotations

import zlib
from enum import IntEnum
from typing import Any

import numpy as np
from msgspec import field
from numpy.typing import NDArray

from asyncrl.replay.refunds import SAME_REWARD
from asyncrl.util.durable import Durable
from asyncrl.wire.messages import GroupHeader

NEWEST = 0.3
"""Least weight of the newest group in a row's mean reward; with fewer than 1 / NEWEST groups all weigh the same."""
MAX_BYTE = 255
"""Counts of a row stop here."""
MAX_SOURCES, OTHER_SOURCES = 100, "other sources"
"""Data sources that are counted by name; the rows of all others are counted together."""
COLUMNS: dict[str, type[np.generic]] = {
    "rewards": np.float32, "groups": np.uint8, "streaks": np.uint8, "skips": np.uint8, "kinds": np.uint8,
}  # fmt: skip
"""The arrays of a value per row."""


class Kind(IntEnum):
    """What the latest group of a row says of it."""

    UNSEEN = 0
    LEARNING = 1
    """Its rewards differ."""
    SOLVED = 2
    """They are equal, and in the upper half of the rewards of the row's data source."""
    HOPELESS = 3
    """They are equal, and in the lower half."""


class RowOutcome(Durable):
    """What a finished group says of its row."""

    ticket: int
    row: int
    data_source: str
    reward: float
    """Mean of the group."""
    lowest: float
    highest: float

    @classmethod
    def of(cls, header: GroupHeader) -> RowOutcome:
        """The outcome of a group: of its members that have a reward."""
        rewards = header.of_scored(header.rewards)
        mean, ends = sum(rewards) / len(rewards), (min(rewards), max(rewards))
        return cls(header.ticket, header.row, header.data_source, mean, *ends)

    @property
    def signal(self) -> bool:
        """True if rewards differ: for advantages that compare within the group, what there is to learn from."""
        return self.highest - self.lowest >= SAME_REWARD


class SourceRows(Durable):
    """The rows of a data source that have been seen."""

    kinds: list[int] = field(default_factory=lambda: [0] * len(Kind))
    """Number of rows of each Kind."""
    lowest: float = 0.0
    highest: float = 0.0
    """Range of all its rewards, and 0."""


class RowRecord(Durable):
    """The durable form of `PassRates`."""

    num_rows: int = 0
    packed: bytes = b""
    """Compressed: a bitmap of the rows that have a value in any column, then each column of these rows."""
    sources: dict[str, SourceRows] = field(default_factory=dict[str, SourceRows])


class PassRates:
    """The history of every training row, in 8 bytes each.

    A row's mean reward is decayed: it follows a policy that changes. Means of rewards that are 0 or 1 are pass rates;
    nothing here assumes that they are.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.sources: dict[str, SourceRows] = {}
        self.rewards: NDArray[np.float32]
        """Decayed mean reward of each row's groups."""
        self.groups: NDArray[np.uint8]
        """Groups seen, at most MAX_BYTE."""
        self.streaks: NDArray[np.uint8]
        """Latest groups in a row whose rewards were all equal, at most MAX_BYTE."""
        self.skips: NDArray[np.uint8]
        """Times in a row that it was skipped, at most MAX_BYTE."""
        self.kinds: NDArray[np.uint8]
        self._allocate()

    def add(self, outcome: RowOutcome) -> float:
        """Counts a group. Returns by how much it changes the row's mean reward, which is 0 for an unseen row."""
        row = outcome.row
        known = outcome.data_source in self.sources or len(self.sources) < MAX_SOURCES
        source = self.sources.setdefault(outcome.data_source if known else OTHER_SOURCES, SourceRows())
        source.lowest, source.highest = min(source.lowest, outcome.lowest), max(source.highest, outcome.highest)
        groups, before = int(self.groups[row]), float(self.rewards[row])
        self.rewards[row] = before + max(1.0 / (groups + 1), NEWEST) * (outcome.reward - before)
        self.groups[row] = min(groups + 1, MAX_BYTE)
        self.streaks[row] = 0 if outcome.signal else min(int(self.streaks[row]) + 1, MAX_BYTE)
        kind = Kind.LEARNING
        if not outcome.signal:
            upper_half = outcome.reward > (source.lowest + source.highest) / 2
            kind = Kind.SOLVED if upper_half else Kind.HOPELESS
        if self.kinds[row]:
            source.kinds[self.kinds[row]] -= 1
        source.kinds[kind] += 1
        self.kinds[row] = kind
        return float(self.rewards[row]) - before

    @property
    def num_seen(self) -> int:
        """Rows of which a group was counted."""
        return sum(sum(source.kinds) for source in self.sources.values())

    def counts(self, *, left_out: int = 0) -> dict[str, int]:
        """Rows by kind; `left_out` rows are never generated, and not counted as unseen."""
        kinds = {kind.name.lower(): sum(one.kinds[kind] for one in self.sources.values()) for kind in Kind if kind}
        return kinds | {"unseen": max(0, self.num_rows - self.num_seen - left_out)}

    def counts_by_source(self) -> dict[str, dict[str, int]]:
        """Seen rows of each data source, by kind."""
        return {
            name: {kind.name.lower(): source.kinds[kind] for kind in Kind if kind}
            for name, source in sorted(self.sources.items())
        }

    @property
    def packed(self) -> bytes:
        """See `RowRecord.packed`."""
        touched = (self.kinds > 0) | (self.skips > 0)
        parts = [np.packbits(touched), *(self._column(name)[touched] for name in COLUMNS)]
        return zlib.compress(b"".join(part.tobytes() for part in parts), level=1)

    def load(self, stored: RowRecord) -> None:
        """Restores the record."""
        self.num_rows, self.sources = stored.num_rows, stored.sources
        self._allocate()
        data = zlib.decompress(stored.packed)
        bits = np.frombuffer(data, np.uint8, count=-(-self.num_rows // 8))
        rows = np.flatnonzero(np.unpackbits(bits, count=self.num_rows))
        start = len(bits)
        for name, kind in COLUMNS.items():
            values = np.frombuffer(data, kind, count=len(rows), offset=start)
            self._column(name)[rows] = values
            start += values.nbytes

    def _allocate(self) -> None:
        for name, kind in COLUMNS.items():
            setattr(self, name, np.zeros(self.num_rows, kind))

    def _column(self, name: str) -> NDArray[Any]:
        return getattr(self, name)
