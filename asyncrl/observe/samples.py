"""Trajectories as a table: to look at, to select from and to train again.

One row is one trajectory; its columns are named as the fields of `Trajectory` and `Group`. The journal, the samples of
a run and evaluations are all read as `Samples`:

    samples = Samples.load(Path("runs/demo/samples.parquet"))
    worst = samples.where(step=20).sort("reward").select(slice(3))
    print(worst.decode(load_decoder("runs/demo/model")).to_pandas()[["prompt", "completion", "reward"]])
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import structlog
from numpy.typing import ArrayLike, NDArray

from asyncrl.errors import DataError
from asyncrl.types import Group, Trajectory
from asyncrl.util.files import cut_unfinished_line, read_lines, replace_file
from asyncrl.util.model_files import TokenDecoder

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = pa.schema(
    [
        ("ticket", pa.int64()),
        ("attempt", pa.int32()),
        ("index", pa.int32()),
        ("member", pa.int32()),
        ("row", pa.int64()),
        ("data_source", pa.string()),
        ("generator", pa.int32()),
        ("step", pa.int64()),
        ("outcome", pa.string()),
        ("start_version", pa.int32()),
        ("end_version", pa.int32()),
        ("staleness", pa.int32()),
        ("status", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("error", pa.string()),
        ("started_s", pa.float64()),
        ("finished_s", pa.float64()),
        ("greedy_reward", pa.float64()),
        ("greedy_tokens", pa.int32()),
        ("num_prompt_tokens", pa.int32()),
        ("num_action_tokens", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
    ],
    metadata={"asyncrl.observe.samples": "1"},
)
"""`index` is the position of the trajectory in its group, and `member` the member of the group that it is a row of;
they are the same unless an episode has several rows. `step` is the step that trained it, `outcome` is "trained" or
why it was not, and `staleness` belongs to its oldest token in this step; null where it is not known."""
ARRAYS = {"action_mask": pa.bool_(), "behavior_logprobs": pa.float32(), "versions": pa.int32()}
"""The other arrays of a trajectory, with their types: columns of lists that a table may lack."""


EPISODES = {"segment_tokens": pa.int32(), "turn_rewards": pa.float64()}
"""Columns of lists about episodes, with their types; a table without episodes lacks them. `segment_tokens` are the
numbers of tokens of the prompt, the first turn, the observation after it, the next turn, and so on."""


class SamplePart(NamedTuple):
    """A part of a trajectory."""

    tokens: list[int]
    said: bool
    """True for the policy's text, false for observations."""
    version: int | None = None
    """The newest version that sampled a token of it, where that is known."""
    reward: float | None = None
    """That of the turn, where an environment gave rewards of turns."""


class Samples:
    """An immutable table of trajectories. Methods that select or add return another one."""

    def __init__(self, table: pa.Table) -> None:
        """Raises DataError if the table lacks a column of SCHEMA, or one has another type."""
        for field in SCHEMA:
            kind = table.schema.field(field.name).type if field.name in table.column_names else "missing"
            if kind != field.type:
                raise DataError(f"samples: the column {field.name} is {kind}, it has to be {field.type}")
        self.table = table

    @classmethod
    def of_groups(cls, groups: Iterable[Group], *, step: int | None = None, outcome: str | None = None) -> Self:
        """The trajectories of these groups, with all their arrays; `step` trained them."""
        rows: list[dict[str, Any]] = []
        trajectories: list[Trajectory] = []
        for group in groups:
            shared = {name: getattr(group, name) for name in _OF_GROUP} | {"step": step, "outcome": outcome}
            for index, (number, trajectory) in enumerate(zip(group.members, group.trajectories, strict=True)):
                values = {name: getattr(trajectory, name) for name in (*_OF_TRAJECTORY, *_COUNTS)}
                parts = {"reward_parts": list(trajectory.reward_parts.items())}
                staleness = None if step is None else step - 1 - min(trajectory.oldest_version, step - 1)
                reward = None if trajectory.status == "failed" else trajectory.reward
                places = {"index": index, "member": number, "staleness": staleness, "reward": reward}
                rows.append({**shared, **values, **parts, **places})
                trajectories.append(trajectory)
        table = pa.Table.from_pylist(rows, SCHEMA)
        for name, kind in {"tokens": pa.int32(), **ARRAYS}.items():
            table = _put(table, name, _lists([getattr(trajectory, name) for trajectory in trajectories], kind))
        if any(trajectory.episode is not None for trajectory in trajectories):
            rewards = [
                None if trajectory.episode is None else trajectory.episode.turn_rewards for trajectory in trajectories
            ]
            segments = [
                None if trajectory.episode is None else segments_of(trajectory.action_mask)
                for trajectory in trajectories
            ]
            for name, lists in (("segment_tokens", segments), ("turn_rewards", rewards)):
                table = _put(table, name, pa.array(lists, pa.list_(EPISODES[name])))
        return cls(table)

    def to_groups(self) -> list[Group]:
        """The groups of these trajectories, the inverse of `of_groups`. Adjacent rows of one ticket and attempt form a
        group. Raises DataError if a column of ARRAYS is missing or has nulls."""
        for name in ARRAYS:
            if name not in self.columns or self.table[name].null_count:
                raise DataError(f"samples: {name} is missing, so that they cannot be trained; use those of a journal")
        arrays = {name: self[name] for name in ("tokens", *ARRAYS)}
        groups: list[Group] = []
        for number, row in enumerate(self.table.select([*_OF_GROUP, "member", *_OF_TRAJECTORY]).to_pylist()):
            values: dict[str, Any] = {name: column[number] for name, column in arrays.items()}
            values |= {name: row[name] for name in _OF_TRAJECTORY} | {"reward_parts": dict(row["reward_parts"])}
            values["reward"] = row["reward"] or 0.0
            trajectory = Trajectory(**values, member=row["member"])
            if not groups or (groups[-1].ticket, groups[-1].attempt) != (row["ticket"], row["attempt"]):
                groups.append(Group(**{name: row[name] for name in _OF_GROUP}, trajectories=[]))
            groups[-1].trajectories.append(trajectory)
        return groups

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, name: str) -> Any:
        """The values of a column: an array [len], or of the tokens and the columns of ARRAYS a list with an array per
        row."""
        column = self.table[name].combine_chunks()
        if pa.types.is_list(column.type):
            return _split(column)
        return column.to_numpy(zero_copy_only=False)

    @property
    def begins_member(self) -> NDArray[np.bool_]:
        """[len], true for the first of the adjacent rows of each member of a group."""
        keys = [tuple(row.values()) for row in self.table.select(["ticket", "attempt", "member"]).to_pylist()]
        pairs = zip(keys, [None, *keys], strict=False)
        return np.array([key[-1] is None or key != before for key, before in pairs], dtype=np.bool_)

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return self.table.column_names

    def select(self, rows: slice | ArrayLike) -> Self:
        """These rows: a slice, indices, or a mask of length len."""
        if isinstance(rows, slice):
            rows = np.arange(len(self))[rows]
        chosen = np.asarray(rows)
        indices = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen.astype(np.int64)
        return type(self)(self.table.take(pa.array(indices, pa.int64())))

    def where(self, **equals: Any) -> Self:
        """The rows whose columns have these values: `where(step=20, status="failed")`."""
        mask = np.ones(len(self), dtype=np.bool_)
        for name, value in equals.items():
            equal = pc.equal(self.table[name], value)  # pyright: ignore[reportAttributeAccessIssue]
            mask &= equal.fill_null(False).to_numpy()
        return self.select(mask)

    def sort(self, by: str, *, descending: bool = False) -> Self:
        """The rows by the values of a column, those with equal values in their present order, nulls last."""
        order = "descending" if descending else "ascending"
        return type(self)(self.table.sort_by([(by, order)]))

    def with_column(self, name: str, values: Sequence[Any] | NDArray[Any] | pa.Array) -> Self:
        """The table with a column, in place of one of this name. Raises DataError unless there is a value per row."""
        if len(values) != len(self):
            raise DataError(f"samples: {len(values)} values of {name} for {len(self)} rows")
        kind = SCHEMA.field(name).type if name in SCHEMA.names else None
        column = values if isinstance(values, pa.Array) else pa.array(values, kind)
        return type(self)(_put(self.table, name, column))

    def split(self, sizes: int | Sequence[int]) -> list[Self]:
        """Returns the rows in parts of these sizes, or for a number in that many parts of about equal size. Raises
        DataError unless the sizes add up to the number of rows."""
        if isinstance(sizes, int):
            sizes = [len(self) // sizes + (part < len(self) % sizes) for part in range(sizes)]
        if sum(sizes) != len(self):
            raise DataError(f"samples: parts of {sum(sizes)} rows in all, there are {len(self)}")
        begins = accumulate(sizes, initial=0)
        return [type(self)(self.table.slice(begin, size)) for begin, size in zip(begins, sizes, strict=False)]

    @classmethod
    def concat(cls, parts: Iterable[Samples]) -> Self:
        """The rows of all parts, one after another; columns that a part lacks are null in its rows."""
        tables = [SCHEMA.empty_table(), *(part.table for part in parts)]
        return cls(pa.concat_tables(tables, promote_options="default"))

    def turns(self, row: int) -> list[SamplePart]:
        """The parts of a trajectory after its prompt: the policy's turns, and the observations between them.
        Raises DataError if the table lacks both `action_mask` and `segment_tokens`."""
        chosen = self.select([row])
        tokens, segments = chosen["tokens"][0].tolist(), self._of_row(row, "segment_tokens")
        if segments is None:
            if "action_mask" not in self.columns:
                raise DataError("samples: action_mask is missing, so that turns cannot be told apart")
            segments = segments_of(chosen["action_mask"][0])
        versions, rewards = self._of_row(row, "versions"), iter(self._of_row(row, "turn_rewards") or ())
        parts: list[SamplePart] = []
        for number, (begin, end) in enumerate(pairwise(accumulate(segments))):
            is_action = not number % 2
            newest = max(versions[begin:end], default=None) if is_action and versions else None
            parts.append(SamplePart(tokens[begin:end], is_action, newest, next(rewards, None) if is_action else None))
        return parts

    def _of_row(self, row: int, name: str) -> list[Any] | None:
        """The list of a row in a column; None if it has none."""
        return self.table[name][row].as_py() if name in self.columns else None

    def decode(self, decoder: TokenDecoder, *, special_tokens: bool = False) -> Self:
        """The table with the columns "prompt" and "completion", the texts of the tokens before and after the first
        action token."""
        tokens, starts = self["tokens"], self["num_prompt_tokens"]
        texts = {
            "prompt": [row[:start].tolist() for row, start in zip(tokens, starts, strict=True)],
            "completion": [row[start:].tolist() for row, start in zip(tokens, starts, strict=True)],
        }
        decoded = self
        for name, sequences in texts.items():
            column = pa.array(decoder(sequences, special_tokens=special_tokens), pa.string())
            decoded = decoded.with_column(name, column)
        return decoded

    def to_pandas(self) -> pd.DataFrame:
        """The table as a pandas DataFrame."""
        return self.table.to_pandas(maps_as_pydicts="strict")

    def save(self, path: Path) -> None:
        """Writes the table to a Parquet file, atomically. Raises OSError."""
        content = pa.BufferOutputStream()
        pq.write_table(self.table, content, compression="zstd")
        replace_file(path, content.getvalue().to_pybytes())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads what `save` wrote. Raises DataError naming the file if it is something else."""
        try:
            return cls(pq.read_table(path))
        except (pa.ArrowException, OSError, DataError) as error:
            raise DataError(f"{path}: not a file of samples: {error}") from None


_OF_GROUP = [field.name for field in fields(Group) if field.name in SCHEMA.names]
_OF_TRAJECTORY = ["status", "reward", "reward_parts", "error"]
_COUNTS = ["num_prompt_tokens", "num_action_tokens"]


def segments_of(action_mask: NDArray[np.bool_]) -> list[int]:
    """The `segment_tokens` of a trajectory."""
    cuts = [0, *(np.flatnonzero(np.diff(action_mask)) + 1).tolist(), len(action_mask)]
    lengths = [end - begin for begin, end in pairwise(cuts)]
    return [0, *lengths] if action_mask[:1].any() else lengths


def _put(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    """The table with a column added, or replaced if there is one of this name."""
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), name, column)
    return table.append_column(name, column)


def _lists(arrays: Sequence[NDArray[Any]], kind: pa.DataType) -> pa.Array:
    """A column with an array per row."""
    ends = np.cumsum([len(array) for array in arrays], dtype=np.int32)
    values = np.concatenate(arrays) if arrays else np.empty(0)
    return pa.ListArray.from_arrays(pa.array([0, *ends], pa.int32()), pa.array(values, kind))


def _split(column: pa.Array) -> list[NDArray[Any]]:
    """The arrays of a column of lists, as views; empty where it is null."""
    values, offsets = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    return [values[begin:end] for begin, end in pairwise(offsets.tolist())]


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
        indices = rows[places[number]]
        part = Samples.of_groups([groups[places[number][0]]], step=step, outcome="trained").select(indices)
        parts.append(part.with_column(CHOSEN, pa.array([reason] * len(indices), pa.string())))
    return Samples.concat(parts or [_samples_of([])])


def append_rows(file: Path, samples: Samples) -> None:
    """Appends the samples to a file of lines. A disk that is full costs the record, not the run."""
    names = [name for name in samples.columns if name not in ARRAYS]
    rows = samples.table.select(names).to_pylist(maps_as_pydicts="strict")
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


class RecordedStep(NamedTuple):
    """The samples of a step, as they were recorded."""

    step: int
    read: Callable[[], Samples]
    end_bytes: int
    """The position of the next record in the file."""


def recorded_steps(run_dir: Path, offset: int) -> Iterator[RecordedStep]:
    """Yields the records that begin at this offset in the file, or after it. Raises DataError."""
    file = run_dir / FOLDER / TRAINED
    for step, lines in groupby(_heads(file, offset=offset), key=lambda line: line[0].step):
        places = [place for _, place in lines]
        end = places[-1].begin + places[-1].num_bytes
        yield RecordedStep(step or 0, partial(_read_at, file, places), end)


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
                for position in places[begin : begin + ROWS_AT_A_TIME]:
                    content.seek(position.begin)
                    rows.append(json.loads(content.read(position.num_bytes)))
                parts.append(_samples_of(rows))
    return Samples.concat(parts)


def _samples_of(rows: Iterable[dict[str, Any]]) -> Samples:
    """The samples of what `append_rows` wrote."""
    content = [{**row, "reward_parts": list(row["reward_parts"].items())} for row in rows]
    lists = [(name, pa.list_(kind)) for name, kind in EPISODES.items() if any(name in row for row in content)]
    return Samples(pa.Table.from_pylist(content, pa.schema([*SCHEMA, (CHOSEN, pa.string()), *lists])))
