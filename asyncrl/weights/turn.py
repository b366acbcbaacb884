"""The receiver's side of one offer: its messages, and what ends it early."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from asyncrl.weights.exchange import Mailbox, T, parse
from asyncrl.weights.messages import ABORT, DROPPED, ReceivedBody


class GivenUp(Exception):
    """The round came to nothing; another offer may follow."""


class SessionLost(Exception):
    """The sender dropped this receiver or is silent: it has to join again."""


class Turn:
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
            raise GivenUp(parse(name, abort, ABORT)["reason"])
        if offer is not None:
            raise GivenUp("another offer came")
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
