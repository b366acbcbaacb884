r"""The position of the answer in a completion: after its reasoning, after a mark (`####`) or in the last box."""

from __future__ import annotations

import re

THINK, END_THINK = "<think>", "</think>"
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BETWEEN_BOXES = re.compile(r"[\s$]*(?:[,;]|[,;]?\s*(?:\\text\{\s*)?(?:and|or)\b\s*\}?)[\s$]*(?:\w+\s*=\s*)?")


def after_reasoning(text: str) -> str:
    """The text after the last `</think>`; empty while a `<think>` is open, since reasoning is no answer."""
    end = text.rfind(END_THINK)
    if text.rfind(THINK) > end:
        return ""
    return text if end < 0 else text[end + len(END_THINK) :]


def find_answer(text: str, *, mark: str = "") -> str:
    r"""The part of a completion that is read for its answer; empty if there is no answer.

    That is the text after the reasoning, of it what follows the last `mark`, and of that the content of the last
    \boxed{...} if there is one. A last box that is not closed (the completion was cut) is no answer.
    """
    text = after_reasoning(text)
    if mark:
        text = text.rpartition(mark)[2] if mark in text else ""
    return (last_boxed(text) or "") if has_box(text) else text


def has_box(text: str) -> bool:
    r"""True if the text has a \boxed or \fbox, closed or not."""
    return _BOX.search(text) is not None


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} (or \fbox{...}), including nested braces; None if it is not closed, or there
    is none.

    Several boxes with nothing but a comma, "and" or "or" between them are one answer, joined by commas. An empty box
    is a mention of the command. Also accepts `\boxed 5`, up to the next dollar sign or space.
    """
    contents: list[str] = []
    start = 0
    for box in reversed(list(_BOX.finditer(text))):
        content, end = _box_content(text, box.end())
        if content is None or (contents and (content in contents or not _BETWEEN_BOXES.fullmatch(text, end, start))):
            break
        if content:
            contents.insert(0, content)
            start = box.start()
    return ", ".join(contents) or None


def _box_content(text: str, start: int) -> tuple[str | None, int]:
    """The content of a box and where it ends; None for a box that is not closed."""
    if not text.startswith("{", start):
        end = start + len(re.match(r"[^$\s]*", text[start:])[0])  # type: ignore[index]
        return text[start:end].rstrip(".,"), end
    depth = 0
    # An escaped brace does not nest.
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return text[start + 1 : brace.start()].strip(), brace.end()
    return None, len(text)
