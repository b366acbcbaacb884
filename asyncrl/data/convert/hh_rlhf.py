"""Anthropic's HH-RLHF (arXiv:2204.05862): dialogs with a chosen and a rejected last reply.

The chosen reply is the ground truth; both replies are in extra_info, for reward models. In Anthropic's files
`chosen` and `rejected` are complete transcripts; in Dahoas' (`full-hh-rlhf`) they are the replies to the
column `prompt`.
"""

from __future__ import annotations

import re
from typing import Any

from asyncrl.data.convert.converter import TRAIN_AND_TEST, Converter, Example, SkippedError, Source, text_field
from asyncrl.errors import DataError

TURN = re.compile(r"\n\n(Human|Assistant):")
ROLES = {"Human": "user", "Assistant": "assistant"}


def example(record: dict[str, Any], source: Source) -> Example:
    """The dialog up to the last reply, with the chosen reply as ground truth."""
    record = _as_transcripts(record, source.where)
    *chat, chosen = turns(record, "chosen", source.where)
    *other_chat, rejected = turns(record, "rejected", source.where)
    if chosen["role"] != "assistant" or rejected["role"] != "assistant":
        raise SkippedError("the assistant has not the last word")
    if chat != other_chat:
        raise SkippedError("chosen and rejected answer different dialogs")
    roles = [message["role"] for message in chat]
    if len(roles) % 2 == 0 or roles != (["user", "assistant"] * len(roles))[: len(roles)]:
        raise SkippedError("human and assistant do not take turns")
    if not chosen["content"] or not rejected["content"]:
        raise SkippedError("empty reply")
    extra = {"chosen": chosen["content"], "rejected": rejected["content"], "subset": source.file.parent.name}
    return Example(chat, chosen["content"], extra)


def turns(record: dict[str, Any], name: str, where: str) -> list[dict[str, str]]:
    """The dialog of a transcript as messages, at least one."""
    transcript = text_field(record, name, where)
    start, *parts = TURN.split(transcript)
    if start.strip() or not parts:
        raise DataError(f"{where}: {name!r} does not begin with 'Human:' or 'Assistant:': {transcript[:40]!r}")
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": ROLES[speaker], "content": text.strip()} for speaker, text in pairs]


def _as_transcripts(record: dict[str, Any], where: str) -> dict[str, Any]:
    if "prompt" not in record:
        return record
    prompt = text_field(record, "prompt", where).rstrip()
    return {name: f"{prompt} {text_field(record, name, where)}" for name in ("chosen", "rejected")}


CONVERTER = Converter(
    data_source="Anthropic/hh-rlhf",
    ability="alignment",
    style="model",
    forms=(
        "{split}.jsonl.gz",
        "{split}.jsonl",
        "*/{split}.jsonl.gz",
        "*/{split}.jsonl",
        "data/{split}-*.parquet",
        "*/{split}-*.parquet",
        "{split}-*.parquet",
    ),
    splits=TRAIN_AND_TEST,
    instruction="",
    example=example,
)
