"""A receiver's session with one sender: its connection, what the sender said last, and waits for what it says next."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from asyncrl.weights.transports import host_name
from asyncrl.weights.waits import RoundAborted, SenderClosed, SessionLost, Wait
from asyncrl.wire import weight_messages as messages
from asyncrl.wire.bounds import Body
from asyncrl.wire.channel import ChannelClient
from asyncrl.wire.kinds import TO_RECEIVER
from asyncrl.wire.service_messages import StoreReply
from asyncrl.wire.store import RemoteStore

IDLE_S = 0.2
"""Longest wait for a message between two checks of a deadline."""
PING_S = 3.0
"""Longest time without a sign of life for the sender."""
T = TypeVar("T", messages.Go, messages.Sent, messages.Abort, messages.Patience, messages.Offer)


class Session:
    """Joins the sender at the address. `check` is called during every wait and may raise to end it."""

    def __init__(
        self,
        address: str,
        *,
        run_id: str,
        keys: str,
        rank: int,
        device: str,
        timeout_s: float,
        check: Callable[[], None],
    ) -> None:
        self.id = uuid.uuid4().hex
        self.round = 0
        """The current round, or the last one."""
        self.phase = "let this generator join"
        """The sender's next action, for error texts."""
        self.manifest = ""
        """Empty until the sender has admitted this receiver."""
        self.senders = 1
        """Number of learner ranks that send."""
        self.by_parameter = False
        """True if each bucket is a part of one parameter."""
        self._timeout_s = timeout_s
        self._told: dict[type, Any] = {}
        """The last message of each kind."""
        self._said: dict[type, int] = {}
        """The last round for which `say_once` sent a message, by kind."""
        self._pinged_s = 0.0
        self.client = ChannelClient(address, TO_RECEIVER, self._handle, run_id=run_id, keys=keys, check=check)
        self.store = RemoteStore(self.client)
        """The store through which the members of a group find one another."""
        self.say(messages.Join(rank, device, host_name()))

    def silent_s(self) -> float:
        """Time since the sender was last heard; 0 before it has admitted this receiver."""
        return time.monotonic() - self.client.heard_s if self.manifest else 0.0

    # --- messages to the sender

    def say(self, message: Body) -> None:
        """Sends a message."""
        self.client.send(message)

    def say_once(self, message: Any) -> None:
        """Sends "ready" or "received", unless one was sent for that round before."""
        if self._said.get(type(message), 0) < message.round:
            self._said[type(message)] = message.round
            self.say(message)

    # --- messages of the sender

    def listen(self, seconds: float) -> None:
        """Handles the messages that wait, or the first ones that arrive within `seconds`. Now and then the sender is
        asked whether it lives, which shows it that this receiver does."""
        self.client.listen(seconds)
        now_s = time.monotonic()
        if self.manifest and now_s - self._pinged_s > min(PING_S, self._timeout_s / 4):
            self._pinged_s = now_s
            self.say(messages.Ping())

    def next_offer(self) -> messages.Offer | None:
        """The offer of a new round, if there is one. Its round becomes the current one."""
        self.raise_if_ended()
        offer: messages.Offer | None = self._told.get(messages.Offer)
        if offer is None or offer.round <= self.round:
            return None
        self.round = offer.round
        return offer

    def wait_for(self, kind: type[T], phase: str, timeout_s: float) -> T:
        """Returns the message of the current round, which tells that the sender did `phase`. Raises SessionLost at the
        deadline, which "patience" of the sender extends, and as `check` does."""
        self.phase = phase
        wait = Wait()
        while (message := self._of_round(kind)) is None:
            self.raise_if_over()
            if wait.look() > timeout_s:
                if self._of_round(messages.Patience) is None:
                    raise SessionLost(f"learner rank 0 did not {phase} within {timeout_s:g} s")
                del self._told[messages.Patience]
                wait = Wait()
            self.listen(IDLE_S)
        return message

    def await_manifest(self) -> None:
        """Returns when a sender listens and has admitted this receiver; there is no deadline."""
        while not self.manifest:
            self.listen(math.inf)

    def check(self) -> None:
        """Handles the messages that wait. Raises as `raise_if_over` does, and what ends the waits."""
        self.listen(0.0)
        self.raise_if_over()

    def raise_if_over(self) -> None:
        """Raises RoundAborted if the sender has aborted the round or made another offer, and as `raise_if_ended`."""
        if (abort := self._of_round(messages.Abort)) is not None:
            raise RoundAborted(abort.reason)
        if (offer := self._told.get(messages.Offer)) is not None and offer.round > self.round:
            raise RoundAborted("another offer came")
        self.raise_if_ended()

    def raise_if_ended(self) -> None:
        """Raises SessionLost if the sender has dropped this receiver, and SenderClosed if it closes."""
        if (dropped := self._told.get(messages.Dropped)) is not None:
            raise SessionLost(f"dropped by learner rank 0: {dropped.reason}")
        if messages.Closed in self._told:
            raise SenderClosed

    def _of_round(self, kind: type[T]) -> T | None:
        message: T | None = self._told.get(kind)
        return message if message is not None and message.round == self.round else None

    def _handle(self, message: Any) -> None:
        if isinstance(message, StoreReply):
            self.store.handle(message)
        elif isinstance(message, messages.Manifest):
            self.senders, self.by_parameter = message.senders, message.by_parameter
            self.manifest = message.text
        else:
            self._told[type(message)] = message
