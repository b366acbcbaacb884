"""The client of a store that another process serves."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgpack
import zmq
from zmq.utils.monitor import recv_monitor_message

from asyncrl.wire.sockets import SILENCE_S, connect_dealer
from asyncrl.wire.store import ANSWER, LOOK_S, MAX_ASKED, MAX_BYTES, RING, Answer, StoreError, StoreLostError
from asyncrl.wire.unpack import check, unpack


class StoreClient:
    """A `Store` that another process serves. Thread-safe; one request at a time."""

    def __init__(
        self, address: str, *, keys: str = "", timeout_s: float, check: Callable[[], None] = lambda: None
    ) -> None:
        """Connects as soon as a server listens at the address. `check` is polled during this and every later wait and
        may raise to end it. Raises StoreLostError if there is no answer within `timeout_s`."""
        self.check = check
        self.answer_s: float = SILENCE_S
        """Deadline of an answer, in addition to the time-out of a "wait" request."""
        self.heard_s = time.monotonic()
        """When the server last answered or rang."""
        self._address = address
        self._lock = threading.Lock()
        self._number = 0
        self._rung = self._lost = False
        self._socket = connect_dealer(address, keys=keys)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._ask("hello", answer_s=timeout_s)
        except BaseException:
            self.close()
            raise

    def set(self, key: str, value: bytes | str) -> None:
        """As `Store.set`."""
        self._ask("set", [key], value=value.encode() if isinstance(value, str) else bytes(value))

    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        """As `Store.peek`."""
        return self._ask("peek", keys)

    def wait(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """As `Store.wait`."""
        return self._ask("wait", keys, timeout_s=timeout_s)

    def add(self, key: str, more: int) -> int:
        """As `Store.add`."""
        return self._ask("add", [key], more=more)

    def delete(self, key: str) -> bool:
        """As `Store.delete`."""
        return bool(self._ask("delete", [key]))

    def await_ring(self, seconds: float) -> None:
        """Returns when the server rings, or at once if it has since the last call, and at the latest after `seconds`.
        Raises StoreLostError if the server is gone."""
        deadline_s = time.monotonic() + seconds
        with self._lock:
            while not self._rung and (left_s := deadline_s - time.monotonic()) > 0:
                self._hear(left_s)
            self._rung = False

    def close(self) -> None:
        """Closes the connection; idempotent."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()

    def _ask(
        self,
        what: str,
        keys: Sequence[str] = (),
        *,
        value: bytes = b"",
        more: int = 0,
        timeout_s: float = 0.0,
        answer_s: float | None = None,
    ) -> Any:
        """Returns the server's answer. It has `timeout_s`, which the request states, plus `answer_s`."""
        request = {"what": what, "keys": list(keys), "value": value, "more": more, "timeout_s": float(timeout_s)}
        limit_s = timeout_s + (self.answer_s if answer_s is None else answer_s)
        with self._lock:
            self._number += 1
            self._socket.send(cast(bytes, msgpack.packb(request | {"number": self._number})), zmq.DONTWAIT)
            deadline_s = time.monotonic() + limit_s
            while (answer := self._hear(LOOK_S)) is None or answer["number"] != self._number:
                if time.monotonic() > deadline_s:
                    raise StoreLostError(f"nobody answered at {self._address} within {limit_s:g} s")
        if answer["error"]:
            raise StoreError(answer["error"])
        if answer["late"]:
            missing = [key for key, there in zip(keys, cast(list[Any], answer["value"]), strict=True) if there is None]
            raise TimeoutError(f"{missing[0]} was not in the store within {timeout_s:g} s")
        return answer["value"]

    def _hear(self, seconds: float) -> Answer | None:
        """Returns the next answer or ring, if one arrives within `seconds`."""
        self.check()
        if self._lost:  # ZeroMQ would connect to a new server, which has none of the values
            raise StoreLostError(f"the process that listened at {self._address} is gone")
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        ready = dict(poller.poll(math.ceil(1e3 * min(seconds, LOOK_S))))
        if self._socket in ready:
            data = self._socket.recv(zmq.DONTWAIT)
            self.heard_s = time.monotonic()
            answer: Answer = check(
                unpack(
                    data,
                    "answer of a store",
                    max_bytes=MAX_BYTES + (1 << 20),
                    max_values=2 * MAX_ASKED,
                    max_items=MAX_ASKED,
                    max_characters=1 << 12,
                ),
                ANSWER,
                "answer of a store",
            )
            self._rung = self._rung or answer["number"] == RING
            return answer
        if self._monitor in ready:
            recv_monitor_message(self._monitor)
            self._lost = True
        return None
