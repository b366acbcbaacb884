"""Curves of a run, read from a growing `metrics.jsonl` with memory that does not grow with the run.

Steps are grouped into buckets of equal size, at most `MAX_POINTS` of them. When they are full, adjacent buckets are
merged, so that the size is a power of two; a point of a curve is the mean of a bucket. The last bucket may be smaller.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.observe.logs import LineReader
from asyncrl.util.files import read_lines

MAX_POINTS = 1000
RATE_POINTS = 100
"""Largest number of points of a rate: each is the tokens of some steps divided by their seconds."""
CHUNK_BYTES = 4 << 20
LATEST_STEPS = 20
"""Steps whose rows are kept."""
OF_STEP, ELAPSED = "learner/tokens", "time/elapsed_s"
"""Metrics of every step: trained tokens, and the seconds since the first lease at its end."""

Row = dict[str, float]
Line = tuple[list[float], list[float]]
"""Steps and values."""


class Curves:
    """Follows one `metrics.jsonl`. A row without a reward and without trained tokens is no step: it is an evaluation
    that ended after the last one."""

    def __init__(self, file: Path, *, wanted: Callable[[str], bool]) -> None:
        """Keeps the metrics whose names are `wanted`."""
        self._file = file
        self._reader = LineReader(file, CHUNK_BYTES)
        self._wanted = wanted
        self._start_over()

    def _start_over(self) -> None:
        self._start = self._reader.num_starts
        self.num_steps = 0
        self.bucket_steps = 1
        """Steps of a bucket."""
        self.latest: deque[Row] = deque(maxlen=LATEST_STEPS)
        """All metrics of the latest steps."""
        self.names: set[str] = set()
        """Metrics that are kept."""
        self.fault = ""
        """A sentence about a damaged file, or ""; nothing is read after a line that is not JSON."""
        self._ends = np.zeros(MAX_POINTS, dtype=np.int64)
        """Last step of each bucket."""
        self._elapsed_s = np.full(MAX_POINTS, np.nan)
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._counts: dict[str, NDArray[np.float64]] = {}

    def read(self) -> bool:
        """Reads appended rows; returns True if there were any. A file that was replaced or cut is read from its
        start; nothing is left of one that was moved away."""
        changed = False
        if not self._file.is_file() and self._start:
            self._reader, changed = LineReader(self._file, CHUNK_BYTES), True
            self._start_over()
        for chunk in self._reader.chunks():
            changed = True
            if self._start != self._reader.num_starts:
                self._start_over()
            if not self.fault:
                self._add_lines(chunk)
        if self._start != self._reader.num_starts:  # by an empty file
            self._start_over()
            return True
        return changed

    def _add_lines(self, chunk: bytes) -> None:
        rows: list[Row] = []
        for line in chunk.splitlines():
            try:
                rows.append(decode_row(line))
            except ValueError as error:
                self.fault = f"{self._file}: the line after {self.num_steps + len(rows):,} rows is not JSON: {error}"
                break
        self._add([row for row in rows if OF_STEP in row or "reward/mean" in row])

    def _add(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        first, self.num_steps = self.num_steps, self.num_steps + len(rows)
        self.latest.extend(rows[-LATEST_STEPS:])
        while (self.num_steps - 1) // self.bucket_steps >= MAX_POINTS:
            self._merge()
        buckets = np.arange(first, self.num_steps) // self.bucket_steps
        self._ends[buckets] = [row["step"] for row in rows]  # the last of equal indices is kept
        self._elapsed_s[buckets] = [row.get(ELAPSED, math.nan) for row in rows]
        for name in {name for row in rows for name in row if self._wanted(name)}:
            values = np.array([row.get(name, math.nan) for row in rows], dtype=np.float64)
            if first == 0 and name.endswith("_s"):
                values[0] = math.nan  # the first step's time includes the start of the run
            known = np.isfinite(values)
            if name not in self.names:
                self.names.add(name)
                self._sums[name], self._counts[name] = np.zeros(MAX_POINTS), np.zeros(MAX_POINTS)
            at = buckets[known]
            self._sums[name] += np.bincount(at, values[known], MAX_POINTS)
            self._counts[name] += np.bincount(at, minlength=MAX_POINTS)

    def _merge(self) -> None:
        self.bucket_steps *= 2
        half, rest = MAX_POINTS // 2, np.zeros(MAX_POINTS - MAX_POINTS // 2)
        for table in (self._sums, self._counts):
            for name, values in table.items():
                table[name] = np.concatenate([values.reshape(half, 2).sum(1), rest])
        # An incomplete last bucket ends with its only half.
        self._ends = np.concatenate([self._ends.reshape(half, 2).max(1), rest.astype(np.int64)])
        pairs = self._elapsed_s.reshape(half, 2)
        self._elapsed_s = np.concatenate([np.where(np.isnan(pairs[:, 1]), pairs[:, 0], pairs[:, 1]), rest + np.nan])

    @property
    def last_step(self) -> int:
        """The last step that has been read; 0 if there is none."""
        return int(self.latest[-1]["step"]) if self.latest else 0

    def line(self, name: str) -> Line:
        """The last steps of the buckets and the means of a metric in them; empty if no step has it."""
        if name == "tokens_per_s":
            return self._rate()
        if name not in self.names:
            return [], []
        known = np.flatnonzero(self._counts[name])
        return self._ends[known].tolist(), rounded(self._sums[name][known] / self._counts[name][known]).tolist()

    def ends(self, name: str) -> tuple[float, float] | None:
        """The means of a metric over the first and the last tenth of the buckets that have it; None if none has."""
        if name not in self.names:
            return None
        known = np.flatnonzero(self._counts[name])
        tenth = max(1, len(known) // 10)
        first, last = known[:tenth], known[-tenth:]
        sums, counts = self._sums[name], self._counts[name]
        return float(sums[first].sum() / counts[first].sum()), float(sums[last].sum() / counts[last].sum())

    def _rate(self) -> Line:
        """Trained tokens divided by the seconds between the ends of buckets."""
        if OF_STEP not in self.names:
            return [], []
        known = np.flatnonzero((self._counts[OF_STEP] > 0) & np.isfinite(self._elapsed_s))
        size = max(1, -(-len(known) // RATE_POINTS))
        lasts = known[len(known) - 1 :: -size][::-1]
        tokens = np.diff(np.cumsum(self._sums[OF_STEP])[lasts])
        seconds = np.diff(self._elapsed_s[lasts])
        good = seconds > 0
        return self._ends[lasts[1:]][good].tolist(), rounded(tokens[good] / seconds[good]).tolist()


def rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The finite values with six significant digits."""
    size = np.where(values == 0, 1.0, np.abs(values))
    scale = 10.0 ** (5 - np.floor(np.log10(size)))
    return np.round(values * scale) / scale


def spread(values: Sequence[float], number: int) -> list[float]:
    """The values as at most `number` means of adjacent ones."""
    size = max(1, -(-len(values) // number))
    parts = [values[begin : begin + size] for begin in range(0, len(values), size)]
    return [sum(part) / len(part) for part in parts]


def decode_row(line: bytes) -> Row:
    """The row of a line. Raises ValueError."""
    try:
        row: Any = msgspec.json.decode(line)
    except msgspec.DecodeError:
        row = json.loads(line)  # it may have NaN, which msgspec refuses
    if not isinstance(row, dict) or "step" not in row:
        raise ValueError("no object with a step")
    return row


def step_of(line: bytes) -> int | None:
    """The step of a row of metrics.jsonl; None if the line is damaged."""
    try:
        return int(decode_row(line)["step"])
    except ValueError:
        return None


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a `metrics.jsonl`, without a torn last line."""
    rows: list[dict[str, float]] = []
    for line in read_lines(path):
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows
