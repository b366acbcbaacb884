"""The guests of a run: machines with a key of their own, which may do what a generator does and nothing else.

`asyncrl invite` writes the table of guests into the run folder, where the replay queue reads it again when it changes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from asyncrl.errors import StrangerError
from asyncrl.wire.bounds import Body

log = structlog.get_logger()

HELLO_ID = "guest"
"""The run id of a guest's hello and of its answer, which tells the guest the id of the launch."""
GUEST_KINDS = frozenset({"hello", "ask", "finish", "evaluated", "release", "lost", "guest_log"})
"""Kinds that a guest may send. By "lost" it says that a generator of its own has ended, by "guest_log" what it logs."""


@dataclass(frozen=True, slots=True)
class Guest:
    """A guest that is admitted."""

    name: str
    key: str
    """Its public key as Z85 text."""
    first: int
    """Index of its first generator."""
    generators: int
    """Maximum number of its generators."""

    def owns(self, generator: int) -> bool:
        """True if a generator of this index is the guest's own."""
        return self.first <= generator < self.first + self.generators

    def check(self, kind: str, body: Body) -> None:
        """Raises StrangerError for a message that a guest, or this one, may not send."""
        if kind not in GUEST_KINDS:
            raise StrangerError(f"guest {self.name!r} may not send {kind!r}")
        generator = getattr(body, "generator", None)
        if generator is not None and not self.owns(generator):
            raise StrangerError(f"guest {self.name!r} may not send {kind!r} as generator {generator}")


class Guests:
    """The table of guests in a file, which need not exist. It may be used by several threads."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read: tuple[tuple[int, ...], dict[str, Guest]] = ((), {})
        """The result of the last read: the state of the file, and the guests by their keys."""

    def find(self, key: str) -> Guest | None:
        """Returns the guest with this public key; None if there is none, or its invitation was revoked."""
        try:
            stat = self._file.stat()
        except FileNotFoundError:
            return None
        state = stat.st_mtime_ns, stat.st_ino, stat.st_size
        if state != self._read[0]:
            try:
                guests = {guest.key: guest for guest in read_guests(self._file)[0].values()}
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                log.error("the guests cannot be read, and none is admitted", file=str(self._file), error=str(error))
                guests = {}
            self._read = state, guests
        return self._read[1].get(key)


def read_guests(file: Path) -> tuple[dict[str, Guest], dict[str, Any]]:
    """Returns the guests of a table by their names, and the table. Raises OSError, and ValueError, TypeError,
    KeyError or AttributeError for a file that is not a table of guests."""
    table = json.loads(file.read_text())
    return {name: Guest(name=name, **values) for name, values in table["guests"].items()}, table
