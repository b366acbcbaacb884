r"""MATH (arXiv:2103.03874): competition problems whose solutions have the answer in \boxed{}.

Reads the folders of the first release (one .json per problem), Parquet files or JSON lines, for all subjects together
or in one folder per subject.
"""

from __future__ import annotations

import re
from typing import Any

from asyncrl.data.convert.converter import TRAIN_AND_TEST, Converter, Example, SkippedError, Source, ask, text_field


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


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} (or \fbox{...}), including nested braces; None if there is none.

    Also accepts `\boxed 5`, up to the next dollar sign or space.
    """
    found = list(re.finditer(r"\\(?:boxed|fbox)(?![A-Za-z])\s*", text))
    if not found:
        return None
    start = found[-1].end()
    if not text.startswith("{", start):
        return re.match(r"[^$\s]*", text[start:])[0].rstrip(".,") or None  # type: ignore[index]
    depth = 0
    # An escaped brace does not nest.
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return text[start + 1 : start + brace.start()].strip() or None
    return None


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
