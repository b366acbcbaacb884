"""The errors that the package raises on purpose. Each is also the built-in error that a caller would expect.

    AsyncrlError
    |-- ConfigError (ValueError)            a setting, a file it names, or a flag; exit code 2
    |-- DataError (ValueError)              a row of a dataset; exit code 2
    |-- ProtocolError (ValueError)          a message that does not fit its schema
    |   |-- UnknownPeerError                a message from outside the run
    |   |-- BodyError                       (wire/frames.py) a message of a known kind whose body does not fit
    |   `-- BadServerError                  (wire/rpc.py) a message of a channel's server that does not fit
    |-- PeerTimeoutError (TimeoutError)     another process missed its deadline
    |   `-- ServerLostError                 (wire/rpc.py) the server of a channel has ended
    |-- RunError (RuntimeError)             the run cannot continue; exit code 1
    |   `-- JournalError                    the journal cannot be written or read
    |-- InvariantError (AssertionError)     a defect of asyncrl itself
    |-- StoreError (ValueError)             (wire/store.py) a request that a key-value store refuses
    `-- ForkServerError                     (launch/fork_server.py)

A few exceptions are no AsyncrlError, since they never leave their folder: RoundAborted, SessionLost, SenderClosed and
Interrupted (weights/transports.py) steer a broadcast round, BadFileError (weights/version_store.py) makes a reader take
another way, Unconfined (sandbox/confine.py) reports a missing kernel feature, SkippedError (data/convert.py)
skips a row, and _OutOfTimeError (util/user_code.py) interrupts user code at its deadline.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

import structlog

log = structlog.get_logger()


class AsyncrlError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(AsyncrlError, ValueError):
    """A setting, a file it names, or a flag is wrong. Raised before any role starts; exit code 2."""


class DataError(AsyncrlError, ValueError):
    """A row of a dataset cannot be used; names the file, the row and the column. Exit code 2."""


class ProtocolError(AsyncrlError, ValueError):
    """A message does not fit its schema. Counted and answered, never fatal for the receiver."""


class UnknownPeerError(ProtocolError):
    """A message does not prove that its sender is part of the run. Counted, and not answered."""


class PeerTimeoutError(AsyncrlError, TimeoutError):
    """Another process did not answer within its deadline; the text names it."""


class RunError(AsyncrlError, RuntimeError):
    """The run cannot continue; exit code 1."""


class JournalError(RunError):
    """The journal cannot be written or read; names the file, the place and the way out."""


class InvariantError(AsyncrlError, AssertionError):
    """An invariant of the system does not hold: a defect of asyncrl, not a mistake of the user."""


def is_disk_full(error: BaseException | None) -> bool:
    """True if the error, or one that caused it, means that a disk is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


observer_failures: Counter[str] = Counter()
"""Failures in this process of what only observes the run, by what failed."""


@contextmanager
def observing(what: str) -> Generator[None]:
    """Turns any error in the block into a warning and a count: what only observes the run must not end it. Repeated
    failures are logged at every power of two."""
    try:
        yield
    except Exception as error:
        observer_failures[what] += 1
        count = observer_failures[what]
        if count & (count - 1) == 0:
            log.warning("an observer failed", what=what, failures=count, error=f"{type(error).__name__}: {error}")
