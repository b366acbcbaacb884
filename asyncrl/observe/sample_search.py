"""Finds the trajectories that are stored in the folder of a run, also while the run continues."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.data.rows import PromptTable, Split
from asyncrl.errors import ConfigError, DataError, observing
from asyncrl.observe.document import MAX_SAMPLES, PageSamples
from asyncrl.observe.samples import FOLDER, Recorded, Samples, count_evaluated, evaluated_versions, read_evaluated
from asyncrl.replay.history import JournalSamples
from asyncrl.replay.journal import segments_of
from asyncrl.util.files import check_writable
from asyncrl.util.model_files import load_decoder

if TYPE_CHECKING:
    from asyncrl.environments.dialogue.conversation import Display

PARQUET = ".parquet"
Order = Literal["best", "worst", "longest", "newest"]
MAX_EVALUATIONS = 20
"""Evaluations of which a page has completions: the latest ones, and as many of those before."""
MAX_COMPLETIONS = 1000
"""Completions of evaluations that a page has, unless one row has more."""
MAX_EVALUATION_BYTES = 16 << 20
"""Bytes at the start of an evaluation's file from which they are chosen."""
_COLUMN = {"best": "reward", "worst": "reward", "longest": "num_action_tokens"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """A search for trajectories. All conditions that are set have to hold."""

    steps: tuple[int, int] | None = None
    """First and last step; the last stored step if neither this nor any of the following is set."""
    evaluated: bool = False
    """Only completions of evaluations, whose steps are the versions that were evaluated."""
    refunded: bool = False
    """Only trajectories of refunded groups. Without this and `evaluated` only trained ones."""
    failed: bool = False
    """Only trajectories without a reward, because it could not be computed."""
    data_source: str | None = None
    row: int | None = None
    """Row of the dataset."""
    grep: str | None = None
    """Regular expression that the completion contains."""
    order: Order = "newest"
    limit: int = 5

    def in_range(self, steps: Iterable[int]) -> list[int]:
        """The steps to search, the newest first."""
        newest_first = sorted(steps, reverse=True)
        if self.steps is not None:
            return [step for step in newest_first if self.steps[0] <= step <= self.steps[1]]
        is_wide = self.failed or not (self.data_source is None and self.row is None and self.grep is None)
        return newest_first if is_wide else newest_first[:1]

    def matches(self, samples: Samples) -> np.ndarray:
        """A mask of the rows that meet the conditions, but for the regular expression."""
        mask = np.ones(len(samples), dtype=np.bool_)
        if self.failed:
            mask &= np.array([bool(error) for error in samples.table["error"].to_pylist()], dtype=np.bool_)
        if self.data_source is not None:
            mask &= samples["data_source"] == self.data_source
        if self.row is not None:
            mask &= samples["row"] == self.row
        return mask


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search."""

    samples: Samples
    """With the columns "prompt", "completion" and, where the dataset still has it, "ground_truth"; with an environment
    also CONVERSATION."""
    searched: str
    """A sentence that names the places that were searched."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The trajectories that are stored in a run's folder."""

    run_dir: Path
    journal: JournalSamples | None
    """All groups of the steps that it still contains."""
    recorded: Recorded
    """A few trajectories of many steps."""
    versions: list[int]
    """Versions whose evaluations are recorded."""

    @classmethod
    def open(cls, run_dir: Path) -> Self:
        """Returns the stored trajectories. Raises ConfigError if there is no run or nothing is stored, DataError or
        JournalError for a damaged file."""
        folder = run_dir / "journal"
        if not (run_dir / "config.yaml").is_file():
            raise ConfigError(f"{run_dir}: not the folder of a run, config.yaml is missing; give runs/NAME")
        journal = JournalSamples(folder) if segments_of(folder) else None
        stored = cls(run_dir, journal, Recorded(run_dir), evaluated_versions(run_dir))
        if journal is None and not len(stored.recorded) and not stored.versions:
            raise ConfigError(f"{run_dir}: has neither a journal nor samples/, so that no trajectories are stored")
        return stored

    def parts(self, query: Query) -> Iterator[Samples]:
        """Yields the trajectories that may match, newest first: for each step all of those in the journal, or the
        recorded ones if it is no longer there."""
        if query.evaluated:
            for version in query.in_range(self.versions):
                yield read_evaluated(self.run_dir, version)
            return
        if query.refunded:
            for ticket in reversed(self.journal.refunded() if self.journal is not None else []):
                yield self.of_ticket(ticket)
            return
        in_journal = self.journal.steps if self.journal is not None else {}
        for step in query.in_range(in_journal.keys() | set(self.recorded.steps.tolist())):
            if self.journal is not None and step in in_journal:
                yield self.journal.of_step(step)
            else:
                yield self.recorded.read(self.recorded.steps == step)

    def of_ticket(self, ticket: int) -> Samples:
        """The trajectories of a ticket; empty if none are stored."""
        if self.journal is not None and ticket in self.journal.groups:
            return self.journal.of_tickets([ticket])
        return self.recorded.read(self.recorded.tickets == ticket).sort("index")

    def describe(self) -> str:
        """Returns a sentence about the stored samples."""
        texts: list[str] = []
        if self.journal is not None and (tickets := self.journal.groups):
            text = f"{self.journal.folder} has {len(tickets):,} groups, of tickets {min(tickets):,} to {max(tickets):,}"
            steps = self.journal.complete_steps()
            texts.append(text + (f", and steps {min(steps):,} to {max(steps):,}" if steps else ""))
        elif self.journal is not None:
            texts.append(f"{self.journal.folder} has no groups yet")
        if len(self.recorded):
            steps, folder = self.recorded.steps, self.run_dir / FOLDER
            texts.append(f"{folder} has {len(steps):,} trajectories of the steps {steps[0]:,} to {steps[-1]:,}")
        if self.versions:
            texts.append(f"evaluations of {len(self.versions):,} versions up to {self.versions[-1]:,}")
        return "; ".join(texts) + "; with journal.retention=all a run keeps all"


def find_samples(run_dir: Path, query: Query, *, special_tokens: bool = False) -> Found:
    """Returns the first `limit` trajectories that match. Raises ConfigError if the run is unknown, if it has kept no
    trajectories, or for a bad regular expression, JournalError if its journal is damaged, and DataError if its samples
    are."""
    stored, texts = Stored.open(run_dir), RunTexts(run_dir, special_tokens=special_tokens)
    try:
        pattern = None if query.grep is None else re.compile(query.grep)
    except re.error as error:
        raise ConfigError(f"--grep {query.grep!r}: not a regular expression: {error}") from None
    samples = Samples.concat([])
    for part in stored.parts(query):
        part = part.select(query.matches(part))
        if pattern is not None:
            completions = texts.decode(part).table["completion"].to_pylist()
            part = part.select(np.array([pattern.search(text) is not None for text in completions], dtype=np.bool_))
        samples = Samples.concat([samples, part])
        if query.order != "newest":
            samples = samples.sort(_COLUMN[query.order], descending=query.order != "worst")
        elif samples.begins_member.sum() >= query.limit:
            break
        samples = _first_members(samples, query.limit)
    split = "eval" if query.evaluated else "train"
    return Found(texts.add_to(_first_members(samples, query.limit), split), stored.describe())


def _first_members(samples: Samples, count: int) -> Samples:
    return samples.select(np.cumsum(samples.begins_member) <= count)


def find_group(run_dir: Path, ticket: int, *, special_tokens: bool = False, with_raw: bool = False) -> Samples:
    """Returns the trajectories of the group of a ticket, as `Found.samples`: all if the journal has them, otherwise
    those that are recorded. Raises ConfigError if there are none, and as `find_samples` does."""
    stored = Stored.open(run_dir)
    group = stored.of_ticket(ticket)
    if not len(group):
        raise ConfigError(f"ticket {ticket}: the group is not stored; {stored.describe()}")
    return RunTexts(run_dir, special_tokens=special_tokens).add_to(group, "train", with_raw=with_raw)


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


def parse_steps(text: str) -> tuple[int, int]:
    """First and last step of "20" or "10:20". Raises ConfigError for anything else."""
    first, colon, last = text.partition(":")
    if not first.isdecimal() or not (last.isdecimal() if colon else not last):
        raise ConfigError(f"--step {text!r}: has to be a step, or the first and the last one as in 10:20")
    return int(first), int(last or first)


def page_samples(run_dir: Path) -> PageSamples | None:
    """Returns a choice of the run's recorded samples for its document, whose size does not depend on the run's length;
    None if there are none or they cannot be read."""
    with observing("samples of the report"):
        recorded = Recorded(run_dir)
        trained = recorded.read(spread(len(recorded), MAX_SAMPLES))
        evaluated = _page_evaluations(run_dir)
        if len(trained) or len(evaluated):
            texts = RunTexts(run_dir)
            return PageSamples(
                texts.add_to(trained, "train", with_raw=True), texts.add_to(evaluated, "eval", with_raw=True)
            )
    return None


def _page_evaluations(run_dir: Path) -> Samples:
    """Completions of the same rows in some evaluations, the latest ones among them; "step" is their version."""
    versions = evaluated_versions(run_dir)
    latest = versions[-MAX_EVALUATIONS // 2 :]
    former = versions[: -len(latest) or None]
    chosen = [*(former[at] for at in spread(len(former), MAX_EVALUATIONS // 2)), *latest] if latest else []
    if not chosen:
        return Samples.concat([])
    counts = count_evaluated(run_dir, chosen[-1], max_bytes=MAX_EVALUATION_BYTES)
    members = max(counts.values(), default=1)
    num_rows = max(1, min(MAX_SAMPLES, MAX_COMPLETIONS // members) // len(chosen))
    rows = sorted(counts)[:num_rows]
    parts = [read_evaluated(run_dir, version, rows=rows, max_bytes=MAX_EVALUATION_BYTES) for version in chosen]
    return Samples.concat(
        part.with_column("step", [version] * len(part)) for version, part in zip(chosen, parts, strict=True)
    )


def spread(count: int, limit: int) -> list[int]:
    """At most `limit` indices below `count`, evenly spread, the first and the last among them."""
    return np.unique(np.linspace(0, max(count - 1, 0), min(count, limit)).round()).astype(int).tolist()


CONVERSATION = "conversation"
"""The column of samples with the lines of a trajectory; null where its turns are not known."""
_LINES = pa.list_(
    pa.struct([("role", pa.string()), ("text", pa.string()), ("said", pa.bool_()), ("version", pa.int32()),
               ("reward", pa.float64())])
)  # fmt: skip


class ConversationLine(NamedTuple):
    """A message of a conversation, or a part of one."""

    role: str
    """That of the message; "reasoning" and "calls" for these parts of the policy's. In plain text "prompt", "policy"
    and "environment"."""
    text: str
    said: bool
    """True for the policy's text."""
    version: int | None = None
    """The newest version that sampled a token of it, where that is known."""
    reward: float | None = None
    """That of the turn, on its last line, if the environment rewarded turns of the trajectory."""


class RunTexts:
    """Turns the tokens of a run's samples into texts, and its episodes into conversations."""

    def __init__(self, run_dir: Path, config: Config | None = None, *, special_tokens: bool = False) -> None:
        """Raises ConfigError if neither the run nor `model.path` has the tokenizer."""
        self.config = config = config or load_config(run_dir / "config.yaml")
        folder = tokenizer_folder(run_dir, config)
        self._decoder = load_decoder(folder, trust_remote_code=config.model.trust_remote_code)
        self._special_tokens = special_tokens
        self._display: Display | None = None
        """For the model's chat template; without one, and with special tokens, conversations are plain text."""
        if config.environment.name is not None and not special_tokens:
            self._display = _display_of(config, folder)

    def decode(self, samples: Samples) -> Samples:
        """The samples with the columns "prompt" and "completion"."""
        return samples.decode(self._decoder, special_tokens=self._special_tokens)

    def converse(self, samples: Samples) -> Samples:
        """The samples with the column CONVERSATION if the run has an environment."""
        if self.config.environment.name is None:
            return samples
        rows = [self._lines(samples, row) for row in range(len(samples))]
        return samples.with_column(CONVERSATION, pa.array(rows, _LINES))

    def add_to(self, samples: Samples, split: Split, *, with_raw: bool = False) -> Samples:
        """The samples with texts, conversations and ground truths, which are null where the dataset cannot be read any
        more; `with_raw` adds the column "raw", the completions with special tokens."""
        raw = samples.decode(self._decoder, special_tokens=True).table["completion"] if with_raw else None
        samples = self.converse(self.decode(samples))
        try:
            table = PromptTable(self.config, split=split)
            truths = [table[row]["ground_truth"] if row < len(table) else None for row in samples["row"]]
        except (ConfigError, DataError, OSError):
            truths = [None] * len(samples)
        samples = samples.with_column("ground_truth", pa.array(truths, pa.string()))
        return samples if raw is None else samples.with_column("raw", raw.combine_chunks())

    def _lines(self, samples: Samples, row: int) -> list[dict[str, Any]] | None:
        """The lines of a trajectory; None if it was recorded without its turns."""
        try:
            parts = samples.turns(row)
        except DataError:
            return None
        prompt = samples["tokens"][row][: int(samples["num_prompt_tokens"][row])].tolist()
        display = self._display if self._display is not None and self._display.is_chat(prompt) else None

        def texts_of(tokens: Sequence[int], role: str) -> list[tuple[str, str]]:
            if display is None:
                return [(role, self._decoder([tokens], special_tokens=self._special_tokens)[0])]
            return list(display.said(tokens) if role == "policy" else display.heard(tokens))

        has_rewards = any(part.reward for part in parts)
        lines = [ConversationLine(role or "prompt", text, said=False) for role, text in texts_of(prompt, "prompt")]
        for part in parts:
            texts = texts_of(part.tokens, "policy" if part.said else "environment")
            lines += [ConversationLine(role, text, part.said, part.version) for role, text in texts]
            if part.said and has_rewards:
                lines[-1] = lines[-1]._replace(reward=part.reward)
        return [line._asdict() for line in lines]


def _display_of(config: Config, folder: str) -> Display | None:
    from asyncrl.environments.dialogue.conversation import Display
    from asyncrl.environments.dialogue.dialogue import Dialogue
    from asyncrl.environments.dialogue.rendering import DialogueError

    try:
        return Display(Dialogue.of(config, folder=folder).chat)
    except (ConfigError, DialogueError):  # the model has no chat template
        return None


def tokenizer_folder(run_dir: Path, config: Config) -> str:
    """The folder of a run's tokenizer. Raises ConfigError if neither the run nor `model.path` has one."""
    for folder in (Path(config.model.path), run_dir / "model"):
        if (folder / "tokenizer.json").is_file() or (folder / "tokenizer_config.json").is_file():
            return str(folder)
    raise ConfigError(
        f"{run_dir}: its tokenizer is gone, it was in model.path = {config.model.path!r}; put it back, or copy it to "
        f"{run_dir / 'model'}"
    )


def in_one_line(lines: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The prompt, and the rest with observations in brackets: `?1*2 [>2] 2`."""
    first = next((number for number, line in enumerate(lines) if line["said"]), len(lines))
    rest = [line["text"] if line["said"] else f"[{line['text']}]" for line in lines[first:]]
    return "\n".join(line["text"] for line in lines[:first]), " ".join(rest)
