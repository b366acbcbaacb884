"""The key-value store: its answers, a dead holder, and unknown peers."""

from __future__ import annotations

import errno
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from asyncrl.wire.rpc import ServerLostError
from asyncrl.wire.sockets import new_keys
from asyncrl.wire.store import RemoteStore, StoreError, StoreServer, TorchStore


def await_true(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.005)


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
def client(address: str, server: StoreServer) -> Iterator[RemoteStore]:
    client = RemoteStore.connect(address, timeout_s=10.0)
    yield client
    client.close()


def test_holder_and_callers_see_the_same(server: StoreServer, client: RemoteStore) -> None:
    client.ask("set", ["a"], b"\0\xff")
    server.ask("set", ["b"], b"text")
    for one in (server, client):
        assert one.ask("get", ["a", "none", "b"]).values == [b"\0\xff", None, b"text"]
        assert one.ask("wait", ["b", "a"], within_s=1.0).values == [b"text", b"\0\xff"]
    steps = [(client, 2), (server, 0), (server, -5), (client, 1)]
    assert [one.ask("add", ["n"], amount=more).count for one, more in steps] == [2, 2, -3, -2]
    deletions = [(client, "a"), (client, "a"), (server, "b"), (server, "b")]
    assert [one.ask("delete", [key]).count for one, key in deletions] == [1, 0, 1, 0]
    server.ask("set", ["group/1/x"])
    server.ask("set", ["group/10/x"])
    server.delete_all("group/1/")
    assert client.ask("get", ["group/1/x", "group/10/x"]).values == [None, b""]
    assert len(server) == 2


def test_torch_sees_what_is_there(server: StoreServer, client: RemoteStore) -> None:
    here, there = TorchStore(server, "a/", 1.0), TorchStore(client, "a/", 1.0)
    here.set("key", "text")
    there.set("raw", b"\0")
    assert (there.get("key"), here.get("raw"), there.add("n", 2), here.add("n", 1)) == (b"text", b"\0", 2, 3)
    assert (here.check(["key", "none"]), there.check(["key", "raw"])) == (False, True)
    there.wait(["key"], timedelta(seconds=1.0))
    with pytest.raises(TimeoutError, match=r"a/none was not in the store within 0\.1 s"):
        there.wait(["none"], timedelta(seconds=0.1))
    assert (there.delete_key("key"), here.delete_key("key"), there.clone()) == (True, False, there)


@pytest.mark.parametrize("setter", ["holder", "another"])
def test_a_wait_ends_when_the_last_key_is_there_or_at_its_deadline(
    address: str, server: StoreServer, client: RemoteStore, setter: str
) -> None:
    other = RemoteStore.connect(address, timeout_s=10.0)
    who = server if setter == "holder" else other
    for one in (server, client):
        started = time.monotonic()
        timer = threading.Timer(0.1, who.ask, ["set", ["later"], b"1"])
        timer.start()
        assert one.ask("wait", ["later"], within_s=20.0).values == [b"1"]
        assert 0.09 < time.monotonic() - started < 10.0
        timer.join()
        started = time.monotonic()
        with pytest.raises(TimeoutError, match=r"never was not in the store within 0\.1 s"):
            one.ask("wait", ["later", "never"], within_s=0.1)
        assert 0.09 < time.monotonic() - started < 10.0
        server.ask("delete", ["later"])
    other.close()


@pytest.mark.parametrize("what", ["answer", "push"])
def test_a_holder_that_is_gone_is_noticed_at_once(server: StoreServer, client: RemoteStore, what: str) -> None:
    timer = threading.Timer(0.1, server.close)
    timer.start()
    started = time.monotonic()
    with pytest.raises(ServerLostError, match="is gone"):
        client.ask("wait", ["never"], within_s=60.0) if what == "answer" else client.client.listen(60.0)
    assert time.monotonic() - started < 10.0
    timer.join()


def test_a_holder_that_never_comes_or_does_not_answer_has_a_deadline(address: str) -> None:
    with pytest.raises(ServerLostError, match=rf"nobody answered at {address} within 0\.1 s"):
        RemoteStore.connect(address, timeout_s=0.1)
    calls: list[RemoteStore] = []
    caller = threading.Thread(target=lambda: calls.append(RemoteStore.connect(address, timeout_s=20.0)))
    caller.start()  # before somebody listens
    server = StoreServer(address, "weights")
    caller.join()
    (client,) = calls
    with server._changed:  # its thread cannot continue
        client.answer_s = 0.1
        with pytest.raises(ServerLostError, match=r"nobody answered .* within 0\.1 s"):
            client.ask("get", ["a"])
    client.answer_s = 10.0
    assert client.ask("add", ["n"], amount=1).count == 1, "a late answer is not taken for that of another request"
    client.close()
    server.close()


def test_a_wait_can_be_given_up(client: RemoteStore) -> None:
    class GivenUpError(Exception):
        pass

    def give_up() -> None:
        raise GivenUpError

    client.client.check = give_up
    with pytest.raises(GivenUpError):
        client.ask("wait", ["never"], within_s=60.0)


def test_a_counter_is_a_number(client: RemoteStore) -> None:
    client.ask("set", ["text"], b"x")
    with pytest.raises(StoreError, match="text holds b'x', which is not a number"):
        client.ask("add", ["text"], amount=1)
    assert client.ask("add", ["n"], amount=1).count == 1


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


def test_with_keys_a_stranger_gets_nothing_and_foreign_keys_are_counted() -> None:
    keys, others = new_keys(), new_keys()
    # What a stranger may know: which key the server shows.
    others = json.dumps(json.loads(others) | {"server_public": json.loads(keys)["server_public"]})
    server = StoreServer("tcp://127.0.0.1:*", "weights", keys=keys)
    for wrong in ("", others):
        with pytest.raises(ServerLostError):
            RemoteStore.connect(server.channel.address, keys=wrong, timeout_s=0.5)
    assert server.channel.num_rejected >= 1
    client = RemoteStore.connect(server.channel.address, keys=keys, timeout_s=10.0)
    assert client.ask("get", ["x"]).values == [None]
    client.close()
    server.close()
