"""Text that a model has written, made safe and short for a terminal."""

from __future__ import annotations

import re

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters other than tab and newline, characters that change the direction of text, and surrogates."""


def printable(text: str) -> str:
    """The text with control characters as escapes (`\\x1b`), so that it cannot command the terminal that shows it."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(text: str, max_characters: int) -> str:
    """Returns the text; if it is longer, with "..." in place of its middle."""
    if len(text) <= max_characters:
        return text
    kept = max(max_characters - 3, 0)
    return text[: kept - kept // 2] + "..." + text[len(text) - kept // 2 :]
