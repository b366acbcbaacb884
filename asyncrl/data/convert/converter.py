"""What a converter is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class SkippedError(Exception):
    """The record is sound, but gives no row; the text says why, in the same words for all such records."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a record is from."""

    file: Path
    where: str
    """File and row or line in it, for messages."""


@dataclass(frozen=True, slots=True)
class Example:
    """A record's part of a row."""

    chat: list[dict[str, str]]
    """Messages up to where the assistant answers, without the instruction."""
    ground_truth: str
    extra_info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Converter:
    data_source: str
    """The name that verl's rewards know the dataset by."""
    ability: str
    style: str
    """verl's `reward_model.style`: rule where the ground truth decides, model where a reward model does."""
    forms: tuple[str, ...]
    """Patterns of the files that hold a split, the first found counts."""
    splits: dict[str, tuple[str, ...]]
    """Names of the splits, and what each is called in file names."""
    instruction: str
    """Appended to the last user message, unless the command gives another."""
    example: Callable[[dict[str, Any], Source], Example]
    """Gives the example of a record. Raises SkippedError, and DataError for a malformed one."""


def ask(text: str) -> list[dict[str, str]]:
    """A chat in which the user says this."""
    return [{"role": "user", "content": text}]


TRAIN_AND_TEST: dict[str, tuple[str, ...]] = {"train": ("train",), "test": ("test",)}
