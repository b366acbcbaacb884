"""The key-value store: what it answers, what it bounds, when its holder is gone, and what a stranger gets of it."""

from __future__ import annotations

import errno
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import zmq
from structlog.testing import capture_logs

from asyncrl.wire import store as module
from asyncrl.wire.bad_peers import MAX_BAD_MESSAGES
from asyncrl.wire.curve_keys import write_keys
from asyncrl.wire.store import StoreError, StoreLostError, Values
from asyncrl.wire.store_client import StoreClient
from asyncrl.wire.store_server import StoreServer


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield f"ipc://{folder}/store"


@pytest.fixture
def server(address: str) -> Iterator[StoreServer]:
    server = StoreServer(address, "weights")
    yield server
    server.close()


@pytest.fixture
def client(address: str, server: StoreServer) -> Iterator[StoreClient]:
    client = StoreClient(address, timeout_s=10.0)
    yield client
    client.close()


def test_holder_and_callers_see_the_same(server: StoreServer, client: StoreClient) -> None:
    values = server.values
    client.set("a", b"\0\xff")
    values.set("b", "text")
    for one in (values, client):
        assert one.peek(["a", "none", "b"]) == [b"\0\xff", None, b"text"]
        assert one.wait(["b", "a"], 1.0) == [b"text", b"\0\xff"]
    assert [client.add("n", 2), values.add("n", 0), values.add("n", -5), client.add("n", 1)] == [2, 2, -3, -2]
    assert (client.delete("a"), client.delete("a"), values.delete("b"), values.delete("b")) == (True, False) * 2
    values.set("group/1/x", b"")
    values.set("group/10/x", b"")
    values.delete_all("group/1/")
    assert client.peek(["group/1/x", "group/10/x"]) == [None, b""]
    assert len(values) == 2


@pytest.mark.parametrize("setter", ["holder", "another"])
def test_a_wait_ends_when_the_last_key_is_there_or_at_its_deadline(
    address: str, server: StoreServer, client: StoreClient, setter: str
) -> None:
    other = StoreClient(address, timeout_s=10.0)
    who = server.values if setter == "holder" else other
    for one in (server.values, client):
        started = time.monotonic()
        timer = threading.Timer(0.1, who.set, ["later", b"1"])
        timer.start()
        assert one.wait(["later"], 20.0) == [b"1"]
        assert 0.09 < time.monotonic() - started < 10.0
        timer.join()
        started = time.monotonic()
        with pytest.raises(TimeoutError, match=r"never was not in the store within 0\.1 s"):
            one.wait(["later", "never"], 0.1)
        assert 0.09 < time.monotonic() - started < 10.0
        server.values.delete("later")
    other.close()


def test_a_ring_ends_the_pause_of_every_caller_and_none_is_missed(address: str, server: StoreServer) -> None:
    clients = [StoreClient(address, timeout_s=10.0) for _ in range(2)]
    server.ring()
    time.sleep(0.05)
    for client in clients:
        client.peek(["a"])  # it hears the ring meanwhile
        started = time.monotonic()
        client.await_ring(20.0)
        assert time.monotonic() - started < 10.0
        started = time.monotonic()
        client.await_ring(0.1)
        assert time.monotonic() - started >= 0.1, "it rang once"
    timer = threading.Timer(0.1, server.ring)
    timer.start()
    for client in clients:
        started = time.monotonic()
        client.await_ring(20.0)
        assert time.monotonic() - started < 10.0, "also while nobody asks"
        client.close()
    timer.join()


@pytest.mark.parametrize("what", ["answer", "ring"])
def test_a_holder_that_is_gone_is_noticed_at_once(server: StoreServer, client: StoreClient, what: str) -> None:
    timer = threading.Timer(0.1, server.close)
    timer.start()
    started = time.monotonic()
    with pytest.raises(StoreLostError, match="is gone"):
        client.wait(["never"], 60.0) if what == "answer" else client.await_ring(60.0)
    assert time.monotonic() - started < 10.0
    timer.join()


def test_a_holder_that_never_comes_or_does_not_answer_has_a_deadline(address: str) -> None:
    with pytest.raises(StoreLostError, match=rf"nobody answered at {address} within 0\.1 s"):
        StoreClient(address, timeout_s=0.1)
    calls: list[StoreClient] = []
    caller = threading.Thread(target=lambda: calls.append(StoreClient(address, timeout_s=20.0)))
    caller.start()  # before somebody listens
    server = StoreServer(address, "weights")
    caller.join()
    (client,) = calls
    with server.values._condition:  # its thread cannot go on
        client.answer_s = 0.1
        with pytest.raises(StoreLostError, match=r"nobody answered .* within 0\.1 s"):
            client.peek(["a"])
    client.answer_s = 10.0
    assert client.add("n", 1) == 1, "a late answer is not taken for that of another request"
    client.close()
    server.close()


def test_a_wait_can_be_given_up(server: StoreServer, client: StoreClient) -> None:
    class GivenUpError(Exception):
        pass

    def give_up() -> None:
        raise GivenUpError

    client.check = give_up
    for wait in (lambda: client.wait(["never"], 60.0), lambda: server.values.wait(["never"], 60.0, give_up)):
        with pytest.raises(GivenUpError):
            wait()


def test_it_holds_so_much_and_no_more(client: StoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    monkeypatch.setattr(module, "MAX_KEYS", 20)
    client.set("large", bytes(900))
    with pytest.raises(StoreError, match="the store is full: 1 keys, 905 bytes"):
        client.set("more", bytes(92))
    for ask in (client.peek, lambda keys: client.wait(keys, 10.0)):
        with pytest.raises(StoreError, match="an answer of 1800 bytes is too large"):
            ask(["large", "large"])
    for _ in range(2):  # what was replaced or deleted takes no room
        client.set("large", bytes(900))
        client.delete("large")
    client.set("large", b"")
    for number in range(19):
        client.add(f"n{number}", 1)
    with pytest.raises(StoreError, match="the store is full: 20 keys"):
        client.add("one more", 1)
    with pytest.raises(StoreError, match="large holds b'', which is not a number"):
        client.add("large", 1)
    with pytest.raises(StoreError, match="2 keys where one is needed"):
        client._ask("add", ["a", "b"], more=1)
    with pytest.raises(StoreError, match="a key of 600 characters"):
        Values().set("x" * 600, b"")
    monkeypatch.setattr(module, "MAX_VALUE_BYTES", 100)
    with pytest.raises(StoreError, match="a key of 1 characters with 101 bytes is too large"):
        Values().set("x", bytes(101))


def test_of_too_many_callers_the_one_longest_silent_is_forgotten(
    address: str, server: StoreServer, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.wire.store_server.MAX_CLIENTS", 1)
    other = StoreClient(address, timeout_s=10.0)
    server.ring()
    other.await_ring(10.0)
    assert not client._socket.poll(100), "it is not rung for"
    assert client.add("n", 1) == 1, "it is served when it asks"
    other.close()


RUBBISH = [
    [b""],
    [b"\xc1"],
    [b"\x93" * 5000],
    [msgpack.packb({"number": 1})],
    [msgpack.packb({"number": 1, "what": "get", "keys": [], "value": b"", "more": 0, "timeout_s": 0.0})],
    [msgpack.packb({"number": 1, "what": "set", "keys": ["a"], "value": "text", "more": 0, "timeout_s": 0.0})],
    [msgpack.packb({"number": 1, "what": "set", "keys": ["a" * 513], "value": b"", "more": 0, "timeout_s": 0.0})],
    [msgpack.packb({"number": 1, "what": "wait", "keys": ["a"], "value": b"", "more": 0, "timeout_s": -1.0})],
    [msgpack.packb({"number": 1, "what": "peek", "keys": ["a"] * 1025, "value": b"", "more": 0, "timeout_s": 0.0})],
    [msgpack.packb({"number": 1, "what": "hello", "keys": [], "value": b"", "more": 0, "timeout_s": 0.0}), b""],
]


def test_rubbish_is_counted_and_not_answered_and_who_sends_much_of_it_is_cut_off(
    address: str, server: StoreServer, client: StoreClient
) -> None:
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.connect(address)
    with capture_logs() as logs:
        for frames in RUBBISH * 2:
            stranger.send_multipart(frames)
        hello = {"number": 1, "what": "hello", "keys": [], "value": b"", "more": 0, "timeout_s": 0.0}
        stranger.send(msgpack.packb(hello))
        deadline = time.monotonic() + 10.0
        while server.bad_peers.bad_messages <= MAX_BAD_MESSAGES:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not stranger.poll(200)
    assert client.add("n", 1) == 1
    assert server.bad_peers.bad_messages == MAX_BAD_MESSAGES + 1
    assert {entry["event"] for entry in logs} == {"bad message to a store"}
    assert [entry["total"] for entry in logs] == [1, 2, 4, 8, 16], "one line for each doubling"
    assert len(server.values) == 1
    stranger.close(linger=0)


def call_as(user: int, path: str) -> int:
    """The error number that a process of this user gets when it connects to the unix socket; 0 for none."""
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        os._exit(socket.socket(socket.AF_UNIX).connect_ex(path))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_user_of_the_machine_cannot_connect(address: str, server: StoreServer) -> None:
    path = address.removeprefix("ipc://")
    assert call_as(0, path) == 0
    assert call_as(65534, path) == errno.EACCES


def test_with_keys_a_stranger_gets_nothing_changes_nothing_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.wire.curve_keys.FOLDER", str(tmp_path))
    keys, others = (write_keys(name) for name in ("test", "other"))
    # What a stranger may know: which key the server shows.
    public = {"server_public": json.loads(keys.read_text())["server_public"]}
    others.write_text(json.dumps(json.loads(others.read_text()) | public))
    server = StoreServer("tcp://127.0.0.1:*", "weights", keys=str(keys))
    address = server._socket.getsockopt_string(zmq.LAST_ENDPOINT)
    with capture_logs() as logs:

        def end_when_refused() -> None:
            if logs:
                raise StoreLostError("refused")

        with pytest.raises(StoreLostError):
            StoreClient(address, timeout_s=0.3)
        with pytest.raises(StoreLostError):  # the connection may end before this is noticed
            StoreClient(address, keys=str(others), timeout_s=20.0, check=end_when_refused)
    assert [entry["event"] for entry in logs] == ["a peer with a foreign key was refused"]
    client = StoreClient(address, keys=str(keys), timeout_s=10.0)
    assert client.peek(["x"]) == [None]
    client.close()
    server.close()
