"""Finds trajectories of a run, also of a running one, in what its folder has of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from asyncrl.config import Config, load_config
from asyncrl.data.parquet import PromptTable
from asyncrl.errors import ConfigError, DataError
from asyncrl.replay.journal.reader import segments_of
from asyncrl.replay.journal.samples import JournalSamples
from asyncrl.samples import Samples
from asyncrl.util.files import check_writable
from asyncrl.util.tokenizer import Decoder, load_decoder

PARQUET = ".parquet"
Order = Literal["best", "worst", "longest", "newest"]
_COLUMN = {"best": "reward", "worst": "reward", "longest": "num_action_tokens"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """What to look for. Every condition that is given has to hold."""

    steps: tuple[int, int] | None = None
    """First and last step; the last one that is stored if this and all of the following are not given."""
    refunded: bool = False
    """Only trajectories of refunded groups; otherwise only trained ones."""
    failed: bool = False
    """Only trajectories without a reward, because it could not be computed."""
    data_source: str | None = None
    row: int | None = None
    """Row of the dataset."""
    grep: str | None = None
    """Regular expression that the completion contains."""
    order: Order = "newest"
    limit: int = 5

    @property
    def is_wide(self) -> bool:
        """True if all steps are searched."""
        return self.failed or not (self.data_source is None and self.row is None and self.grep is None)


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search."""

    samples: Samples
    """With the columns "prompt", "completion" and, where the dataset still has it, "ground_truth"."""
    searched: str
    """A sentence about where was searched."""


def find_samples(run_dir: Path, query: Query, *, special_tokens: bool = False) -> Found:
    """Returns the first `limit` trajectories that match. Raises ConfigError if there is no such run, if it has kept no
    trajectories, or for a bad regular expression, and JournalError if its journal is damaged."""
    config, journal = open_journal(run_dir)
    decoder, pattern = run_decoder(run_dir, config), _pattern(query.grep)
    found = Samples.concat([])
    for part in _parts(journal, query):
        part = part.select(_matches(part, query))
        if pattern is not None:
            texts = part.decode(decoder, special_tokens=special_tokens).table["completion"].to_pylist()
            part = part.select(np.array([pattern.search(text) is not None for text in texts], dtype=np.bool_))
        found = Samples.concat([found, part])
        if query.order != "newest":
            found = found.sort(_COLUMN[query.order], descending=query.order != "worst")
        elif len(found) >= query.limit:
            break
        found = found.select(slice(query.limit))
    found = found.select(slice(query.limit)).decode(decoder, special_tokens=special_tokens)
    return Found(with_ground_truths(found, config), describe(journal))


def find_group(run_dir: Path, ticket: int, *, special_tokens: bool = False) -> Samples:
    """Returns all trajectories of the group of a ticket, as `Found.samples`. Raises ConfigError if the run has not kept
    it, and as `find_samples` does."""
    config, journal = open_journal(run_dir)
    if ticket not in journal.groups:
        raise ConfigError(f"ticket {ticket}: the group is not stored; {describe(journal)}")
    group = journal.of_tickets([ticket]).decode(run_decoder(run_dir, config), special_tokens=special_tokens)
    return with_ground_truths(group, config)


def open_journal(run_dir: Path) -> tuple[Config, JournalSamples]:
    """The config of a run, and its journal. Raises ConfigError if there is no run, or no journal."""
    file, folder = run_dir / "config.yaml", run_dir / "journal"
    if not file.is_file():
        raise ConfigError(f"{run_dir}: not the folder of a run, config.yaml is missing; give runs/NAME")
    if not segments_of(folder):
        raise ConfigError(f"{run_dir}: has no journal, so that no trajectories are stored")
    return load_config(file), JournalSamples(folder)


def run_decoder(run_dir: Path, config: Config) -> Decoder:
    """The decoder of a run's tokenizer. Raises ConfigError if neither the run nor `model.path` has one."""
    for folder in (Path(config.model.path), run_dir / "model"):
        if (folder / "tokenizer.json").is_file() or (folder / "tokenizer_config.json").is_file():
            return load_decoder(str(folder), trust_remote_code=config.model.trust_remote_code)
    raise ConfigError(
        f"{run_dir}: its tokenizer is gone, it was in model.path = {config.model.path!r}; put it back, or copy it to "
        f"{run_dir / 'model'}"
    )


def with_ground_truths(samples: Samples, config: Config) -> Samples:
    """The samples with the column "ground_truth": null where the dataset cannot be read any more."""
    try:
        table = PromptTable(config)
        truths = [table[row]["ground_truth"] if row < len(table) else None for row in samples["row"]]
    except (ConfigError, DataError, OSError):
        truths = [None] * len(samples)
    return samples.with_column("ground_truth", pa.array(truths, pa.string()))


def check_samples_file(out: Path) -> None:
    """Raises ConfigError when samples cannot be written to this file, or it exists and holds something else."""
    if out.suffix != PARQUET:
        raise ConfigError(f"--out {out}: has to end in {PARQUET}")
    check_writable(out, "--out")
    if out.exists():
        try:
            Samples.load(out)
        except DataError:
            raise ConfigError(f"--out {out}: exists and holds no samples; name another file") from None


def describe(journal: JournalSamples) -> str:
    """A sentence about what the journal has."""
    steps, tickets = journal.complete_steps(), journal.groups
    if not tickets:
        return f"{journal.folder} has no groups yet"
    text = f"{journal.folder} has {len(tickets):,} groups, of tickets {min(tickets):,} to {max(tickets):,}"
    if steps:
        text += f", and steps {min(steps):,} to {max(steps):,}"
    return f"{text}; with journal.retention=all a run keeps all"


def _parts(journal: JournalSamples, query: Query) -> Iterator[Samples]:
    """What may match, the newest first."""
    if query.refunded:
        for ticket in reversed(journal.refunded()):
            yield journal.of_tickets([ticket])
        return
    steps = sorted(journal.steps, reverse=True)
    if query.steps is not None:
        steps = [step for step in steps if query.steps[0] <= step <= query.steps[1]]
    elif not query.is_wide:
        steps = steps[:1]
    for step in steps:
        yield journal.of_step(step)


def _matches(samples: Samples, query: Query) -> np.ndarray:
    """A mask of the rows that meet the conditions, but for the regular expression."""
    mask = np.ones(len(samples), dtype=np.bool_)
    if query.failed:
        mask &= np.array([bool(error) for error in samples.table["error"].to_pylist()], dtype=np.bool_)
    if query.data_source is not None:
        mask &= samples["data_source"] == query.data_source
    if query.row is not None:
        mask &= samples["row"] == query.row
    return mask


def _pattern(grep: str | None) -> re.Pattern[str] | None:
    try:
        return None if grep is None else re.compile(grep)
    except re.error as error:
        raise ConfigError(f"--grep {grep!r}: not a regular expression: {error}") from None


def parse_steps(text: str) -> tuple[int, int]:
    """First and last step of "20" or "10:20". Raises ConfigError for anything else."""
    first, colon, last = text.partition(":")
    if not first.isdecimal() or not (last.isdecimal() if colon else not last):
        raise ConfigError(f"--step {text!r}: has to be a step, or the first and the last one as in 10:20")
    return int(first), int(last or first)
