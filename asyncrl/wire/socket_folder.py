"""The folder of a run's unix sockets, which only its owner can enter, by file permissions."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from asyncrl.errors import ConfigError
from asyncrl.util.locks import remove_leftovers, temporary_folder

PREFIX = "asyncrl-sockets-"
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
    remove_leftovers(PREFIX, base)
    with temporary_folder(PREFIX, base) as folder:
        yield folder


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
    is_sticky = bool(status.st_mode & stat.S_ISVTX)
    if status.st_uid not in (0, os.geteuid()) and not (is_sticky and status.st_uid == _unmapped_user()):
        return f"belongs to user {status.st_uid}, who can rename what is in it"
    if status.st_mode & 0o022 and not is_sticky:
        return "lets other users rename what is in it"
    return ""


def _unmapped_user() -> int | None:
    """The user id that this user namespace, as of a rootless container, shows for the machine's root and others whom it
    does not map; None outside of one."""
    try:
        first, _, count = Path("/proc/self/uid_map").read_text().split()[:3]
        if (first, count) == ("0", str((1 << 32) - 1)):
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None
