"""The addresses that servers of the run have announced. They are in a file, so that a restarted queue knows them."""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl.errors import ProtocolError
from asyncrl.util.files import read_json, replace_file

MAX_NAMES = 4096


class Directory:
    """Addresses by name, with the epoch of the process that announced each; without a file they are in memory only."""

    def __init__(self, file: Path | None, run_id: str) -> None:
        """A file of another `run_id` is of an earlier launch, and ignored."""
        self._file, self._run_id = file, run_id
        self._known: dict[str, tuple[str, int]] = {}
        if file is not None and file.exists() and (saved := read_json(file)).get("run_id") == run_id:
            self._known = {name: (address, epoch) for name, (address, epoch) in saved["addresses"].items()}

    def announce(self, name: str, address: str, epoch: int) -> None:
        """Records the address. Raises ProtocolError if a process of a later epoch has announced the name."""
        _, latest = self._known.get(name, ("", 0))
        if epoch < latest:
            raise ProtocolError(f"superseded: start {latest} has announced {name!r}, and this process is start {epoch}")
        if name not in self._known and len(self._known) >= MAX_NAMES:
            raise ProtocolError(f"{name!r} is one name too many: the run has {MAX_NAMES} already")
        self._known[name] = address, epoch
        if self._file is not None:
            text = json.dumps({"run_id": self._run_id, "addresses": self._known})
            replace_file(self._file, text + "\n", mode=0o600)

    def epoch(self, name: str) -> int:
        """Returns the latest epoch that has announced the name; 0 if none has."""
        return self._known.get(name, ("", 0))[1]

    def address(self, name: str, *, epoch: int = 0) -> str:
        """Returns the address; empty if the name is unknown, or its process is of an earlier epoch."""
        address, latest = self._known.get(name, ("", 0))
        return address if latest >= epoch else ""
