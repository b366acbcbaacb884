"""HellaSwag (arXiv:1905.07830): which of four endings continues a text; as Rowan/hellaswag or in JSON lines."""

from __future__ import annotations

import re
from typing import Any

from asyncrl.data.convert.converter import Converter, Example, SkippedError, Source, ask, text_field
from asyncrl.errors import DataError

LETTERS = "ABCD"


def example(record: dict[str, Any], source: Source) -> Example:
    """The context with lettered endings, and the letter of the right one as ground truth."""
    where = source.where
    endings = record.get("endings")
    if not isinstance(endings, list) or len(endings) != 4 or not all(isinstance(text, str) for text in endings):
        raise DataError(f"{where}: 'endings' = {endings!r}; it must be a list of four strings")
    label = record.get("label")
    if label in (None, ""):
        raise SkippedError("no label")
    if str(label) not in {"0", "1", "2", "3"}:
        raise DataError(f"{where}: 'label' = {label!r}; it must be 0, 1, 2 or 3")
    context = clean(_context(record, where))
    topic = clean(text_field(record, "activity_label", where))
    choices = [clean(ending) for ending in endings]
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
    question = "\n".join([f"{topic}: {context}", "", "How does this go on?", *lines])
    extra = {name: record[name] for name in ("ind", "source_id", "split_type") if record.get(name) is not None}
    return Example(ask(question), LETTERS[int(str(label))], {"choices": choices, **extra})


def clean(text: str) -> str:
    """The text without WikiHow's marks: [title] becomes the end of a sentence, [step] and others are removed."""
    text = re.sub(r"([.?!]?)\s*\[title\]", lambda match: f"{match[1] or '.'} ", text)
    text = re.sub(r"\[[^\]]*\]", " ", text)
    return re.sub(r"\s+", " ", text).strip().removeprefix(". ")


def _context(record: dict[str, Any], where: str) -> str:
    if "ctx_a" not in record:
        return text_field(record, "ctx", where)
    start, rest = text_field(record, "ctx_a", where), text_field(record, "ctx_b", where)
    return f"{start} {rest[:1].upper()}{rest[1:]}"


CONVERTER = Converter(
    data_source="Rowan/hellaswag",
    ability="commonsense",
    style="rule",
    forms=("data/{split}-*.parquet", "{split}-*.parquet", "hellaswag_{split}.jsonl", "data/hellaswag_{split}.jsonl"),
    splits={"train": ("train",), "validation": ("validation", "val"), "test": ("test",)},
    instruction="Answer with the letter only.",
    example=example,
)
