"""Lists of tokens in one frame of a message."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ProtocolError
from asyncrl.wire.frames import Array, Arrays, Message, decode, encode, pack_lists, unpack_lists
from asyncrl.wire.service_messages import HostRequest

EMPTY = HostRequest([], [], [])


def sent(arrays: list[Arrays]) -> Message:
    return decode("run", encode("run", EMPTY, arrays=arrays))


def int32(*values: int) -> Array:
    return np.array(values, dtype=np.int32)


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=5))
def test_lists_arrive_as_they_were(lists: list[list[int]]) -> None:
    frames = encode("run", EMPTY, arrays=pack_lists([int32(*one) for one in lists]))
    assert len(frames) <= 2
    assert [one.tolist() for one in unpack_lists(decode("run", frames), len(lists))] == lists


@pytest.mark.parametrize(
    ("arrays", "count", "text"),
    [
        ([int32(1)], 1, "not the lengths and the tokens of 1 lists"),
        ([], 1, "not the lengths and the tokens of 1 lists"),
        ([int32(1), np.ones(1, dtype=np.float32)], 1, "not the lengths and the tokens"),
        ([int32(2), int32(5, 6)], 2, "1 lists of 2 tokens in all, not 2 of 2"),
        ([int32(2, 1), int32(5, 6)], 2, "2 lists of 3 tokens in all, not 2 of 2"),
        ([int32(3, -1), int32(5, 6)], 2, "2 lists of 2 tokens in all, not 2 of 2"),
        ([int32(), int32()], 1, "0 lists of 0 tokens in all, not 1 of 0"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(arrays: list[Arrays], count: int, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        unpack_lists(sent(arrays), count)
