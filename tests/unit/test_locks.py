"""Locks on file systems that have all kinds of them, one, or none: a preloaded C library refuses the calls."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.launch.run_dir import RunFolder, is_running, lock_path
from asyncrl.util.locks import is_locked, try_lock
from tests.helpers.replay import small_config

REFUSING = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int refuses(const char *call) {
    const char *calls = getenv("REFUSED");
    if (!calls || !strstr(calls, call)) return 0;
    errno = atoi(getenv("REFUSED_ERRNO"));
    return 1;
}
int flock(int fd, int operation) { return refuses("flock") ? -1 : syscall(SYS_flock, fd, operation); }
static int control(int fd, int command, long argument) {
    int is_lock = command == F_SETLK || command == F_OFD_SETLK || command == F_OFD_GETLK;
    return is_lock && refuses("fcntl") ? -1 : syscall(SYS_fcntl, fd, command, argument);
}
int fcntl(int fd, int command, ...) {
    va_list list; va_start(list, command); long argument = va_arg(list, long); va_end(list);
    return control(fd, command, argument);
}
int fcntl64(int fd, int command, ...) {
    va_list list; va_start(list, command); long argument = va_arg(list, long); va_end(list);
    return control(fd, command, argument);
}
"""
BOTH = "flock fcntl"
EVERY_LOCK = """
import sys, tempfile
from pathlib import Path
from asyncrl.errors import ConfigError
from asyncrl.launch.run_dir import RunFolder, is_running
from asyncrl.replay.journal import lock
from asyncrl.sandbox.run_program import Sandbox
from asyncrl.colocate import DeviceLock
from asyncrl.wire.sockets import socket_folder
from tests.helpers.replay import small_config

config = small_config(run="one")
def run():
    with RunFolder(config) as folder:
        assert is_running(folder.path)
def looked():
    Path("runs").mkdir(exist_ok=True)
    Path("runs/.one.lock").touch()
    assert not is_running(config.run_dir)
def sockets():
    with socket_folder() as first, socket_folder():
        assert first.is_dir()
def sandbox():
    with Sandbox():
        pass
def card():
    assert DeviceLock(Path("devices/device-0"), "learner-0").try_acquire()
for call in (run, looked, lambda: lock(Path("journal")), card, sockets, sandbox):
    try:
        call()
        print("works")
    except ConfigError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refusing")
    (folder / "refusing.c").write_text(REFUSING)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "refusing.so", folder / "refusing.c"], check=True)
    return folder / "refusing.so"


def outcomes(library: Path, folder: Path, refused: str, number: int) -> list[str]:
    environment = {"LD_PRELOAD": str(library), "REFUSED": refused, "REFUSED_ERRNO": str(number)}
    done = subprocess.run(
        [sys.executable, "-c", EVERY_LOCK],
        cwd=folder,
        env=os.environ | environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if not line.startswith(("20", "\x1b"))]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_any_lock_each_place_names_the_way_out_and_temporary_folders_work(
    library: Path, tmp_path: Path, number: int
) -> None:
    run, looked, journal, card, sockets, sandbox = outcomes(library, tmp_path, BOTH, number)
    for error, name in [(run, "runs/.one.lock"), (looked, "runs/.one.lock"), (journal, "journal"), (card, "device-0")]:
        assert error.startswith(f"{name}: its file system has no locks ({os.strerror(number)}); mount it with locks")
        assert error.endswith("or set runs_dir to a folder of another one")
    assert sockets == sandbox == "works"


def test_one_kind_of_lock_is_enough_for_all_but_shared_cards(library: Path, tmp_path: Path) -> None:
    assert outcomes(library, tmp_path, "flock", errno.ENOSYS) == ["works"] * 6
    run, looked, journal, card, sockets, sandbox = outcomes(library, tmp_path, "fcntl", errno.EINVAL)
    assert {run, looked, journal, sockets, sandbox} == {"works"} and card.startswith("device-0: its file system has no")


def test_a_lock_ends_with_its_descriptor_and_not_with_another_of_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as first, path.open("r+") as second:
        assert try_lock(first.fileno(), path) and not try_lock(second.fileno(), path)
        with path.open() as third:
            assert is_locked(third.fileno(), path)
        assert is_locked(second.fileno(), path)
        first.close()
        assert not is_locked(second.fileno(), path) and try_lock(second.fileno(), path)


def test_two_launchers_never_hold_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler repeats the command at the moment of an end: the second has opened the file that the first locks."""
    monkeypatch.chdir(tmp_path)
    config = small_config(run="one")
    with RunFolder(config):
        second = RunFolder(config)
    with second:
        assert is_running(config.run_dir)
        with pytest.raises(ConfigError, match=rf"is running \(process {os.getpid()}\)"):
            RunFolder(config).__enter__()
        assert not Path("runs/one.2").exists()


def test_observers_keep_no_run_from_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = small_config(run="one")
    with RunFolder(config) as folder:
        pass
    folder.path.rmdir()
    assert stat.S_IMODE(lock_path(config.run_dir).stat().st_mode) == 0o600
    watch = "import sys; from pathlib import Path; from asyncrl.launch.run_dir import is_running\nprint(flush=True)\n"
    watch += "while True: is_running(Path('runs/one'))"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", watch], env=environment, stdout=subprocess.PIPE) as observer:
        try:
            assert observer.stdout is not None and observer.stdout.readline()
            for _ in range(200):
                with RunFolder(config) as folder:
                    pass
                folder.path.rmdir()
        finally:
            observer.kill()
