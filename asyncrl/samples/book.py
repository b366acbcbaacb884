"""The samples that a run records in its folder: some of the trained batches, and every evaluated completion.

    samples/trained.jsonl        a few trajectories of a step, every few seconds; written by learner rank 0
    samples/eval-000050.jsonl    the completions of version 50; written by the replay queue

A line is one trajectory: a row of `Samples` with its tokens, and "chosen", why it is there. Readers decode the tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import structlog

from asyncrl.errors import DataError
from asyncrl.samples.table import ARRAYS, EPISODES, SCHEMA, Samples
from asyncrl.types import Group

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
    order = np.argsort([member[0].reward for member in members], kind="stable").tolist()
    wanted: dict[str, int | None] = dict.fromkeys(REASONS)
    if members:
        wanted |= {"best": order[-1], "worst": order[0], "median": order[len(order) // 2]}
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
    return Samples.concat(parts or [samples_of_rows([])])


def append_rows(file: Path, samples: Samples) -> None:
    """Appends the samples to a file of lines. A disk that is full costs the record, not the run."""
    kept = [name for name in samples.columns if name not in ARRAYS]
    rows = samples.table.select(kept).to_pylist(maps_as_pydicts="strict")
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        with file.open("a", encoding="utf-8") as lines:
            lines.write("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        log.warning("samples are not recorded", file=str(file), error=str(error))


def read_trained(run_dir: Path) -> Samples:
    """The recorded samples of all steps, in their order; one that was recorded again after a restart is there once.
    Raises DataError."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in _read_rows(run_dir / FOLDER / TRAINED):
        own = found.setdefault((row["step"], row[CHOSEN]), [])
        if own and (own[-1]["ticket"] != row["ticket"] or own[-1]["index"] >= row["index"]):
            own.clear()  # it was recorded again
        own.append(row)
    return samples_of_rows(sorted((row for own in found.values() for row in own), key=lambda row: row["step"]))


def read_latest(run_dir: Path) -> Samples:
    """The recorded samples of the latest step; reads the end of the file only. Raises DataError."""
    rows = _read_rows(run_dir / FOLDER / TRAINED, last_bytes=1 << 22)
    return samples_of_rows(row for row in rows if row["step"] == rows[-1]["step"])


def evaluated_versions(run_dir: Path) -> list[int]:
    """The versions of which evaluated completions are recorded, in order."""
    return sorted(int(file.stem.partition("-")[2]) for file in (run_dir / FOLDER).glob("eval-*.jsonl"))


def read_evaluated(run_dir: Path, version: int) -> Samples:
    """The recorded completions of one evaluation. Raises DataError."""
    rows = _read_rows(evaluated_file(run_dir, version))
    unique = {(row["row"], row["index"]): row for row in rows}
    return samples_of_rows(unique[key] for key in sorted(unique))


def evaluated_file(run_dir: Path, version: int) -> Path:
    """The file with the completions of one evaluation."""
    return run_dir / FOLDER / EVALUATED.format(version)


def samples_of_rows(rows: Iterable[dict[str, Any]]) -> Samples:
    """The samples of what `append_rows` wrote."""
    content = [{**row, "reward_parts": list(row["reward_parts"].items())} for row in rows]
    lists = [(name, pa.list_(kind)) for name, kind in EPISODES.items() if any(name in row for row in content)]
    return Samples(pa.Table.from_pylist(content, pa.schema([*SCHEMA, (CHOSEN, pa.string()), *lists])))


def _read_rows(file: Path, *, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """The rows in the complete lines of a file; none if there is no such file."""
    if not file.is_file():
        return []
    with file.open("rb") as content:
        skipped = max(file.stat().st_size - last_bytes, 0) if last_bytes is not None else 0
        content.seek(skipped)
        lines = content.read().splitlines(keepends=True)
    try:
        return [json.loads(line) for line in lines[bool(skipped) :] if line.endswith(b"\n")]
    except ValueError as error:
        raise DataError(f"{file}: a line is not JSON: {error}; delete the file to continue without it") from None
