"""Exclusive locks of files and folders, on every file system that has a kind of lock.

Files have open file description locks, which NFS passes on to its server, and which others can look at without taking
one. Folders have flock, and so have files where the first kind is missing (gVisor). A lock belongs to the open file:
it ends with the last descriptor of it, or with the processes that have one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from asyncrl.errors import ConfigError

log = structlog.get_logger()

IN_USE = (errno.EAGAIN, errno.EACCES)
"""Another process has the lock. Any other error means that the file system, or its lock server, lacks the kind."""
FIELDS = "hhqqi4x"
"""The kernel's `struct flock`: type, origin, start, length (0: to the end) and process (0 for this kind of lock)."""
COMPLETE_FILE = struct.pack(FIELDS, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def try_lock(descriptor: int, path: Path, *, setting: str = "runs_dir") -> bool:
    """Locks an open folder, or a file that is open for writing. Returns False if another one has the lock. Raises
    ConfigError, with the `setting` that names another place, if the file system has no locks."""
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, COMPLETE_FILE)
            return True
    except OSError as error:
        if error.errno in IN_USE:
            return False
    return _try_flock(descriptor, fcntl.LOCK_EX, path, setting)


def is_locked(descriptor: int, path: Path) -> bool:
    """True if another one has the lock of an open file. Takes no lock, unless flock is all that there is. Raises
    ConfigError if the file system has no locks."""
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, COMPLETE_FILE)
    except OSError:
        is_free = _try_flock(descriptor, fcntl.LOCK_SH, path, "runs_dir")
        if is_free:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        return not is_free
    return struct.unpack(FIELDS, answer)[0] != fcntl.F_UNLCK


@contextmanager
def temporary_folder(prefix: str, base: Path) -> Iterator[Path]:
    """A new folder of mode 0700, which is locked (flock) and exists during the block. On a file system without locks it
    is not locked, and if its process is killed it stays, since nobody can find out that it is a leftover."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            try_lock(lock, folder, setting="TMPDIR")
        except ConfigError as error:
            log.warning("a folder for temporary files is not locked", error=str(error))
        if folder.exists():
            break
        os.close(lock)  # another process removed it as a leftover before it was locked
    try:
        yield folder
    finally:
        shutil.rmtree(folder, onerror=warn_not_removed)
        os.close(lock)


def remove_leftovers(prefix: str, base: Path) -> None:
    """Removes the folders of `temporary_folder` whose processes were killed: those of this user that nobody locks."""
    name = re.compile(re.escape(prefix) + r"[a-z0-9_]{8}")  # as mkdtemp makes them
    for folder in base.glob(f"{prefix}*"):
        if not name.fullmatch(folder.name):
            continue
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or deleted
        try:
            status = os.fstat(lock)
            is_ours = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700
            if is_ours and try_lock(lock, folder, setting="TMPDIR"):
                shutil.rmtree(folder, onerror=warn_not_removed)
        except ConfigError:
            return  # no locks: it may be in use
        finally:
            os.close(lock)


def warn_not_removed(_: object, path: str | Path, problem: tuple[object, BaseException, object]) -> None:
    """Logs a file that `shutil.rmtree` cannot remove, as its `onerror`."""
    log.warning("a temporary file is not removed", path=str(path), error=str(problem[1]))


def no_locks(path: Path, error: OSError, setting: str = "runs_dir") -> ConfigError:
    """Returns the error for a file system that refuses a lock."""
    return ConfigError(
        f"{path}: its file system has no locks ({error.strerror}); mount it with locks (Lustre: -o flock; NFS on a "
        f"single host: -o local_lock=all), or set {setting} to a folder of another one"
    )


def _try_flock(descriptor: int, kind: int, path: Path, setting: str) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in IN_USE:
            return False
        raise no_locks(path, error, setting) from None
    return True
