"""GSM8K (arXiv:2110.14168): word problems for grade school, as openai/gsm8k or the first release in JSON lines."""

from __future__ import annotations

from typing import Any

from asyncrl.data.convert.converter import TRAIN_AND_TEST, Converter, Example, Source, ask, text_field
from asyncrl.errors import DataError

MARK = "####"
"""Precedes the final answer in a solution."""


def example(record: dict[str, Any], source: Source) -> Example:
    """The question, with the number after the mark as ground truth."""
    question = text_field(record, "question", source.where)
    solution = text_field(record, "answer", source.where)
    _, mark, answer = solution.rpartition(MARK)
    answer = answer.strip().replace(",", "")
    if not mark or not answer:
        raise DataError(f"{source.where}: 'answer' does not end in {MARK} and a number: {solution[-40:]!r}")
    return Example(ask(question), answer, {"question": question, "answer": solution})


CONVERTER = Converter(
    data_source="openai/gsm8k",
    ability="math",
    style="rule",
    forms=(
        "main/{split}-*.parquet",
        "{split}-*.parquet",
        "data/{split}-*.parquet",
        "{split}.jsonl",
        "grade_school_math/data/{split}.jsonl",
    ),
    splits=TRAIN_AND_TEST,
    instruction=f'Think step by step, then give the final answer after "{MARK}".',
    example=example,
)
