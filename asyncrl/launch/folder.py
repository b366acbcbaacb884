"""The run's folder: one live run at a time; an earlier one of the same name goes on or is moved aside."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from asyncrl.config import Config
from asyncrl.endpoints import Endpoints
from asyncrl.errors import ConfigError
from asyncrl.files import read_json, replace_file
from asyncrl.launch.numbered import first_free
from asyncrl.launch.resume import check_resume
from asyncrl.launch.role import endpoints_of
from asyncrl.redaction import redact

ENDPOINTS = "endpoints.json"
ATTEMPTS = "attempts.json"
"""Seconds that each earlier launch of a resumed run took."""


class RunFolder:
    """Holds the lock on `runs/<name>` while the run goes on; use as a context manager.

    Raises ConfigError when another launch holds it, or when the run cannot be resumed as `resume` says.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.path = config.run_dir
        self.moved_to: Path | None = None
        """Where the earlier run of this name went, if there was one that does not go on."""
        self.earlier_s: list[float] = []
        """Wall time of each earlier launch of this run."""
        self._lock_path = lock_path(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._lock_path.open("a+")
        except OSError as error:
            raise ConfigError(
                f"run = {config.run!r}: {self.path.parent.absolute()} cannot hold the run's folder: {error.strerror}; "
                "launch from a folder in which you may write"
            ) from None

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
        try:
            self._prepare()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _prepare(self) -> None:
        if check_resume(self.config):
            self.earlier_s = _attempts_s(self.path)
        elif self.path.exists():
            self.moved_to = first_free(self.path.parent, f"{self.path.name}.")
            self.path.rename(self.moved_to)
        self.path.mkdir(mode=0o700, exist_ok=True)  # prompts, completions and logs are the user's own

    def __exit__(self, *_: object) -> None:
        (self.path / ENDPOINTS).unlink(missing_ok=True)
        self._lock_path.unlink(missing_ok=True)
        self._lock.close()

    def begin(self, config: Config, endpoints: Endpoints) -> None:
        """Writes down what a launch is about to run, and where it can be reached; no summary tells of it yet."""
        if self.earlier_s:
            replace_file(self.path / ATTEMPTS, json.dumps(self.earlier_s) + "\n")
        (self.path / "summary.json").unlink(missing_ok=True)
        # A config that is used once more starts a new run, whatever started this one.
        kept = config.model_copy(update={"resume": "never"}) if config.resume == "must" else config
        replace_file(self.path / "config.yaml", kept.to_yaml())
        replace_file(self.path / ENDPOINTS, json.dumps(asdict(endpoints), indent=2) + "\n", mode=0o600)

    def sum_up(self, summary: dict[str, Any]) -> dict[str, Any]:
        """The summary with the time of all launches of this run; secrets show as ***."""
        return redact(summary) | {
            "wall_s": summary["wall_s"] + sum(self.earlier_s),
            "attempts": len(self.earlier_s) + 1,
        }

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replaces `summary.json` in one piece."""
        replace_file(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")


def lock_path(run_dir: Path) -> Path:
    return run_dir.parent / f".{run_dir.name}.lock"


def goes_on(run_dir: Path) -> bool:
    """True while a launcher holds the run's lock."""
    try:
        with lock_path(run_dir).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def read_endpoints(run_dir: Path) -> Endpoints:
    """Where the parts of a run that goes on can be reached. Raises ConfigError when there is none."""
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: there is no such run")
    file = run_dir / ENDPOINTS
    if not goes_on(run_dir) or not file.exists():
        raise ConfigError(f"{run_dir}: this run is not going on; start it with asyncrl launch, or go on with --resume")
    return endpoints_of(read_json(file))


def _attempts_s(run_dir: Path) -> list[float]:
    """Wall times of the earlier launches of a run; of one that was killed, up to the last thing it wrote."""
    file = run_dir / ATTEMPTS
    earlier_s: list[float] = read_json(file, kind=list) if file.exists() else []
    summary = run_dir / "summary.json"
    if summary.exists():
        return [*earlier_s, read_json(summary)["wall_s"] - sum(earlier_s)]
    began_s = (run_dir / "config.yaml").stat().st_mtime
    written = [*run_dir.glob("logs/*.jsonl"), *run_dir.glob("metrics.jsonl")]
    last_s = max((path.stat().st_mtime for path in written), default=began_s)
    return [*earlier_s, max(0.0, last_s - began_s)]
