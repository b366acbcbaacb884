"""Text of a model in a terminal: controls are escaped, long text is cut in the middle."""

from __future__ import annotations

import pytest

from asyncrl.util.text import printable, shortened


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ünïcode 数\n\tnext", "plain ünïcode 数\n\tnext"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("a\rb\x00\x7f\x9b", "a\\rb\\x00\\x7f\\x9b"),
        ("\u202eright to left", "\\u202eright to left"),
        ("\ud800", "\\ud800"),
    ],
)
def test_controls_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("length", "cut"),
    [(10, "abcdefghij"), (9, "abc...hij"), (8, "abc...ij"), (3, "..."), (2, "...")],
)
def test_the_middle_is_cut(length: int, cut: str) -> None:
    assert shortened("abcdefghij", length) == cut
