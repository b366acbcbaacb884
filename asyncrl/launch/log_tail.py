"""The end of a role's log, for where the log itself cannot be read."""

from __future__ import annotations

from pathlib import Path

from asyncrl.wire.guest_messages import MAX_LOG_LINES

MAX_BYTES = 1 << 16
"""Maximum size of what is read at once. When more has come since the last time, the earlier part is left out."""


class LogTail:
    """The lines that are appended to a log from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = self._size()

    def read(self) -> tuple[list[str], int]:
        """Returns the last of the complete lines that were not `passed`, and where they end."""
        start = max(self._offset, self._size() - MAX_BYTES)
        if not self._path.is_file():
            return [], start
        with self._path.open("rb") as file:
            file.seek(start)
            data = file.read(MAX_BYTES)
        first = data.find(b"\n") + 1 if start > self._offset else 0
        end = data.rfind(b"\n") + 1
        lines = data[first:end].decode(errors="replace").split("\n")[:-1]
        return lines[-MAX_LOG_LINES:], start + end

    def passed(self, end: int) -> None:
        """Notes that what ends there was passed on."""
        self._offset = end

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.is_file() else 0
