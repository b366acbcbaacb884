"""The documents of runs from their folders, and the pages that show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from rich.console import Console

from asyncrl.errors import AsyncrlError, ConfigError, DataError, observer_failures, observing
from asyncrl.launch.bottleneck import BottleneckMonitor
from asyncrl.launch.run_dir import RunFolder, is_running, read_endpoints
from asyncrl.observe.console import show_end
from asyncrl.observe.document import REWARD, RUNNING, UNANSWERED, UNFINISHED, curves_of, run_document
from asyncrl.observe.page import write_report
from asyncrl.observe.sample_search import page_samples
from asyncrl.observe.trace import read_trace
from asyncrl.observe.trackers import tracker_summary
from asyncrl.plan.measured import MAX_GROUPS
from asyncrl.plan.verdict import Idle, after_collapse, guess
from asyncrl.replay.client import LauncherClient
from asyncrl.util.files import check_writable, read_json
from asyncrl.util.text import describe, redact

if TYPE_CHECKING:
    import pyarrow as pa


log = structlog.get_logger()

REPORT = "report.html"
ANSWER_S = 2.0
"""Time for the replay queue of a live run to answer."""


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """The summary of an ended run, or the error of a file that cannot be read; None without a file."""
    file = run_dir / "summary.json"
    try:
        return read_json(file) if file.is_file() else None
    except ConfigError as error:
        return {"status": UNFINISHED, "error": str(error)}


class RunSummary:
    """The summary of a run: the file of an ended run; of a live one what its replay queue tells, with a verdict from
    the idle times alone."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._client: LauncherClient | None = None
        self._told: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Returns the summary without secrets, with the latest answer of a queue that does not answer now. Its "status"
        is RUNNING while the run is, and UNFINISHED if there is no file."""
        return redact(self._read())

    def _read(self) -> dict[str, Any]:
        if (summary := read_summary(self._run_dir)) is None and is_running(self._run_dir):
            return {"status": RUNNING} | self._ask()
        self.close()
        return summary or {"status": UNFINISHED}

    def _ask(self) -> dict[str, Any]:
        try:
            if self._client is None:
                self._client = LauncherClient(read_endpoints(self._run_dir), timeout_s=ANSWER_S)
            told = self._client.summary()
        except AsyncrlError as error:
            self.close()
            return self._told | {UNANSWERED: f"the replay queue does not tell its state: {error}"}
        if told["steps"]:
            verdict = guess(Idle(**told["idle"]), max_staleness=told["staleness"]["limit"])
            told["bottleneck"] = after_collapse(verdict, told.get("collapse", {})).sentence
        self._told = told
        return told

    def close(self) -> None:
        """Closes the connection to a live run."""
        if self._client is not None:
            self._client.close()
            self._client = None


def document_of(run_dir: Path) -> dict[str, Any]:
    """The document of a run, also of one in progress."""
    summary = RunSummary(run_dir)
    try:
        return run_document(run_dir, summary.read(), trace_of(run_dir), page_samples(run_dir))
    finally:
        summary.close()


def trace_of(run_dir: Path) -> pa.Table | None:
    """The newest part of the run's trace; None when it cannot be read."""
    try:
        return read_trace(run_dir, newest=MAX_GROUPS)
    except DataError as error:
        log.warning("there is no timeline", error=str(error))
        return None


def report_on(run_dirs: Sequence[Path], out: Path | None, console: Console) -> None:
    """Writes one page about these runs, by default `report.html` in the run's folder or in the current one.
    Raises ConfigError if a folder is no run's, or the page cannot be written."""
    for run_dir in run_dirs:
        if not (run_dir / "config.yaml").is_file():
            raise ConfigError(f"{run_dir}: not the folder of a run, config.yaml is missing; give runs/NAME")
    path = out or (run_dirs[0] / REPORT if len(run_dirs) == 1 else Path(REPORT))
    check_writable(path, "--out")
    write_report(path, [document_of(run_dir) for run_dir in run_dirs])
    console.print(f"report     {path}", highlight=False, soft_wrap=True)


def report_end(
    last_report: dict[str, Any],
    start: dict[str, Any],
    bottleneck: BottleneckMonitor,
    folder: RunFolder,
    console: Console,
) -> None:
    """Shows how the run ended and writes its report and its summary: `last_report` comes from the
    replay queue, `start` from the checks at the start. A failure is a warning here: the run has ended."""
    summary = folder.summary(last_report) | start
    with observing("bottleneck"):
        summary |= bottleneck.summary(last_report)
    with observing("trackers"):
        summary |= {"trackers": trackers} if (trackers := tracker_summary(folder.path)) else {}
    failures = observer_failures + Counter(last_report.get("observer_failures"))
    with observing("metrics"):
        curves = curves_of(folder.path)
        curves.read()
        for row in list(curves.latest)[-1:]:
            failures["learner"] += int(row.get("learner/observer_failures", 0))
        if (ends := curves.ends(REWARD)) is not None:
            summary["reward_first"], summary["reward_last"] = ends
    summary["observer_failures"] = dict(+failures)
    with observing("summary"):
        show_end(console, summary)
    report = folder.path / REPORT
    for file, write in (
        (folder.path / "summary.json", lambda: folder.write_summary(summary)),
        (report, lambda: write_report(report, [document_of(folder.path)])),
    ):
        try:
            write()
        except Exception as error:
            log.warning("a file is not written", file=str(file), exc_info=True)
            console.print(f"{file} is not written: {describe(error)}", style="yellow", highlight=False, markup=False)
    console.print(f"folder     {folder.path}\nreport     {report}", highlight=False, soft_wrap=True)
