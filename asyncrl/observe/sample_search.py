"""Finds the trajectories that are stored in the folder of a run, also while the run continues."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from asyncrl.observe.samples import FOLDER, Part, Recorded, Samples, count_evaluated, evaluated_versions, read_evaluated
from asyncrl.replay.history import JournalSamples
from asyncrl.replay.journal import segments_of
from asyncrl.util.files import check_writable
from asyncrl.util.model_files import Decoder, load_decoder

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

    @property
    def is_wide(self) -> bool:
        """True if all steps are searched."""
        return self.failed or not (self.data_source is None and self.row is None and self.grep is None)


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
            for version in _in_range(self.versions, query):
                yield read_evaluated(self.run_dir, version)
            return
        if query.refunded:
            for ticket in reversed(self.journal.refunded() if self.journal is not None else []):
                yield self.of_ticket(ticket)
            return
        in_journal = self.journal.steps if self.journal is not None else {}
        for step in _in_range(in_journal.keys() | set(self.recorded.steps.tolist()), query):
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
        texts = [] if self.journal is None else [_describe(self.journal)]
        if len(self.recorded):
            steps = self.recorded.steps
            texts.append(
                f"{self.run_dir / FOLDER} has {len(steps):,} trajectories of the steps {steps[0]:,} to {steps[-1]:,}"
            )
        if self.versions:
            texts.append(f"evaluations of {len(self.versions):,} versions up to {self.versions[-1]:,}")
        return "; ".join(texts) + "; with journal.retention=all a run keeps all"


def find_samples(run_dir: Path, query: Query, *, special_tokens: bool = False) -> Found:
    """Returns the first `limit` trajectories that match. Raises ConfigError if the run is unknown, if it has kept no
    trajectories, or for a bad regular expression, JournalError if its journal is damaged, and DataError if its samples
    are."""
    stored, config = Stored.open(run_dir), load_config(run_dir / "config.yaml")
    decoder, pattern = run_decoder(run_dir, config), _pattern(query.grep)
    found = Samples.concat([])
    for part in stored.parts(query):
        part = part.select(_matches(part, query))
        if pattern is not None:
            texts = part.decode(decoder, special_tokens=special_tokens).table["completion"].to_pylist()
            part = part.select(np.array([pattern.search(text) is not None for text in texts], dtype=np.bool_))
        found = Samples.concat([found, part])
        if query.order != "newest":
            found = found.sort(_COLUMN[query.order], descending=query.order != "worst")
        elif found.begins_member.sum() >= query.limit:
            break
        found = first_members(found, query.limit)
    found = first_members(found, query.limit).decode(decoder, special_tokens=special_tokens)
    if (shown := conversations(run_dir, config, decoder, special_tokens=special_tokens)) is not None:
        found = shown.add_to(found)
    return Found(with_ground_truths(found, config, split="eval" if query.evaluated else "train"), stored.describe())


def first_members(samples: Samples, count: int) -> Samples:
    """The rows of the first members of groups."""
    return samples.select(np.cumsum(samples.begins_member) <= count)


def conversations(
    run_dir: Path, config: Config, decoder: Decoder, *, special_tokens: bool = False
) -> Conversations | None:
    """Shows the episodes of a run; None without an environment."""
    folder = tokenizer_folder(run_dir, config)
    return Conversations.of(config, folder, decoder, special_tokens=special_tokens)


def stored_group(run_dir: Path, ticket: int) -> Samples:
    """Returns the trajectories of the group of a ticket: all if the journal has them, otherwise those that are
    recorded. Raises ConfigError if there are none, and as `find_samples` does."""
    stored = Stored.open(run_dir)
    group = stored.of_ticket(ticket)
    if not len(group):
        raise ConfigError(f"ticket {ticket}: the group is not stored; {stored.describe()}")
    return group


def find_group(run_dir: Path, ticket: int, *, special_tokens: bool = False) -> Samples:
    """Returns the `stored_group` of a ticket, as `Found.samples`. Raises the same errors."""
    group, config = stored_group(run_dir, ticket), load_config(run_dir / "config.yaml")
    decoder = run_decoder(run_dir, config)
    return with_ground_truths(group.decode(decoder, special_tokens=special_tokens), config)


def run_decoder(run_dir: Path, config: Config) -> Decoder:
    """The decoder of a run's tokenizer. Raises ConfigError if neither the run nor `model.path` has one."""
    return load_decoder(tokenizer_folder(run_dir, config), trust_remote_code=config.model.trust_remote_code)


def tokenizer_folder(run_dir: Path, config: Config) -> str:
    """The folder of a run's tokenizer. Raises ConfigError if neither the run nor `model.path` has one."""
    for folder in (Path(config.model.path), run_dir / "model"):
        if (folder / "tokenizer.json").is_file() or (folder / "tokenizer_config.json").is_file():
            return str(folder)
    raise ConfigError(
        f"{run_dir}: its tokenizer is gone, it was in model.path = {config.model.path!r}; put it back, or copy it to "
        f"{run_dir / 'model'}"
    )


def with_ground_truths(samples: Samples, config: Config, *, split: Split = "train") -> Samples:
    """The samples with the column "ground_truth", of the rows of a split: null where the dataset cannot be read any
    more."""
    try:
        table = PromptTable(config, split=split)
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


def _describe(journal: JournalSamples) -> str:
    steps, tickets = journal.complete_steps(), journal.groups
    if not tickets:
        return f"{journal.folder} has no groups yet"
    text = f"{journal.folder} has {len(tickets):,} groups, of tickets {min(tickets):,} to {max(tickets):,}"
    return text + (f", and steps {min(steps):,} to {max(steps):,}" if steps else "")


def _in_range(steps: Iterable[int], query: Query) -> list[int]:
    """The steps to search, the newest first."""
    newest_first = sorted(steps, reverse=True)
    if query.steps is not None:
        return [step for step in newest_first if query.steps[0] <= step <= query.steps[1]]
    return newest_first if query.is_wide else newest_first[:1]


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


def page_samples(run_dir: Path) -> PageSamples | None:
    """Returns a choice of the run's recorded samples for its document, whose size does not depend on the run's length;
    None if there are none or they cannot be read."""
    with observing("samples of the report"):
        config = load_config(run_dir / "config.yaml")
        recorded = Recorded(run_dir)
        trained = recorded.read(spread(len(recorded), MAX_SAMPLES))
        evaluated = _page_evaluations(run_dir)
        if len(trained) or len(evaluated):
            decoder = run_decoder(run_dir, config)
            shown = conversations(run_dir, config, decoder)
            return PageSamples(
                with_texts(trained, decoder, shown, config, "train"),
                with_texts(evaluated, decoder, shown, config, "eval"),
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


def with_texts(
    samples: Samples, decoder: Decoder, shown: Conversations | None, config: Config, split: Split
) -> Samples:
    """The samples with their texts and ground truths, and `shown` as conversations; the column "raw" has the
    completions with special tokens."""
    raw = samples.decode(decoder, special_tokens=True).table["completion"].combine_chunks()
    samples = samples if shown is None else shown.add_to(samples)
    return with_ground_truths(samples.decode(decoder), config, split=split).with_column("raw", raw)


CONVERSATION = "conversation"
"""The column of samples with the lines of a trajectory; null where its turns are not known."""
_LINES = pa.list_(
    pa.struct([("role", pa.string()), ("text", pa.string()), ("said", pa.bool_()), ("version", pa.int32()),
               ("reward", pa.float64())])
)  # fmt: skip


class Line(NamedTuple):
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


class Conversations:
    """Shows trajectories of episodes."""

    def __init__(self, decode: Callable[[Sequence[int]], str], display: Display | None) -> None:
        """`display` belongs to the model's chat template; without one, conversations are plain text."""
        self._decode, self._display = decode, display

    @classmethod
    def of(cls, config: Config, folder: str, decoder: Decoder, *, special_tokens: bool = False) -> Conversations | None:
        """Those of a run with its tokenizer in a folder, with `special_tokens` as plain text with these. None without
        an environment."""
        if config.environment.name is None:
            return None
        from asyncrl.environments.dialogue.conversation import Display
        from asyncrl.environments.dialogue.dialogue import Dialogue
        from asyncrl.environments.dialogue.rendering import DialogueError

        def decode(tokens: Sequence[int]) -> str:
            return decoder([tokens], special_tokens=special_tokens)[0]

        if special_tokens:
            return cls(decode, None)
        try:
            return cls(decode, Display(Dialogue.of(config, folder=folder).chat))
        except (ConfigError, DialogueError):  # the model has no chat template
            return cls(decode, None)

    def lines(self, samples: Samples, row: int) -> list[Line]:
        """The lines of a trajectory. Raises DataError if its turns are not known."""
        parts = samples.turns(row)
        prompt = samples["tokens"][row][: int(samples["num_prompt_tokens"][row])].tolist()
        display = self._display if self._display is not None and self._display.is_chat(prompt) else None
        has_rewards = any(part.reward for part in parts)
        lines = [Line(role or "prompt", text, said=False) for role, text in self._heard(prompt, display, "prompt")]
        for part in parts:
            if not part.said:
                lines += [
                    Line(role, text, said=False) for role, text in self._heard(part.tokens, display, "environment")
                ]
                continue
            said = self._said(part, display)
            lines += [Line(role, text, said=True, version=part.version) for role, text in said]
            lines[-1] = lines[-1]._replace(reward=part.reward if has_rewards else None)
        return lines

    def add_to(self, samples: Samples) -> Samples:
        """The samples with the column CONVERSATION."""
        return samples.with_column(
            CONVERSATION, pa.array([self._row(samples, row) for row in range(len(samples))], _LINES)
        )

    def _row(self, samples: Samples, row: int) -> list[dict[str, Any]] | None:
        try:
            return [line._asdict() for line in self.lines(samples, row)]
        except DataError:  # it was recorded without its turns
            return None

    def _heard(self, tokens: Sequence[int], display: Display | None, role: str) -> list[tuple[str, str]]:
        return [(role, self._decode(tokens))] if display is None else list(display.heard(tokens))

    def _said(self, part: Part, display: Display | None) -> list[tuple[str, str]]:
        return [("policy", self._decode(part.tokens))] if display is None else list(display.said(part.tokens))


def in_one_line(lines: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The prompt, and the rest with observations in brackets: `?1*2 [>2] 2`."""
    first = next((number for number, line in enumerate(lines) if line["said"]), len(lines))
    rest = [line["text"] if line["said"] else f"[{line['text']}]" for line in lines[first:]]
    return "\n".join(line["text"] for line in lines[:first]), " ".join(rest)
