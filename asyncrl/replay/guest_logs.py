"""The logs of guests' generators in the run folder, where `asyncrl logs` shows them with those of the run's roles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import structlog

from asyncrl.wire.guest_messages import GuestLog
from asyncrl.wire.guests import Guest

log = structlog.get_logger()

MAX_BYTES = 16 << 20
"""Maximum size of the log of one generator: a guest cannot fill the disk."""


class GuestLogs:
    """The files in the folder of logs. What a guest says of itself there has its own name, whatever it sends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._closed: set[int] = set()
        """Generators whose log is full, or could not be written."""

    def add(self, guest: Guest, body: GuestLog) -> None:
        """Appends what the guest's generator has logged; lines that are no log entries are left out."""
        name = f"generator-{body.generator}"
        entries = [_entry_of(line) for line in body.lines]
        text = "".join(json.dumps(one | {"role": name, "host": guest.name}) + "\n" for one in entries if one)
        if not text or body.generator in self._closed:
            return
        file = self._folder / f"{name}.jsonl"
        try:
            if (size := file.stat().st_size if file.exists() else 0) + len(text) > MAX_BYTES:
                self._close(body.generator, guest, f"{file} has {size} bytes, at most {MAX_BYTES} are kept")
                return
            with file.open("a") as stream:
                stream.write(text)
        except OSError as error:
            self._close(body.generator, guest, str(error))

    def _close(self, generator: int, guest: Guest, reason: str) -> None:
        self._closed.add(generator)
        log.warning("the log of a guest is not kept any more", guest=guest.name, generator=generator, reason=reason)


def _entry_of(line: str) -> dict[str, Any]:
    """The fields of an entry; none for a line that is not one."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}
