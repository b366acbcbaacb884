"""Bounds of the values in messages, the types that enforce them, and the base class of all message bodies."""

from __future__ import annotations

import sys
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from asyncrl.types import MAX_NAME_CHARACTERS, NO_VERSION

MAX_COUNT = (1 << 31) - 1
MAX_NUMBER = 1 << 62
MAX_INDEX = (1 << 16) - 1
MAX_ITEMS = 1 << 16
MAX_PARTS = 256
"""Maximum number of parts of one trajectory's reward."""
MAX_REWARD = 1e30
"""Larger rewards do not fit float32, or their squares do not fit float64."""
MAX_WEIGHT = 1e3
MAX_TEXT_CHARACTERS = 1 << 16
MAX_DOCUMENT_CHARACTERS = 1 << 24
MAX_DURATION_S = 3600.0

_T = TypeVar("_T")
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Version = Annotated[int, Meta(ge=NO_VERSION, le=MAX_COUNT)]
Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
"""A ticket, a row, or a sum over the run."""
Index = Annotated[int, Meta(ge=0, le=MAX_INDEX)]
"""Index of a generator or a learner rank. Its bound limits the memory kept for each of them."""
Time = Annotated[float, Meta(ge=-1e12, le=1e12)]
"""Seconds. NaN is refused, as by every type with bounds."""
Duration = Annotated[float, Meta(ge=0.0, le=MAX_DURATION_S)]
"""Seconds."""
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Reward = Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)]
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS)]
Document = Annotated[str, Meta(max_length=MAX_DOCUMENT_CHARACTERS)]
Items = Annotated[list[_T], Meta(max_length=MAX_ITEMS)]
Metrics = Annotated[dict[Annotated[str, Meta(max_length=1000)], float], Meta(max_length=MAX_ITEMS)]


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a message, or a part of one. It has no optional fields: a message has all of them, and no others."""
