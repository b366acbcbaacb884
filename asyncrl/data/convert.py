r"""`asyncrl data NAME`: writes downloaded datasets as Parquet files in verl's schema.

- GSM8K (arXiv:2110.14168): word problems for grade school, as openai/gsm8k or the first release in JSON lines.
- MATH (arXiv:2103.03874): competition problems whose solutions have the answer in \boxed{}; the folders of the first
  release (one .json per problem), Parquet files or JSON lines, for all subjects together or one folder per subject.
- HH-RLHF (arXiv:2204.05862): dialogs with a chosen and a rejected last reply. The chosen reply is the ground truth;
  both are in extra_info, for reward models. In Anthropic's files `chosen` and `rejected` are complete transcripts; in
  Dahoas' (`full-hh-rlhf`) they are the replies to the column `prompt`.
"""

from __future__ import annotations

import gzip
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, DataError
from asyncrl.util.text import last_boxed, unknown_name

Record = dict[str, Any]
SPLITS = ("train", "test")
ANSWER_MARK = "####"
"""Precedes the final answer in a solution of GSM8K."""
SPEAKER = re.compile(r"\n\n(Human|Assistant):")
SPEAKER_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Example:
    """The part of a row that comes from a record."""

    chat: list[dict[str, str]]
    """Messages before the assistant's answer, without the instruction."""
    ground_truth: str
    extra_info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Converter:
    """The description of a dataset."""

    data_source: str
    """The dataset's name in verl's rewards."""
    ability: str
    example: Callable[[Record, Path, str], Example]
    """Returns the example of a record; called with the record, its file, and its location for messages. Raises
    SkippedError, and DataError for a malformed record."""
    forms: tuple[str, ...]
    """Glob patterns of the files of a split, `{split}` standing for its name; the first that matches is used."""
    instruction: str
    """Appended to the last user message, unless the command overrides it."""
    style: str = "rule"
    """verl's `reward_model.style`: "rule" for rewards from the ground truth, "model" for a reward model."""


class SkippedError(Exception):
    """The record is well-formed but yields no row. The text is the reason, the same for all such records."""


def convert(
    name: str, folder: Path, out: Path, *, split: str = "train", instruction: str | None = None
) -> tuple[int, Counter[str]]:
    """Writes a split of a downloaded dataset to `out`; returns the number of rows written, and the number of skipped
    records by reason.

    `instruction` replaces the text that the converter appends to the question. The same files produce the same bytes.
    Raises ConfigError when files are missing, no row is left, or `out` was not written by this command, and DataError
    that names file and row of a malformed record.
    """
    from asyncrl.data.row_files import check_rows_file, write_rows  # imports pyarrow

    converter = CONVERTERS[name]
    if split not in SPLITS:
        raise unknown_name("--split", split, SPLITS)
    check_rows_file(out)
    suffix = converter.instruction if instruction is None else instruction
    rows: list[Record] = []
    skipped: Counter[str] = Counter()
    for file in _find_files(folder, converter.forms, split):
        for index, (where, record) in enumerate(_read_records(file), start=len(rows) + skipped.total()):
            try:
                example = converter.example(record, file, where)
            except SkippedError as reason:
                skipped[str(reason)] += 1
                continue
            *before, last = example.chat
            if suffix:
                last = last | {"content": f"{last['content']}\n\n{suffix}"}
            rows.append(
                {
                    "data_source": converter.data_source,
                    "prompt": [*before, last],
                    "ability": converter.ability,
                    "reward_model": {"style": converter.style, "ground_truth": example.ground_truth},
                    "extra_info": {"split": split, "index": index} | example.extra_info,
                }
            )
    if not rows:
        raise ConfigError(f"--from {folder}: no row of the split {split!r} can be used ({describe_skipped(skipped)})")
    write_rows(out, rows)
    return len(rows), skipped


def describe_skipped(skipped: Counter[str]) -> str:
    """The number of skipped records for each reason, as text."""
    return ", ".join(f"{count} skipped: {reason}" for reason, count in sorted(skipped.items())) or "0 skipped"


def _find_files(folder: Path, forms: Sequence[str], split: str) -> list[Path]:
    """The files that match the first matching form, in natural sort order."""
    if not folder.is_dir():
        raise ConfigError(f"--from {folder}: no such folder; give the folder that the dataset was downloaded to")
    patterns = [form.format(split=split) for form in forms]
    for pattern in patterns:
        files = sorted((file for file in folder.glob(pattern) if file.is_file()), key=_natural)
        if files:
            return files
    raise ConfigError(
        f"--from {folder}: no file of the split {split!r} in it; looked for {', '.join(patterns)}. Give the folder "
        "that holds them, or another --split"
    )


def _natural(file: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", file.as_posix())]


def _read_records(file: Path) -> Iterator[tuple[str, Record]]:
    """(location for messages, record) of each row of a Parquet file, each line of JSON lines, or the object in a
    .json."""
    from asyncrl.data.row_files import json_object, open_rows

    if file.suffix == ".parquet":
        rows = open_rows(str(file))
        yield from ((f"{file}, row {number}", rows.row(number)) for number in range(rows.num_rows))
    elif file.suffix == ".json":
        yield str(file), json_object(_read_text(file), str(file), DataError)
    else:
        for number, line in enumerate(_read_text(file).split("\n"), start=1):
            if line.strip():
                where = f"{file}, line {number}"
                yield where, json_object(line, where, DataError)


def _read_text(file: Path) -> str:
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        return content.decode()
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}; download it again") from None


def _text_field(record: Record, name: str, where: str) -> str:
    value = record.get(name)
    if isinstance(value, str):
        return value
    if name not in record:
        raise DataError(f"{where}: {name!r} is missing; the fields are {', '.join(record)}")
    raise DataError(f"{where}: {name!r} = {value!r}; it must be a string")


def _ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _gsm8k(record: Record, file: Path, where: str) -> Example:
    question, solution = _text_field(record, "question", where), _text_field(record, "answer", where)
    _, mark, answer = solution.rpartition(ANSWER_MARK)
    answer = answer.strip().replace(",", "")
    if not mark or not answer:
        raise DataError(f"{where}: 'answer' does not end in {ANSWER_MARK} and a number: {solution[-40:]!r}")
    return Example(_ask(question), answer, {"question": question, "answer": solution})


def _math(record: Record, file: Path, where: str) -> Example:
    problem, solution = _text_field(record, "problem", where), _text_field(record, "solution", where)
    answer = last_boxed(solution)
    if answer is None and isinstance(record.get("answer"), str):
        answer = record["answer"].strip()
    if not answer:
        raise SkippedError(r"no answer in \boxed{}")
    extra = {name: str(record[name]) for name in ("level", "type", "subject", "unique_id") if name in record}
    return Example(_ask(problem), answer, {"question": problem, "answer": solution, **extra})


def _hh_rlhf(record: Record, file: Path, where: str) -> Example:
    if "prompt" in record:
        prompt = _text_field(record, "prompt", where).rstrip()
        record = {name: f"{prompt} {_text_field(record, name, where)}" for name in ("chosen", "rejected")}
    *chat, chosen = _transcript(record, "chosen", where)
    *other_chat, rejected = _transcript(record, "rejected", where)
    if chosen["role"] != "assistant" or rejected["role"] != "assistant":
        raise SkippedError("the assistant has not the last word")
    if chat != other_chat:
        raise SkippedError("chosen and rejected answer different dialogs")
    roles = [message["role"] for message in chat]
    if len(roles) % 2 == 0 or roles != (["user", "assistant"] * len(roles))[: len(roles)]:
        raise SkippedError("human and assistant do not take turns")
    if not chosen["content"] or not rejected["content"]:
        raise SkippedError("empty reply")
    extra = {"chosen": chosen["content"], "rejected": rejected["content"], "subset": file.parent.name}
    return Example(chat, chosen["content"], extra)


def _transcript(record: Record, name: str, where: str) -> list[dict[str, str]]:
    transcript = _text_field(record, name, where)
    start, *parts = SPEAKER.split(transcript)
    if start.strip() or not parts:
        raise DataError(f"{where}: {name!r} does not begin with 'Human:' or 'Assistant:': {transcript[:40]!r}")
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": SPEAKER_ROLES[speaker], "content": text.strip()} for speaker, text in pairs]


CONVERTERS = {
    "gsm8k": Converter(
        data_source="openai/gsm8k",
        ability="math",
        example=_gsm8k,
        forms=(
            "main/{split}-*.parquet",
            "{split}-*.parquet",
            "data/{split}-*.parquet",
            "{split}.jsonl",
            "grade_school_math/data/{split}.jsonl",
        ),
        instruction=f'Think step by step, then give the final answer after "{ANSWER_MARK}".',
    ),
    "math": Converter(
        data_source="DigitalLearningGmbH/MATH-lighteval",
        ability="math",
        example=_math,
        forms=(
            "data/{split}-*.parquet",
            "{split}-*.parquet",
            "*/{split}-*.parquet",
            "{split}.jsonl",
            "data/{split}.jsonl",
            "{split}/*/*.json",
            "MATH/{split}/*/*.json",
        ),
        instruction=r"Think step by step, then give the final answer in \boxed{}.",
    ),
    "hh-rlhf": Converter(
        data_source="Anthropic/hh-rlhf",
        ability="alignment",
        example=_hh_rlhf,
        forms=(
            "{split}.jsonl.gz",
            "{split}.jsonl",
            "*/{split}.jsonl.gz",
            "*/{split}.jsonl",
            "data/{split}-*.parquet",
            "*/{split}-*.parquet",
            "{split}-*.parquet",
        ),
        instruction="",
        style="model",
    ),
}
"""The converters, by their names on the command line."""
