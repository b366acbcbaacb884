"""CURVE keys: who is let in."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import zmq
from msgspec.structs import asdict, replace

from asyncrl.errors import ConfigError
from asyncrl.launch.machine import find_port
from asyncrl.util.text import redact
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.sockets import Keys, bind_router, connect_dealer, new_keys, read_keys


@pytest.fixture
def echo() -> Iterator[tuple[zmq.Socket[bytes], str, str]]:
    keys = new_keys()
    address = f"tcp://127.0.0.1:{find_port()}"
    router = bind_router(address, "echo", keys=keys)
    yield router, address, keys
    router.close()


def reaches(router: zmq.Socket[bytes], batcher: zmq.Socket[bytes], timeout_ms: int) -> bool:
    try:
        batcher.send(b"hello", zmq.DONTWAIT)
    except zmq.Again:  # ZeroMQ stops connecting to a listener that refused it
        return False
    if not router.poll(timeout_ms):
        return False
    router.send_multipart(router.recv_multipart())
    return bool(batcher.poll(10_000)) and batcher.recv() == b"hello"


def test_only_the_runs_own_key_is_let_in(echo: tuple[zmq.Socket[bytes], str, str]) -> None:
    router, address, keys = echo
    ours = read_keys(keys)
    public, secret = (key.decode() for key in zmq.curve_keypair())
    foreign = json.dumps(asdict(replace(ours, client_public=public, client_secret=secret)))
    for wrong in ("", foreign):
        stranger = connect_dealer(address, keys=wrong, linger_s=0.0)
        assert not reaches(router, stranger, 500), "neither without keys nor with foreign ones"
        stranger.close()
    friend = connect_dealer(address, keys=keys)
    assert reaches(router, friend, 5000)
    friend.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_listener_takes_frames_of_its_size_and_no_larger_ones(encrypted: bool) -> None:
    keys = new_keys() if encrypted else ""
    address = f"tcp://127.0.0.1:{find_port()}"
    router = bind_router(address, "frames", keys=keys, max_frame_bytes=100_000)
    for size, comes in ((100_000, True), (101_000, False)):
        batcher = connect_dealer(address, keys=keys, linger_s=0.0)
        batcher.send(bytes(size))
        assert bool(router.poll(5000 if comes else 500)) is comes
        if comes:
            router.recv_multipart()
        batcher.close()
    router.close()


def test_a_socket_ends_with_its_authenticator(echo: tuple[zmq.Socket[bytes], str, str]) -> None:
    router, address, keys = echo
    context, authenticator = router.context, getattr(router, "authenticator")  # noqa: B009
    assert authenticator.is_alive()
    router.close()
    assert context.closed and not authenticator.is_alive()
    again = bind_router(address, "echo", keys=keys)
    again.close()


def test_keys_are_new_and_secrets_are_redacted() -> None:
    keys, others = read_keys(new_keys()), read_keys(new_keys())
    assert len({*asdict(keys).values(), *asdict(others).values()}) == 8
    assert redact({"text": [f"it is {keys.server_secret}"]}) == {"text": ["it is ***"]}
    assert keys.server_secret not in repr(Endpoints("run", "", "", "", keys=new_keys()))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"server_public": 1}', json.dumps(asdict(Keys("a", "b", "c", "d")))])
def test_a_text_without_keys_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="keys are not the JSON of server_public"):
        read_keys(text)
