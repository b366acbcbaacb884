"""Lists of tokens in one frame: their lengths, and all tokens one after another. A frame of its own would cost each
list more than its bytes do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from asyncrl.errors import ProtocolError
from asyncrl.wire.frames import Array, Arrays, Message, joined


def pack_lists(lists: Sequence[Array]) -> list[Arrays]:
    """The arrays of a message with these lists of tokens, each int32 [tokens]."""
    if not lists:
        return []
    return [joined([[np.array([len(one) for one in lists], dtype=np.int32)], lists])]


def unpack_lists(message: Message, count: int) -> list[Array]:
    """The lists of a message, which should have this many. Raises ProtocolError if it does not."""
    if not count and not message.arrays:
        return []
    if [(array.dtype, array.ndim) for array in message.arrays] != [(np.dtype(np.int32), 1)] * 2:
        raise ProtocolError(f"{message.kind}: its arrays are not the lengths and the tokens of {count} lists")
    lengths, tokens = message.arrays
    ends = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
    if len(lengths) != count or ends[-1] != len(tokens) or (count and lengths.min() < 0):
        raise ProtocolError(
            f"{message.kind}: {len(lengths)} lists of {ends[-1]} tokens in all, not {count} of {len(tokens)}"
        )
    return [tokens[begin:end] for begin, end in pairwise(ends)]
