"""The folder of a run's sockets: who can enter it, where it is, and what becomes of it when its launcher dies."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.wire.sockets import MAX_BASE_BYTES, MAX_SOCKET_NAME_BYTES, bind_router, connect_dealer, socket_folder

HOLD = """
from asyncrl.wire.sockets import socket_folder
with socket_folder() as folder:
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def test_only_the_owner_can_enter_it_and_it_ends_with_the_block(base: Path) -> None:
    before = os.umask(0)
    try:
        with socket_folder() as folder:
            assert folder.parent == base
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            router = bind_router(f"ipc://{folder}/{'x' * MAX_SOCKET_NAME_BYTES}", "x")
            router.close()
    finally:
        os.umask(before)
    assert list(base.iterdir()) == []


def test_what_a_killed_launcher_left_is_removed_and_what_a_living_one_uses_is_not(base: Path) -> None:
    launchers = [
        subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = [Path(one.stdout.readline().strip()) for one in launchers if one.stdout is not None]
    killed, living = launchers
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folders[0] / "replay"))
        killed.kill()
        killed.wait()
        kept = [base / "asyncrl-sockets-of-mine", base / "asyncrl-sockets-1234567_"]
        for path in kept:
            path.mkdir()  # one that has not our kind of name, one that others may enter
            path.chmod(0o755)
            (path / "work").touch()
        assert all(folder.exists() for folder in folders)
        with socket_folder() as folder:
            assert {*base.iterdir()} == {folders[1], folder, *kept}
        living.communicate("\n", timeout=20)
        assert {*base.iterdir()} == {*kept}
    finally:
        for one in launchers:
            one.kill()
            one.wait()


def test_a_path_too_long_for_sockets_is_passed_over(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = base / ("x" * MAX_BASE_BYTES)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with socket_folder() as folder:
        assert folder.parent == Path("/tmp")
    name = "r" * (MAX_SOCKET_NAME_BYTES + 30)
    with pytest.raises(ConfigError, match=r"replay socket .*: the path has \d+ bytes, .* at most 107; set TMPDIR to"):
        bind_router(f"ipc://{long}/{name}", "replay")


def test_a_folder_that_cannot_be_used_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(base / "gone"))
    monkeypatch.setattr("asyncrl.wire.sockets.TEMPORARY", (str(base / "none"),))
    with (
        pytest.raises(ConfigError, match=f"{base / 'gone'} and {base / 'none'} are not writable.*set TMPDIR"),
        socket_folder(),
    ):
        pass


@pytest.mark.parametrize("make", [lambda address: bind_router(address, "replay"), connect_dealer])
def test_neither_end_uses_a_folder_that_others_can_enter(base: Path, make) -> None:  # type: ignore[no-untyped-def]
    folder = base / "open"
    folder.mkdir()
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match=rf"others than the owner can enter .*750\); chmod 700 {folder}"):
        make(f"ipc://{folder}/replay")
    folder.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(folder, 1, 1)
        with pytest.raises(ConfigError, match="its folder belongs to user 1, this is user 0"):
            make(f"ipc://{folder}/replay")
    with pytest.raises(ConfigError, match="No such file or directory; its folder exists while the run continues"):
        make(f"ipc://{folder}/none/replay")


def test_a_listener_is_not_pushed_aside_and_one_that_died_is_replaced(base: Path) -> None:
    base.chmod(0o700)
    address = f"ipc://{base}/replay"
    first = bind_router(address, "replay")
    with pytest.raises(ConfigError, match=f"replay address {address}: .* another process listens there"):
        bind_router(address, "replay")
    first.close()
    dealer = connect_dealer(address, linger_s=0.0)
    second = bind_router(address, "replay")
    # ZeroMQ ends the first one's connections in the background: messages sent before that may be lost.
    for _ in range(100):
        dealer.send(b"hello")
        if second.poll(100):
            break
    else:
        pytest.fail("callers do not find the new one")
    dealer.close()
    second.close()
