"""Requests whose connection is lost and replaced."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.frames import Message
from asyncrl.wire.rpc import Connection, Reply, Server
from asyncrl.wire.service_messages import Train, Trained

ENOUGH_S = 10.0


@pytest.fixture
def endpoints() -> Iterator[Endpoints]:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Endpoints("test", f"ipc://{folder}/server", "", "")


def serve(server: Server, until: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + ENOUGH_S
    while not until():
        assert time.monotonic() < deadline_s
        if server.poll(0.01):
            server.handle_next()


def test_a_request_is_sent_again_when_its_connection_is_made_anew(endpoints: Endpoints) -> None:
    came: list[int] = []

    def keep(message: Message) -> None:
        came.append(message.seq)

    def answer(message: Message) -> Reply:
        keep(message)
        return Reply(Trained({}))

    connection = Connection(endpoints, resend_s=2 * ENOUGH_S)
    asking = threading.Thread(target=connection.request, args=(Train(0, 0),), kwargs={"timeout_s": ENOUGH_S})
    asking.start()
    first = Server(endpoints, endpoints.replay, "server", {Train: keep})
    serve(first, lambda: came)
    first.close()
    second = Server(endpoints, endpoints.replay, "server", {Train: answer})
    serve(second, lambda: not asking.is_alive())
    second.close()
    connection.close()
    assert came == [1, 1], "once to each"
