"""The outcome of the latest group of every training row: whether the policy solves it, learns from it, or never solves
it."""

from __future__ import annotations

import zlib
from enum import IntEnum

import numpy as np
from msgspec import field

from asyncrl.replay.live_group import SAME_REWARD
from asyncrl.util.durable import Durable
from asyncrl.wire.messages import GroupHeader

MAX_SOURCES, OTHER_SOURCES = 100, "other sources"
"""Data sources that are counted by name; the rows of all others are counted together."""


class Kind(IntEnum):
    """The state of a row by its latest group."""

    UNSEEN = 0
    LEARNING = 1
    """Its rewards differ."""
    SOLVED = 2
    """They are equal, and in the upper half of the rewards of the row's data source."""
    NEVER_SOLVED = 3
    """They are equal, and in the lower half."""


class SourceRows(Durable):
    """The rows of a data source that have been seen."""

    kinds: list[int] = field(default_factory=lambda: [0] * len(Kind))
    """Number of rows of each Kind."""
    lowest: float = 0.0
    highest: float = 0.0
    """Range of all its rewards, and 0."""


class RowRecord(Durable):
    """The stored form of `RowResults`."""

    packed: bytes
    """The kind of each row, compressed."""
    sources: dict[str, SourceRows]


class RowResults:
    """The kind of every training row, in a byte each. Groups are counted as they arrive."""

    def __init__(self, num_rows: int) -> None:
        self.kinds = np.zeros(num_rows, np.uint8)
        self.sources: dict[str, SourceRows] = {}

    def add(self, header: GroupHeader) -> None:
        """Counts a finished group of which at least one member has a reward."""
        rewards = header.of_scored(header.rewards)
        mean, lowest, highest = sum(rewards) / len(rewards), min(rewards), max(rewards)
        known = header.data_source in self.sources or len(self.sources) < MAX_SOURCES
        source = self.sources.setdefault(header.data_source if known else OTHER_SOURCES, SourceRows())
        source.lowest, source.highest = min(source.lowest, lowest), max(source.highest, highest)
        kind = Kind.LEARNING
        if highest - lowest < SAME_REWARD:
            kind = Kind.SOLVED if mean > (source.lowest + source.highest) / 2 else Kind.NEVER_SOLVED
        if before := self.kinds[header.row]:
            source.kinds[before] -= 1
        source.kinds[kind] += 1
        self.kinds[header.row] = kind

    def counts(self, *, left_out: int = 0) -> dict[str, int]:
        """Rows by kind; `left_out` rows are never generated, and not counted as unseen."""
        kinds = {
            kind.name.lower(): sum(source.kinds[kind] for source in self.sources.values()) for kind in Kind if kind
        }
        return kinds | {"unseen": max(0, len(self.kinds) - sum(kinds.values()) - left_out)}

    def metrics(self, *, left_out: int) -> dict[str, float]:
        """The metrics of a step; `left_out` as in `counts`."""
        return {f"prompts/{name}": float(count) for name, count in self.counts(left_out=left_out).items()}

    def summary(self, *, left_out: int) -> dict[str, object]:
        """Rows by kind, and seen rows by data source as well, for the run's summary; `left_out` as in `counts`."""
        by_source = {
            name: {kind.name.lower(): source.kinds[kind] for kind in Kind if kind}
            for name, source in sorted(self.sources.items())
        }
        return {**self.counts(left_out=left_out), "by_source": by_source}

    @property
    def packed(self) -> bytes:
        """The kind of each row, compressed."""
        return zlib.compress(self.kinds.tobytes(), level=1)

    def load(self, stored: RowRecord) -> None:
        """Restores the record."""
        self.kinds = np.frombuffer(zlib.decompress(stored.packed), np.uint8).copy()
        self.sources = stored.sources
