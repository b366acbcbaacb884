"""A run that somebody looks at: its document, kept up to date, and what has changed in it since an earlier look."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Generic, TypeVar

import pyarrow as pa

from asyncrl.launch.documents import RunSummary, trace_of
from asyncrl.launch.samples import page_samples
from asyncrl.observe.document import RUNNING, PageSamples, curves_of, run_document
from asyncrl.plan.measured import MAX_GROUPS, TraceTail
from asyncrl.samples.book import FOLDER as SAMPLES

READ_BUDGET_S = 1.0
"""Time for reading metrics before a request is answered with what has been read."""
LOOK_EVERY_S = 0.5
"""Least time between two looks at the files, however many pages are open."""
LEAST_PAUSE_S = 2.0
PAUSE_FACTOR = 10.0
"""Trace and samples are read again after this many times the time that it took to read them."""

Value = TypeVar("Value")
_revisions = count(1)
"""Shared by all runs, so that a run that was forgotten and is read again has higher ones than before."""


class Paced(Generic[Value]):
    """A value that is read again when its signature has changed, but not all the time."""

    def __init__(self, read: Callable[[], Value]) -> None:
        self._read = read
        self._signature: list[Any] = []
        self._next_s = 0.0
        self.value: Value | None = None

    def update(self, signature: list[Any]) -> bool:
        """Reads the value if it is due; returns True if it was read. An empty signature is that of nothing: None."""
        begun_s = time.monotonic()
        if signature == self._signature or begun_s < self._next_s:
            return False
        self.value, self._signature = self._read() if signature else None, signature
        ended_s = time.monotonic()
        self._next_s = ended_s + LEAST_PAUSE_S + PAUSE_FACTOR * (ended_s - begun_s)
        return True


class WatchedRun:
    """The document of a run. Safe to use from several threads."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._looked_s = 0.0
        self._summary = RunSummary(run_dir)
        self._curves = curves_of(run_dir)
        tail = TraceTail(run_dir, rows=MAX_GROUPS)
        self._trace = Paced[pa.Table | None](lambda: trace_of(run_dir, tail))
        self._samples = Paced[PageSamples | None](lambda: page_samples(run_dir))
        self._shown_summary: dict[str, Any] | None = None
        self._sections: dict[str, tuple[int, Any]] = {}
        """Parts of the document, with the revision in which each changed last."""
        self._revision = 0
        self._is_complete = False

    def changes(self, since: int) -> dict[str, Any]:
        """The parts of the document that have changed after this revision, and the present revision. The first answers
        have what can be read soon: as long as "is_complete" is false, there is more."""
        with self._lock:
            if time.monotonic() - self._looked_s >= LOOK_EVERY_S or not self._is_complete:
                self._look()
                self._looked_s = time.monotonic()
            sections = {name: value for name, (revision, value) in self._sections.items() if revision > since}
            return {
                "revision": self._revision,
                "fraction_read": self._curves.fraction_read,
                "is_complete": self._is_complete,
                "sections": sections,
            }

    def close(self) -> None:
        """Closes the connection to the run, if there is one."""
        with self._lock:
            self._summary.close()

    def _look(self) -> None:
        summary = self._summary.read()
        changed = self._curves.read(READ_BUDGET_S)
        self._is_complete = bool(self._revision) and self._curves.fraction_read == 1.0
        if self._is_complete:
            changed |= self._trace.update(_stamps(self._run_dir, "trace.*"))
            changed |= self._samples.update(_stamps(self._run_dir, f"{SAMPLES}/*"))
        if not changed and summary == self._shown_summary:
            return
        self._shown_summary = summary
        document = run_document(self._run_dir, summary, self._trace.value, self._samples.value, curves=self._curves) | {
            "progress": self._progress(summary)
        }
        revision = next(_revisions)
        for name, value in document.items():
            if name not in self._sections or self._sections[name][1] != value:
                self._sections[name] = revision, value
                self._revision = revision

    def _progress(self, summary: dict[str, Any]) -> str:
        return f"step {self._curves.last_step:,}" if summary["status"] == RUNNING and self._curves.num_steps else ""


def _stamps(folder: Path, *patterns: str) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the files that match."""
    found: list[tuple[str, int, int]] = []
    for pattern in patterns:
        for file in sorted(folder.glob(pattern)):
            try:
                status = file.stat()
            except FileNotFoundError:
                continue  # it was replaced just now
            found.append((file.name, status.st_size, status.st_mtime_ns))
    return found
