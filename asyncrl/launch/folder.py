"""The run's folder: one live run at a time, an earlier one of the same name is moved aside."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any, Self

from asyncrl.config import Config
from asyncrl.errors import ConfigError


class RunFolder:
    """Holds the lock on `runs/<name>` while the run goes on; use as a context manager."""

    def __init__(self, config: Config) -> None:
        self.path = config.run_dir
        self.moved_to: Path | None = None
        """Where the earlier run of this name went, if there was one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock_path = self.path.parent / f".{config.run}.lock"
        self._lock = self._lock_path.open("a+")

    def __enter__(self) -> Self:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "unknown"
            self._lock.close()
            raise ConfigError(
                f"run = {self.path.name!r}: a run of this name is going on (process {holder}); use another --run"
            ) from None
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        if self.path.exists():
            self.moved_to = self._free_name()
            self.path.rename(self.moved_to)
        self.path.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock_path.unlink(missing_ok=True)
        self._lock.close()

    def write_config(self, config: Config) -> None:
        (self.path / "config.yaml").write_text(config.to_yaml())

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replaces `summary.json` in one piece."""
        temporary = self.path / ".summary.json"
        temporary.write_text(json.dumps(summary, indent=2) + "\n")
        temporary.replace(self.path / "summary.json")

    def _free_name(self) -> Path:
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        return aside
