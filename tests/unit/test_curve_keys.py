"""CURVE keys: who may read them, and who is let in."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import zmq

from asyncrl.errors import ConfigError
from asyncrl.launch.resources.placement import reserve_ports
from asyncrl.util.redaction import redact
from asyncrl.wire import curve_keys as keys_module
from asyncrl.wire.curve_keys import Keys, read_keys, run_keys, write_keys
from asyncrl.wire.sockets import bind_router, connect_dealer


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(keys_module, "FOLDER", str(tmp_path / "home" / "keys"))
    return tmp_path / "home" / "keys"


@pytest.fixture
def echo() -> Iterator[tuple[zmq.Socket[bytes], str, Path]]:
    path = write_keys("echo")
    address = f"tcp://127.0.0.1:{reserve_ports(0, 1)[0]}"
    router = bind_router(address, "echo", keys=str(path))
    yield router, address, path
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


def test_only_the_runs_own_key_is_let_in(echo: tuple[zmq.Socket[bytes], str, Path], tmp_path: Path) -> None:
    router, address, path = echo
    ours = read_keys(str(path))
    public, secret = (key.decode() for key in zmq.curve_keypair())
    foreign = write_keys("foreign")
    foreign.write_text(json.dumps(asdict(replace(ours, client_public=public, client_secret=secret))))
    for file in ("", str(foreign)):
        stranger = connect_dealer(address, keys=file, linger_s=0.0)
        assert not reaches(router, stranger, 500), "neither without keys nor with foreign ones"
        stranger.close()
    friend = connect_dealer(address, keys=str(path))
    assert reaches(router, friend, 5000)
    friend.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_listener_takes_frames_of_its_size_and_no_larger_ones(encrypted: bool) -> None:
    keys = str(write_keys("frames")) if encrypted else ""
    address = f"tcp://127.0.0.1:{reserve_ports(0, 1)[0]}"
    router = bind_router(address, "frames", keys=keys, max_frame_bytes=100_000)
    for size, comes in ((100_000, True), (101_000, False)):
        batcher = connect_dealer(address, keys=keys, linger_s=0.0)
        batcher.send(bytes(size))
        assert bool(router.poll(5000 if comes else 500)) is comes
        if comes:
            router.recv_multipart()
        batcher.close()
    router.close()


def test_a_guarded_socket_ends_with_its_guard(echo: tuple[zmq.Socket[bytes], str, Path]) -> None:
    router, address, path = echo
    assert router.guard.is_alive()  # type: ignore[attr-defined]
    context, guard = router.context, router.guard  # type: ignore[attr-defined]
    router.close()
    assert context.closed and not guard.is_alive()
    again = bind_router(address, "echo", keys=str(path))
    again.close()


def test_key_file_is_the_owners_only_and_ends_with_the_run(folder: Path) -> None:
    before = os.umask(0)
    try:
        with run_keys("run-1") as path:
            assert (path.parent, stat.S_IMODE(path.stat().st_mode)) == (folder, 0o600)
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            keys = read_keys(str(path))
            assert len(set(asdict(keys).values())) == 4
            assert redact({"text": [f"it is {keys.server_secret}"]}) == {"text": ["it is ***"]}
    finally:
        os.umask(before)
    assert not path.exists()


def test_key_files_of_launchers_that_were_killed_are_removed_and_no_others(folder: Path) -> None:
    code = (
        "import sys; from asyncrl.wire import curve_keys; curve_keys.FOLDER = sys.argv[1]; "
        "keys = curve_keys.run_keys(sys.argv[2]); keys.__enter__(); print('up', flush=True); sys.stdin.read()"
    )
    with ExitStack() as stack:
        launchers: list[subprocess.Popen[bytes]] = []
        for name in ("killed", "goes-on"):
            command = [sys.executable, "-c", code, str(folder), name]
            one = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            stack.callback(one.kill)
            assert one.stdout is not None and one.stdout.readline() == b"up\n"
            launchers.append(one)
        launchers[0].kill()
        launchers[0].wait(10)
        assert sorted(path.stem for path in folder.iterdir()) == ["goes-on", "killed"]
        with run_keys("third"):
            assert sorted(path.name for path in folder.iterdir()) == ["goes-on.json", "third.json"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_key_file_that_others_may_read_is_refused(mode: int) -> None:
    path = write_keys("open")
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"key file {path}: mode {mode:o} lets others .* chmod 600 {path}"):
        read_keys(str(path))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"server_public": 1}', json.dumps(asdict(Keys("a", "b", "c", "d")))])
def test_a_file_without_keys_is_refused(text: str) -> None:
    path = write_keys("broken")
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"key file {path}: not the JSON of server_public"):
        read_keys(str(path))


def test_a_missing_key_file_says_when_it_exists(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; it exists while its run continues"):
        read_keys(str(tmp_path / "none.json"))
