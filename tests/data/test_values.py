"""Values on their way from Arrow to msgpack and to the reward."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.rows import chat_messages, ground_truth_text, plain
from asyncrl.errors import DataError

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 63) - 1), st.floats(allow_nan=False), st.text(), st.dates(),
    st.datetimes(), st.decimals(allow_nan=False), st.text().map(str.encode), st.integers(0, 255).map(np.uint8),
)  # fmt: skip
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=15)


@given(VALUES)
def test_plain_values_travel_unchanged(value: Any) -> None:
    sent = plain(value, "here")
    assert msgpack.unpackb(msgpack.packb(sent)) == sent
    assert plain(sent, "here") == sent


def test_what_becomes_of_each_type() -> None:
    value = {
        "day": date(2024, 2, 3),
        "time": datetime(2024, 2, 3, 4, 5),
        "price": Decimal("1.50"),
        "text": "ä".encode(),
        "array": np.arange(2),
        "none": None,
        "list": [None, {"none": None, "one": 1}],
    }
    assert plain(value, "here") == {
        "day": "2024-02-03",
        "time": "2024-02-03T04:05:00",
        "price": "1.50",
        "text": "ä",
        "array": [0, 1],
        "list": [None, {"one": 1}],
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"image": {"bytes": b"\xff\xd8"}}, r"a.parquet, row 3: 'extra_info'.image.bytes: bytes that are not UTF-8"),
        ({"took": timedelta(1)}, r"row 3: 'extra_info'.took: timedelta cannot be sent; store it as a string"),
        ({1: "a"}, r"the key 1 is int; keys must be strings"),
    ],
)
def test_what_cannot_travel_is_named(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        plain(value, "a.parquet, row 3: 'extra_info'")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("72", "72"), ("", ""), (72, "72"), (1.5, "1.5"), (True, "True"), (b"a", "a"), (["ä", 1], '["ä", 1]'),
        ({"inputs": ["1"], "fn_name": None}, '{"inputs": ["1"]}'), ('{"inputs": []}', '{"inputs": []}'),
    ],
)  # fmt: skip
def test_ground_truth_is_a_string(value: Any, text: str) -> None:
    assert ground_truth_text(value, "here") == text


@pytest.mark.parametrize("value", [None, float("nan")])
def test_no_ground_truth_is_an_error(value: Any) -> None:
    with pytest.raises(DataError, match=r"^here is empty; fill it in or leave the row out$"):
        ground_truth_text(value, "here")


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([], "here is a chat without messages"),
        ([{"role": "user", "content": "a"}, {"role": "human", "content": "a"}], "message 1: role = 'human'; it must"),
        ([{"role": "user", "content": None}], "here, message 0: content = None; it must be a string"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "content = .* it must be a string"),
        (["hello"], "message 0: str; a message must be a struct with role and content"),
    ],
)
def test_bad_chats_are_named(chat: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        chat_messages(chat, "here")
