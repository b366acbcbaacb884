"""The receiver's side of one offer: its messages, and what ends it early."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from asyncrl.weights.exchange import Mailbox, T
from asyncrl.weights.messages import DROPPED, VERDICT


class GivenUp(Exception):
    """The round came to nothing; another offer may follow."""


class SessionLost(Exception):
    """The sender dropped this receiver or is silent: it has to join again."""


class Turn:
    """The messages of one offer to one incarnation."""

    def __init__(self, mail: Mailbox, incarnation: str, number: int) -> None:
        self.mail = mail
        self.incarnation = incarnation
        self._suffix = f"{incarnation}/{number}"

    def put(self, what: str, message: dict[str, Any]) -> None:
        self.mail.put(f"{what}/{self._suffix}", message)

    def read(self, what: str, kind: TypeAdapter[T]) -> T | None:
        """Raises BadMessage for one that is not of that kind."""
        return self.mail.read(f"{what}/{self._suffix}", kind)

    def raise_if_over(self) -> None:
        """Raises GivenUp when the sender gave the round up, and SessionLost when it dropped this receiver."""
        verdict = self.read("verdict", VERDICT)
        if verdict is not None and "abort" in verdict:
            raise GivenUp(verdict["abort"])
        raise_if_dropped(self.mail, self.incarnation)


def raise_if_dropped(mail: Mailbox, incarnation: str) -> None:
    """Raises SessionLost with the sender's reason when it goes on without this receiver."""
    dropped = mail.read(f"dropped/{incarnation}", DROPPED)
    if dropped is not None:
        mail.delete(f"dropped/{incarnation}")
        raise SessionLost(f"dropped by learner rank 0: {dropped['reason']}")
