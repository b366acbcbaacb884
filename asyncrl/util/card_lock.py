"""The lock of a card: of the roles that share a GPU, or the cores of a CPU, one uses it at a time.

It is a record lock of the system on a file of the run folder, so that the death of its holder releases it, and children
of the holder do not keep it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.errors import PeerTimeoutError
from asyncrl.util.locks import IN_USE, no_locks

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
