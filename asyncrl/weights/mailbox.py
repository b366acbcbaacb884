"""Messages in the store between sender and receivers, and waits for them with a deadline."""

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
    """The round ended without a version; another offer may follow."""


class SessionLost(Exception):
    """The sender dropped this receiver or is silent: the receiver has to join again."""


class Round:
    """A receiver's side of one round: the messages of one offer to one of its sessions (its incarnation)."""

    def __init__(self, mail: Mailbox, incarnation: str, number: int) -> None:
        self.mail = mail
        self.incarnation = incarnation
        self.number = number
        self.ready = False
        """True once "ready" was sent."""
        self._suffix = f"{incarnation}/{number}"
        self._answered = False

    def put(self, what: str, message: Mapping[str, Any]) -> None:
        """Writes a message of this round."""
        self.mail.put(f"{what}/{self._suffix}", message)

    def answer(self, received: ReceivedBody) -> None:
        """Reports the result of the broadcast; only the first call has an effect."""
        if not self._answered:
            self.put("received", received)
        self._answered = True

    def read(self, what: str, kind: TypeAdapter[T]) -> T | None:
        """Returns a message of this round, or None. Raises BadMessage if it does not fit its schema."""
        return self.mail.read(f"{what}/{self._suffix}", kind)

    def raise_if_over(self) -> None:
        """Raises RoundAborted if the sender aborted the round, and SessionLost if it dropped this receiver."""
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
    """The key of the message that says that this receiver was dropped."""
    return f"dropped/{incarnation}"


def raise_if_dropped(mail: Mailbox, incarnation: str, text: bytes | None) -> None:
    """Raises SessionLost with the sender's reason if there is such a message."""
    if text is not None:
        name = dropped_name(incarnation)
        mail.delete(name)
        raise SessionLost(f"dropped by learner rank 0: {parse(name, text, DROPPED)['reason']}")


T = TypeVar("T")

POLL_S = 0.0005
"""First interval of the checks for an answer."""
_LONGEST_LOOK_S = 0.5
"""Maximum time that one check adds to a wait."""


class Interrupted(Exception):
    """A wait ended early because this side is being closed."""


class BadMessage(Exception):
    """A message in the store does not fit its schema; the text names the message and the problem."""


class Mailbox:
    """Small JSON messages under names in a store. Nothing blocks: a message that is not there reads as None."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def put(self, name: str, message: Mapping[str, Any]) -> None:
        """Writes a message."""
        self.store.set(name, json.dumps(message))

    def look(self, names: Sequence[str]) -> list[bytes | None]:
        """The raw messages under the names, None for missing ones."""
        return self.store.peek(names)

    def has(self, name: str) -> bool:
        """True if there is a message under the name."""
        return self.look([name]) != [None]

    def read(self, name: str, kind: TypeAdapter[T]) -> T | None:
        """Returns the message under the name, or None. Raises BadMessage if it does not fit its schema."""
        (text,) = self.look([name])
        return None if text is None else parse(name, text, kind)

    def delete(self, name: str) -> None:
        """Deletes the message under the name, if there is one."""
        self.store.delete(name)

    def count(self, name: str, more: int = 0) -> int:
        """Adds to a counter, which starts at 0, and returns its new value."""
        return self.store.add(name, more)


def parse(name: str, text: bytes, kind: TypeAdapter[T]) -> T:
    """Parses the message read under the name. Raises BadMessage if it does not fit its schema."""
    try:
        return kind.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = "".join(f".{part}" for part in first["loc"])
        raise BadMessage(f"{name}{where}: {first['msg']}"[:MAX_PROBLEM_CHARACTERS]) from None


class Wait:
    """Measures waiting time for a deadline, but ignores gaps in which this process itself was suspended or blocked in a
    call, so that a paused process does not blame its peers. Poll it continuously.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._looked_s = time.monotonic()

    def look(self) -> float:
        """Returns the time waited so far, in seconds."""
        now_s = time.monotonic()
        self._waited_s += min(now_s - self._looked_s, _LONGEST_LOOK_S)
        self._looked_s = now_s
        return self._waited_s

    @property
    def pause_s(self) -> float:
        """Time to sleep until the next check; short at first, so that quick answers are seen quickly."""
        return min(POLL_S + self._waited_s / 10, 0.01)
