"""Bounds of the values in messages, and the types that enforce them in the schemas."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import FailFast, Field

from asyncrl.types import MAX_NAME_CHARACTERS, NO_VERSION

MAX_COUNT = (1 << 31) - 1
MAX_NUMBER = 1 << 62
MAX_INDEX = (1 << 16) - 1
MAX_ITEMS = 1 << 16
MAX_PARTS = 256
"""Maximum number of parts of one trajectory's reward."""
MAX_REWARD = 1e30
"""Larger rewards do not fit float32, or their squares do not fit float64."""
MAX_TEXT_CHARACTERS = 1 << 16
MAX_DOCUMENT_CHARACTERS = 1 << 24

_T = TypeVar("_T")
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Version = Annotated[int, Field(ge=NO_VERSION, le=MAX_COUNT)]
Number = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
"""A ticket, a row, or a sum over the run."""
Index = Annotated[int, Field(ge=0, le=MAX_INDEX)]
"""Index of a generator or a learner rank. Its bound limits the memory kept for each of them."""
Time = Annotated[float, Field(ge=-1e12, le=1e12, allow_inf_nan=False)]
Reward = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARACTERS)]
Document = Annotated[str, Field(max_length=MAX_DOCUMENT_CHARACTERS)]
Items = Annotated[list[_T], Field(max_length=MAX_ITEMS), FailFast()]
Metrics = Annotated[dict[Annotated[str, Field(max_length=1000)], float], Field(max_length=MAX_ITEMS)]
