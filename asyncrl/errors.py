"""Every error the package raises on purpose. Each also is the standard error a caller would expect."""

from __future__ import annotations

import errno


class AsyncrlError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(AsyncrlError, ValueError):
    """A setting, a file it names, or a flag is wrong. Raised before any role starts; exit code 2."""


class DataError(AsyncrlError, ValueError):
    """A row of a dataset cannot be used; names the file, the row and the column. Exit code 2."""


class ProtocolError(AsyncrlError, ValueError):
    """A message does not fit its schema. Counted and answered, never fatal for the receiver."""


class StrangerError(ProtocolError):
    """A message does not prove that its sender is part of the run. Counted, and not answered."""


class PeerTimeoutError(AsyncrlError, TimeoutError):
    """Another process did not answer within its deadline; the text names it."""


class RunError(AsyncrlError, RuntimeError):
    """The run cannot go on; exit code 1."""


class JournalError(RunError):
    """The journal cannot be written or read; names the file, the place and the way out."""


class InvariantError(AsyncrlError, AssertionError):
    """A promise of the system itself is broken (a defect here, not a user's mistake)."""


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised from, is that no space is left on a disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False
