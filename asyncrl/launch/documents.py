"""The documents of runs from their folders, and the pages that show them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from rich.console import Console

from asyncrl.errors import ConfigError, DataError
from asyncrl.launch.samples import page_samples
from asyncrl.observe.document import run_document
from asyncrl.observe.report import write_report
from asyncrl.plan.measured import MAX_GROUPS
from asyncrl.plan.tail import TraceTail
from asyncrl.util.files import check_writable, read_json

if TYPE_CHECKING:
    import pyarrow as pa

log = structlog.get_logger()

REPORT = "report.html"


def document_of(run_dir: Path) -> dict[str, Any]:
    """The document of a run, also of one in progress."""
    file = run_dir / "summary.json"
    summary = read_json(file) if file.is_file() else {"status": "running"}
    return run_document(run_dir, summary, trace_of(run_dir), page_samples(run_dir))


def trace_of(run_dir: Path) -> pa.Table | None:
    """The newest part of the run's trace; None when it cannot be read."""
    try:
        return TraceTail(run_dir, rows=MAX_GROUPS).read()
    except DataError as error:
        log.warning("the report has no timeline", error=str(error))
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
