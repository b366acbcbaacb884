r"""MATH (arXiv:2103.03874): competition problems whose solutions have the answer in \boxed{}.

Reads the folders of the first release (one .json per problem), Parquet files or JSON lines, for all subjects together
or in one folder per subject.
"""

from __future__ import annotations

from typing import Any

from asyncrl.data.convert.converter import TRAIN_AND_TEST, Converter, Example, SkippedError, Source, ask, text_field
from asyncrl.util.answers import last_boxed


def example(record: dict[str, Any], source: Source) -> Example:
    """The problem, with the boxed answer of its solution as ground truth."""
    problem = text_field(record, "problem", source.where)
    solution = text_field(record, "solution", source.where)
    answer = last_boxed(solution)
    if answer is None and isinstance(record.get("answer"), str):
        answer = record["answer"].strip()
    if not answer:
        raise SkippedError(r"no answer in \boxed{}")
    extra = {name: str(record[name]) for name in ("level", "type", "subject", "unique_id") if name in record}
    return Example(ask(problem), answer, {"question": problem, "answer": solution, **extra})


CONVERTER = Converter(
    data_source="DigitalLearningGmbH/MATH-lighteval",
    ability="math",
    style="rule",
    forms=(
        "data/{split}-*.parquet",
        "{split}-*.parquet",
        "*/{split}-*.parquet",
        "{split}.jsonl",
        "data/{split}.jsonl",
        "{split}/*/*.json",
        "MATH/{split}/*/*.json",
    ),
    splits=TRAIN_AND_TEST,
    instruction=r"Think step by step, then give the final answer in \boxed{}.",
    example=example,
)
