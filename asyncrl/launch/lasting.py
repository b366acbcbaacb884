"""A console that outlives its terminal."""

from __future__ import annotations

import os
from typing import IO, Any, cast

import structlog
from rich.console import Console

log = structlog.get_logger()


class LastingFile:
    """A file whose writes are dropped once nobody reads them any more: the terminal was closed, the pipe has lost its
    other end."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._gone = False

    def write(self, text: str) -> int:
        try:
            return len(text) if self._gone else self._file.write(text)
        except OSError as error:
            self._leave(error)
            return len(text)

    def flush(self) -> None:
        try:
            if not self._gone:
                self._file.flush()
        except OSError as error:
            self._leave(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _leave(self, error: OSError) -> None:
        self._gone = True
        # What is buffered is written when Python ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._file.fileno())
        os.close(nowhere)
        log.warning("nobody reads the console any more", error=str(error))


def lasting(console: Console) -> Console:
    """The console; what it prints when nobody reads it any more is dropped."""
    console.file = cast(IO[str], LastingFile(console.file))
    return console
