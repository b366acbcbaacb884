"""The folder of a run's unix sockets, which only its owner can enter, by file permissions."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
import zmq

from asyncrl.errors import ConfigError

log = structlog.get_logger()

PREFIX = "asyncrl-sockets-"
NAME = re.compile(re.escape(PREFIX) + r"[a-z0-9_]{8}")
"""As `mkdtemp` makes them."""
MAX_SOCKET_NAME_BYTES = 24
MAX_BASE_BYTES = zmq.IPC_PATH_MAX_LEN - len(f"/{PREFIX}12345678/") - MAX_SOCKET_NAME_BYTES
TEMPORARY = ("/tmp",)
"""Fallback if the path of the default folder for temporary files is too long."""
OTHERS = 0o077
"""Permissions of anyone but the owner."""


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A new folder of mode 0700 with a short path, which is locked (flock) and exists during the block.

    It is in the folder for temporary files (TMPDIR, else /tmp), and not in XDG_RUNTIME_DIR, which systemd empties when
    the user logs out, though the run continues. systemd-tmpfiles spares what is locked. Folders that killed launchers
    left are removed first. Raises ConfigError when no folder for temporary files is suitable.
    """
    base = socket_base()
    for path in base.glob(f"{PREFIX}*"):
        if NAME.fullmatch(path.name):
            _remove_leftover(path)
    folder, lock = _locked_folder(base)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, onerror=_warn)
        os.close(lock)


def check_socket(path: Path, what: str) -> None:
    """Raises ConfigError, which names `what` the socket is of, unless the path is short enough for one, and in a
    folder of this user that nobody else can enter."""
    size = len(os.fsencode(path))
    if size > zmq.IPC_PATH_MAX_LEN:
        raise ConfigError(
            f"{what} socket {path}: the path has {size} bytes, that of a unix socket at most {zmq.IPC_PATH_MAX_LEN}; "
            "set TMPDIR to a folder with a shorter path"
        )
    try:
        status = path.parent.stat()
    except OSError as error:
        raise ConfigError(
            f"{what} socket {path}: {error.strerror}; its folder exists while the run continues"
        ) from None
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"{what} socket {path}: its folder belongs to user {status.st_uid}, this is user {os.geteuid()}; only the "
            "user who started a run can connect to it"
        )
    if status.st_mode & OTHERS:
        raise ConfigError(
            f"{what} socket {path}: others than the owner can enter its folder (mode {stat.S_IMODE(status.st_mode):o})"
            f"; chmod 700 {path.parent}"
        )


def socket_base() -> Path:
    """Returns the first folder for temporary files that is suitable for sockets. Raises ConfigError if none is."""
    problems: list[str] = []
    for folder in dict.fromkeys(os.path.abspath(name) for name in (tempfile.gettempdir(), *TEMPORARY)):
        if problem := _unsuitable(folder):
            problems.append(f"{folder} {problem}")
        else:
            return Path(folder)
    raise ConfigError(f"no folder for the run's sockets: {'; '.join(problems)}; set TMPDIR to another one")


def _unsuitable(folder: str) -> str:
    """Why sockets cannot be below the folder; empty when they can."""
    if len(os.fsencode(folder)) > MAX_BASE_BYTES:
        return f"has a path of more than {MAX_BASE_BYTES} bytes, too long for unix sockets in it"
    try:
        status = os.stat(folder)
    except OSError as error:
        return f"cannot be used ({error.strerror})"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "is not writable"
    if status.st_uid not in (0, os.geteuid()) or (status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX):
        return "lets other users rename what is in it"
    return ""


def _locked_folder(base: Path) -> tuple[Path, int]:
    """A new folder and the descriptor that locks it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)  # another launcher removed it as a leftover before it was locked


def _remove_leftover(folder: Path) -> None:
    """Removes the folder of a launcher that was killed: one of this user that nobody locks."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return  # another user's, or gone
    try:
        status = os.fstat(lock)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            return
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, onerror=_warn)
    except BlockingIOError:
        return  # its run continues
    finally:
        os.close(lock)


def _warn(_: object, path: str, problem: tuple[object, BaseException, object]) -> None:
    log.warning("a folder of sockets is not removed", path=path, error=str(problem[1]))
