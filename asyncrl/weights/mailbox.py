"""What sender and receiver share: messages in the store, and waits for them with a deadline."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from asyncrl.weights.messages import ABORT, DROPPED, ReceivedBody
from asyncrl.wire.store import Store
from asyncrl.wire.unpack import MAX_PROBLEM_CHARACTERS


class RoundAborted(Exception):
    """The round came to nothing; another offer may follow."""


class SessionLost(Exception):
    """The sender dropped this receiver or is silent: it has to join again."""


class Round:
    """The messages of one offer to one incarnation."""

    def __init__(self, mail: Mailbox, incarnation: str, number: int) -> None:
        self.mail = mail
        self.incarnation = incarnation
        self.number = number
        self.ready = False
        """Whether the sender was told so."""
        self._suffix = f"{incarnation}/{number}"
        self._answered = False

    def put(self, what: str, message: Mapping[str, Any]) -> None:
        self.mail.put(f"{what}/{self._suffix}", message)

    def answer(self, received: ReceivedBody) -> None:
        """Says what came of the broadcast, once: what was said first stays."""
        if not self._answered:
            self.put("received", received)
        self._answered = True

    def read(self, what: str, kind: TypeAdapter[T]) -> T | None:
        """Raises BadMessage for one that is not of that kind."""
        return self.mail.read(f"{what}/{self._suffix}", kind)

    def raise_if_over(self) -> None:
        """Raises GivenUp when the sender gave the round up, and SessionLost when it dropped this receiver."""
        name = f"abort/{self._suffix}"
        abort, offer, dropped = self.mail.look(
            [name, f"offer/{self.incarnation}/{self.number + 1}", dropped_name(self.incarnation)]
        )
        if abort is not None:
            raise RoundAborted(parse(name, abort, ABORT)["reason"])
        if offer is not None:
            raise RoundAborted("another offer came")
        raise_if_dropped(self.mail, self.incarnation, dropped)


def dropped_name(incarnation: str) -> str:
    """The name of the message that this receiver was dropped."""
    return f"dropped/{incarnation}"


def raise_if_dropped(mail: Mailbox, incarnation: str, text: bytes | None) -> None:
    """Raises SessionLost with the sender's reason where there is such a message."""
    if text is not None:
        name = dropped_name(incarnation)
        mail.delete(name)
        raise SessionLost(f"dropped by learner rank 0: {parse(name, text, DROPPED)['reason']}")


T = TypeVar("T")

POLL_S = 0.0005
"""First pause between two looks for an answer."""
_LONGEST_LOOK_S = 0.5
"""The most that one look adds to a wait."""


class Interrupted(Exception):
    """A wait was given up because this side is being closed."""


class BadMessage(Exception):
    """A message in the store is not what it should be; the text names it and says what is wrong."""


class Mailbox:
    """Small JSON messages under names in a store. Nothing blocks: a message that is not there reads as None."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def put(self, name: str, message: Mapping[str, Any]) -> None:
        self.store.set(name, json.dumps(message))

    def look(self, names: Sequence[str]) -> list[bytes | None]:
        """The raw messages under the names, None for those that are not there."""
        return self.store.peek(names)

    def has(self, name: str) -> bool:
        return self.look([name]) != [None]

    def read(self, name: str, kind: TypeAdapter[T]) -> T | None:
        """Raises BadMessage for one that is not of that kind."""
        (text,) = self.look([name])
        return None if text is None else parse(name, text, kind)

    def delete(self, name: str) -> None:
        self.store.delete(name)

    def count(self, name: str, more: int = 0) -> int:
        """Adds to a counter, which starts at 0, and gives what it is then."""
        return self.store.add(name, more)


def parse(name: str, text: bytes, kind: TypeAdapter[T]) -> T:
    """The message under that name. Raises BadMessage for one that is not of that kind."""
    try:
        return kind.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = "".join(f".{part}" for part in first["loc"])
        raise BadMessage(f"{name}{where}: {first['msg']}"[:MAX_PROBLEM_CHARACTERS]) from None


class Wait:
    """Time spent waiting, to be held against a deadline.

    Look at it all the time: a process that was stopped itself, or held up in a call, saw no answer in that time and
    blames nobody for it.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._looked_s = time.monotonic()

    def look(self) -> float:
        """How long it has been so far, in seconds."""
        now_s = time.monotonic()
        self._waited_s += min(now_s - self._looked_s, _LONGEST_LOOK_S)
        self._looked_s = now_s
        return self._waited_s

    @property
    def pause_s(self) -> float:
        """How long to sleep until the next look: quick answers are seen quickly."""
        return min(POLL_S + self._waited_s / 10, 0.01)
