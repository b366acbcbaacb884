"""Exclusive locks: of files and folders, on every file system that has a kind of lock, and of devices that roles share.

Files have open file description locks, which NFS passes on to its server, and which others can look at without taking
one. Folders have flock, and so have files where the first kind is missing (gVisor). A lock belongs to the open file:
it ends with the last descriptor of it, or with the processes that have one. The lock of a device is a record lock on a
file of the run folder: the death of its holder releases it, and children of the holder do not keep it.
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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog

from asyncrl.errors import ConfigError, PeerTimeoutError

log = structlog.get_logger()

IN_USE = (errno.EAGAIN, errno.EACCES)
"""Another process has the lock. Any other error means that the file system, or its lock server, has no such kind."""
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


POLL_S = 0.005
"""Interval of the attempts to acquire a card."""
_RECORD_BYTES = 128
_HELD, _WANTED, _VISITED = 0, 1, 2
"""The bytes of the file that are locked by the holder, by a role that should get the card soon, and by one that has
memory on it in the turn of its holder."""


class CardLock:
    """One role's side of the lock of a card. Of one process and one thread.

    The file says who acquired it last, and since when nothing was finished with it: the time at which it was modified.
    """

    def __init__(self, path: Path, owner: str) -> None:
        """`owner` is the name of the role."""
        self._owner, self._name = owner, path.stem
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.held = False
        """True while this role has the card."""

    @property
    def last(self) -> str:
        """The role that acquired the card last; empty if none did, or if that one has left."""
        return self._record()[0]

    @property
    def is_wanted(self) -> bool:
        """True if another role should get the card soon. The holder looks at it between two of its steps."""
        if not self._try(_WANTED):
            return True
        self._free(_WANTED)
        return False

    def try_acquire(self) -> bool:
        """Acquires the card unless another role has it, or memory on it. Returns True if it was acquired; a visit of
        this role has ended then."""
        if not self._try(_HELD):
            return False
        if not self._try(_VISITED):
            self._free(_HELD)
            return False
        self._free(_VISITED)
        self._write(f"{self._owner} {os.getpid()}")
        self.held = True
        return True

    def acquire(self, timeout_s: float, *, in_turn: bool = False, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Waits for the card. With `in_turn` another role must have had it since this one did; otherwise its holder is
        asked to release it soon. `meanwhile` is called during the wait. Raises PeerTimeoutError if its holder finishes
        nothing within `timeout_s`."""
        wait = CardWait(self, timeout_s)
        if not in_turn:
            self._try(_WANTED)
        try:
            while (in_turn and self.last == self._owner) or not self.try_acquire():
                wait.check()
                time.sleep(POLL_S)
                meanwhile()
                if not in_turn:
                    self._try(_WANTED)
        finally:
            self._free(_WANTED)

    def visit(self, timeout_s: float) -> None:
        """Keeps other roles from acquiring the card, which one of them has: when that one ends, this role's memory is
        still there. Raises PeerTimeoutError as `acquire`."""
        wait = CardWait(self, timeout_s)
        while not self._try(_VISITED):  # another role looks at it
            wait.check()
            time.sleep(POLL_S)

    def end_visit(self) -> None:
        """This role has freed its memory."""
        self._free(_VISITED)

    def note_progress(self) -> None:
        """States that the holder has finished something: the deadlines of those who wait start again."""
        os.utime(self._file)

    def release(self) -> None:
        """Releases the card, if this role has it."""
        if self.held:
            self.held = False
            self._free(_HELD)

    def leave(self) -> None:
        """Releases the card, for the last time; idempotent."""
        if self._file < 0:
            return
        if self.held or self.last == self._owner:
            self._write("")
        self.release()
        os.close(self._file)
        self._file = -1

    def changed_ns(self) -> int:
        """The time at which it was acquired, or its holder last finished something."""
        return os.fstat(self._file).st_mtime_ns

    def describe(self) -> str:
        """Says whose turn it is, for error messages."""
        name, process = self._record()
        is_visited = not self._try(_VISITED)
        if not is_visited:
            self._free(_VISITED)
        who = f"{name}, process {process}" if name else "free"
        return f"{self._name} ({who}{'; another role has memory on it' if is_visited else ''})"

    def _record(self) -> tuple[str, str]:
        name, _, process = os.pread(self._file, _RECORD_BYTES, 0).decode(errors="replace").strip().partition(" ")
        return name, process

    def _write(self, text: str) -> None:
        os.pwrite(self._file, text.encode()[:_RECORD_BYTES].ljust(_RECORD_BYTES), 0)  # at once: others read it

    def _try(self, byte: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError as error:
            if error.errno in IN_USE:
                return False
            raise no_locks(Path(self._name), error) from None
        return True

    def _free(self, byte: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)


class CardWait:
    """The deadline of a wait for a card, which starts again whenever its holder finishes something."""

    def __init__(self, lock: CardLock, timeout_s: float) -> None:
        self._lock, self._timeout_s = lock, timeout_s
        self._seen = lock.changed_ns()
        self._since_s = time.monotonic()

    def check(self) -> None:
        """Raises PeerTimeoutError after the deadline."""
        seen, now_s = self._lock.changed_ns(), time.monotonic()
        if seen != self._seen:
            self._seen, self._since_s = seen, now_s
        if now_s - self._since_s > self._timeout_s:
            raise PeerTimeoutError(
                f"the card {self._lock.describe()} was not released, and nothing was finished with it, within "
                f"{self._timeout_s:g} s (launch.progress_timeout_s)"
            )


class Cards:
    """The locks of all cards of a role, which are acquired together."""

    def __init__(self, locks: Sequence[CardLock]) -> None:
        self._locks = locks

    @property
    def is_wanted(self) -> bool:
        """True if another role should get one of them soon."""
        return any(lock.is_wanted for lock in self._locks)

    def try_acquire(self) -> bool:
        """Acquires all cards, or none. A part of them would be missing to those who want another part."""
        for lock in self._locks:
            if not lock.try_acquire():
                self.release()
                return False
        return True

    def waits(self, timeout_s: float) -> list[CardWait]:
        """The deadlines of a wait for them."""
        return [CardWait(lock, timeout_s) for lock in self._locks]

    def acquire(self, timeout_s: float) -> None:
        """Waits for one card after the other. Their holders are asked to release them soon."""
        for lock in self._locks:
            lock.acquire(timeout_s)

    def visit(self, timeout_s: float) -> None:
        """As `CardLock.visit`."""
        for lock in self._locks:
            lock.visit(timeout_s)

    def end_visit(self) -> None:
        """As `CardLock.end_visit`."""
        for lock in self._locks:
            lock.end_visit()

    def note_progress(self) -> None:
        """As `CardLock.note_progress`."""
        for lock in self._locks:
            lock.note_progress()

    def release(self) -> None:
        """Releases all cards."""
        for lock in self._locks:
            lock.release()

    def leave(self) -> None:
        """Releases all cards, for the last time; idempotent."""
        for lock in self._locks:
            lock.leave()


def card_path(run_dir: Path, card: int) -> Path:
    """Returns the file of the lock of a card, by the number of its learner rank."""
    return run_dir / "cards" / f"card-{card}"
