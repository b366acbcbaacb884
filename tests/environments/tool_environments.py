"""Environments whose methods are tools, good and bad ones."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any, Literal

from asyncrl.environments import ToolEnvironment, ToolError


class Calculator(ToolEnvironment):
    """Has tools of each kind."""

    def reset(self) -> Any:
        self.log: list[str] = []
        self.threads: set[int] = set()
        return self.task.extra_info.get("say")

    def evaluate(self, expression: str, digits: int = 0) -> str:
        """Value of a product.

        Args:
            expression: Two numbers with a * between them.
            digits: At least so many digits.
        """
        first, star, second = expression.partition("*")
        self.log.append(expression)
        self.threads.add(threading.get_ident())
        if not star:
            raise ToolError("there is no *")
        return f"{int(first) * int(second):0{digits}d}"

    async def look_up(self, word: Literal["one", "two"], wait_s: float = 0.0) -> dict[str, Any]:
        """What a word means.

        Args:
            word: The word.
            wait_s: Seconds until the answer.
        """
        self.log.append(f"{word} begins")
        try:
            await asyncio.sleep(wait_s)
        except asyncio.CancelledError:
            self.log.append(f"{word} is cancelled")
            raise
        self.log.append(f"{word} ends")
        return {"word": word, "value": ["one", "two"].index(word) + 1}

    def break_down(self, how: str) -> Any:
        """Fails.

        Args:
            how: In which way.
        """
        match how:
            case "exit":
                sys.exit("enough")
            case "stop":
                raise StopIteration("no more")
            case "sleep":
                time.sleep(1.5)
            case "object":
                return object()
            case "key":
                raise KeyError(how)
        return None

    async def break_later(self, how: str) -> None:
        """Fails.

        Args:
            how: In which way.
        """
        await asyncio.sleep(0)
        self.break_down(how)

    def reward(self) -> dict[str, float]:
        return {"score": float(self.answer == self.task.ground_truth), "answered": float(bool(self.answer))}

    def _run(self) -> None: ...


class AtOnce(Calculator):
    """The same without threads."""

    returns_at_once = True


class NoHint(ToolEnvironment):
    def find(self, word):
        """Finds.

        Args:
            word: The word.
        """


class NoDocstring(ToolEnvironment):
    def find(self, word: str) -> str:
        return word


class NotDescribed(ToolEnvironment):
    def find(self, word: str) -> str:
        """Finds a word."""
        return word


class Star(ToolEnvironment):
    def find(self, *words: str) -> str:
        """Finds words."""
        return ""


class Strange(ToolEnvironment):
    def find(self, where: threading.Thread) -> str:
        """Finds a word.

        Args:
            where: The place.
        """
        return ""


class NoTools(ToolEnvironment):
    pass


class Taken(ToolEnvironment):
    def answer(self, text: str) -> str:  # type: ignore[override]
        """Answers.

        Args:
            text: The answer.
        """
        return text
