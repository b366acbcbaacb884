"""The samples that a run records in its folder: some of the trained batches, and every evaluated completion.

    samples/trained.jsonl        a few trajectories of a step, every few seconds; written by learner rank 0
    samples/eval-000050.jsonl    the completions of version 50; written by the replay queue

A line is one trajectory: a row of `Samples` with its tokens, and "chosen", why it is there. Readers decode the tokens.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import structlog
from numpy.typing import ArrayLike

from asyncrl.errors import DataError
from asyncrl.samples.table import ARRAYS, EPISODES, SCHEMA, Samples
from asyncrl.types import Group
from asyncrl.util.files import cut_unfinished_line, read_lines

log = structlog.get_logger()

FOLDER = "samples"
TRAINED, EVALUATED = "trained.jsonl", "eval-{:06d}.jsonl"
CHOSEN = "chosen"
REASONS = ("best", "worst", "failed", "longest", "median")
"""Why a trajectory of a batch is recorded: its reward, that its reward could not be computed, its length."""
EVERY_S = 5.0
"""Minimum time between two recorded steps."""
EVERY_FRACTION = 0.005
"""The same as a fraction of the run's duration so far, so that a long run records about a thousand steps."""
LATEST_BYTES = 4 << 20
"""Bytes at the end of the file in which the latest step is looked for."""
ROWS_AT_A_TIME = 256
"""Rows that are parsed at once: as Python objects they take ten times the memory of a table."""


class SampleBook:
    """Records some trajectories of the batches that a learner trains."""

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = run_dir / FOLDER / TRAINED
        self._clock = clock
        self._started_s = clock()
        self._next_s = self._started_s

    def record(self, step: int, groups: Sequence[Group], *, is_last: bool = False) -> Samples | None:
        """Writes the `choose`n trajectories of a step and returns them; None if the step computed no group, or if the
        last record is too recent and this is not the last step."""
        now_s = self._clock()
        if not groups or (now_s < self._next_s and not is_last):
            return None
        self._next_s = now_s + max(EVERY_S, EVERY_FRACTION * (now_s - self._started_s))
        samples = choose(groups, step=step)
        append_rows(self._file, samples)
        return samples


def choose(groups: Sequence[Group], *, step: int) -> Samples:
    """The best, the worst, the first failed, the longest and the median member of a batch, each once, with all of its
    rows and the reason as the column "chosen"."""
    rows: dict[tuple[int, int], list[int]] = {}
    for at, group in enumerate(groups):
        for index, member in enumerate(group.members):
            rows.setdefault((at, member), []).append(index)
    places = list(rows)
    members = [[groups[at].trajectories[index] for index in rows[at, member]] for at, member in places]
    scored = [number for number, member in enumerate(members) if member[0].status != "failed"]
    order = sorted(scored, key=lambda number: members[number][0].reward)
    wanted: dict[str, int | None] = dict.fromkeys(REASONS)
    if order:
        wanted |= {"best": order[-1], "worst": order[0], "median": order[len(order) // 2]}
    if members:
        wanted["longest"] = int(np.argmax([sum(row.num_action_tokens for row in member) for member in members]))
        wanted["failed"] = next((number for number, member in enumerate(members) if member[0].error), None)
    reasons: dict[int, str] = {}
    for reason, number in wanted.items():
        if number is not None:
            reasons.setdefault(number, reason)
    parts: list[Samples] = []
    for number, reason in reasons.items():
        own = rows[places[number]]
        part = Samples.of_groups([groups[places[number][0]]], step=step, outcome="trained").select(own)
        parts.append(part.with_column(CHOSEN, pa.array([reason] * len(own), pa.string())))
    return Samples.concat(parts or [_samples_of([])])


def append_rows(file: Path, samples: Samples) -> None:
    """Appends the samples to a file of lines. A disk that is full costs the record, not the run."""
    kept = [name for name in samples.columns if name not in ARRAYS]
    rows = samples.table.select(kept).to_pylist(maps_as_pydicts="strict")
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        cut_unfinished_line(file)
        with file.open("ab", buffering=0) as lines:
            if lines.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        log.warning("samples are not recorded", file=str(file), error=str(error))


class _Head(msgspec.Struct):
    """The fields of a line by which rows are chosen."""

    step: int | None = None
    chosen: str | None = None
    ticket: int = 0
    index: int = 0
    row: int = 0


class _Place(NamedTuple):
    """The position of a line in its file."""

    begin: int
    num_bytes: int


class Recorded:
    """The recorded samples of all steps, in their order; one that was recorded again after a restart is there once.
    Keeps where they are in the file, and reads those that are asked for."""

    def __init__(self, run_dir: Path) -> None:
        """Raises DataError for a damaged file."""
        self._file = run_dir / FOLDER / TRAINED
        members: dict[tuple[int | None, str | None], list[tuple[_Head, _Place]]] = {}
        for head, place in _heads(self._file):
            rows = members.setdefault((head.step, head.chosen), [])
            if rows and (rows[-1][0].ticket != head.ticket or rows[-1][0].index >= head.index):
                rows.clear()  # it was recorded again
            rows.append((head, place))
        ordered = sorted((row for rows in members.values() for row in rows), key=lambda row: row[0].step or 0)
        self._places = [place for _, place in ordered]
        self.steps = np.array([head.step or 0 for head, _ in ordered], dtype=np.int64)
        """The step of each row."""
        self.tickets = np.array([head.ticket for head, _ in ordered], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, rows: ArrayLike) -> Samples:
        """The samples of these rows: indices, or a mask. Raises DataError."""
        chosen = np.asarray(rows)
        indices = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen.astype(np.int64)
        return _read_at(self._file, [self._places[index] for index in indices])


def read_trained(run_dir: Path) -> Samples:
    """The recorded samples of all steps, as those of `Recorded`. Raises DataError."""
    recorded = Recorded(run_dir)
    return recorded.read(np.arange(len(recorded)))


class Record(NamedTuple):
    """The samples of a step, as they were recorded."""

    step: int
    read: Callable[[], Samples]
    end_bytes: int
    """The position of the next record in the file."""


def recorded_steps(run_dir: Path, offset: int) -> Iterator[Record]:
    """Yields the records that begin at this offset in the file, or after it. Raises DataError."""
    file = run_dir / FOLDER / TRAINED
    for step, lines in groupby(_heads(file, offset=offset), key=lambda line: line[0].step):
        places = [place for _, place in lines]
        end = places[-1].begin + places[-1].num_bytes
        yield Record(step or 0, partial(_read_at, file, places), end)


def read_latest(run_dir: Path) -> Samples:
    """The recorded samples of the latest step; reads the end of the file only. Raises DataError."""
    file = run_dir / FOLDER / TRAINED
    lines = list(_heads(file, offset=-LATEST_BYTES))
    return _read_at(file, [place for head, place in lines if head.step == lines[-1][0].step])


def evaluated_versions(run_dir: Path) -> list[int]:
    """The versions of which evaluated completions are recorded, in order."""
    return sorted(int(file.stem.partition("-")[2]) for file in (run_dir / FOLDER).glob("eval-*.jsonl"))


def count_evaluated(run_dir: Path, version: int, *, max_bytes: int) -> Counter[int]:
    """The number of recorded completions of each row of the dataset in one evaluation, in the first `max_bytes` of its
    file. Raises DataError."""
    return Counter(head.row for head, _ in _heads(evaluated_file(run_dir, version), max_bytes=max_bytes))


def read_evaluated(
    run_dir: Path,
    version: int,
    *,
    rows: Collection[int] | None = None,
    limit: int | None = None,
    max_bytes: int | None = None,
) -> Samples:
    """The recorded completions of one evaluation, by row of the dataset: of these `rows`, the first `limit`, and in the
    first `max_bytes` of the file. Raises DataError."""
    file = evaluated_file(run_dir, version)
    places = {
        (head.row, head.index): place
        for head, place in _heads(file, max_bytes=max_bytes)
        if rows is None or head.row in rows
    }
    return _read_at(file, [places[key] for key in sorted(places)[:limit]])


def evaluated_file(run_dir: Path, version: int) -> Path:
    """The file with the completions of one evaluation."""
    return run_dir / FOLDER / EVALUATED.format(version)


def _heads(file: Path, *, offset: int = 0, max_bytes: int | None = None) -> Iterator[tuple[_Head, _Place]]:
    """Yields the complete lines of a file from an offset on, a negative one from the end; none if there is no file."""
    size = file.stat().st_size if file.is_file() else 0
    begin = offset if offset >= 0 else max(size + offset, 0)
    is_complete = offset >= 0 or not begin
    try:
        for line in read_lines(file, begin):
            if is_complete:
                yield _head(line), _Place(begin, len(line))
            is_complete = True
            begin += len(line)
            if max_bytes is not None and begin >= max_bytes:
                return
    except (ValueError, msgspec.MsgspecError) as error:
        raise DataError(f"{file}: a line is not JSON: {error}; delete the file to continue without it") from None


def _head(line: bytes) -> _Head:
    try:
        return msgspec.json.decode(line, type=_Head)
    except msgspec.DecodeError:
        return msgspec.convert(json.loads(line), _Head)  # it may have NaN, which msgspec refuses


def _read_at(file: Path, places: Sequence[_Place]) -> Samples:
    """The samples of these lines."""
    parts = [_samples_of([])]
    if places:
        with file.open("rb") as content:
            for begin in range(0, len(places), ROWS_AT_A_TIME):
                rows: list[dict[str, Any]] = []
                for place in places[begin : begin + ROWS_AT_A_TIME]:
                    content.seek(place.begin)
                    rows.append(json.loads(content.read(place.num_bytes)))
                parts.append(_samples_of(rows))
    return Samples.concat(parts)


def _samples_of(rows: Iterable[dict[str, Any]]) -> Samples:
    """The samples of what `append_rows` wrote."""
    content = [{**row, "reward_parts": list(row["reward_parts"].items())} for row in rows]
    lists = [(name, pa.list_(kind)) for name, kind in EPISODES.items() if any(name in row for row in content)]
    return Samples(pa.Table.from_pylist(content, pa.schema([*SCHEMA, (CHOSEN, pa.string()), *lists])))
