"""What only observes a run neither delays nor ends it, up to its last file."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from asyncrl.errors import observer_failures
from asyncrl.launch.bottleneck import Background
from asyncrl.observe import run_report as documents
from asyncrl.observe.console import ignore_broken_pipe
from asyncrl.observe.page import write_report
from asyncrl.util import files


def result_of(background: Background[str]) -> str | None:
    background.join(10)
    return background.poll()


def test_a_call_in_the_background_delays_nobody_and_raises_nothing() -> None:
    goes_on, begun = threading.Event(), list[int]()
    background = Background[str]("test of the background")

    def call() -> str:
        begun.append(1)
        goes_on.wait(30)
        return "done"

    started_s = time.monotonic()
    for _ in range(3):
        background.start(call)
        assert background.poll() is None
    assert time.monotonic() - started_s < 5 and len(begun) <= 1, "one call at a time"
    goes_on.set()
    assert result_of(background) == "done" and background.poll() is None
    for error in (OSError("gone"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")):

        def fail(error: Exception = error) -> str:
            raise error

        background.start(fail)
        assert result_of(background) is None
    assert observer_failures["test of the background"] == 2
    background.start(lambda: "again")
    assert result_of(background) == "again"


def test_a_console_whose_encoding_lacks_a_character_escapes_it() -> None:
    raw = io.BytesIO()
    console = ignore_broken_pipe(Console(file=io.TextIOWrapper(raw, encoding="iso-8859-1"), width=80))
    console.print("the answer is ∫ é", highlight=False)
    console.file.flush()
    assert raw.getvalue() == b"the answer is \\u222b \xe9\n"


class Folder:
    """A run's folder on a full disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def summary(self, summary: dict[str, Any]) -> dict[str, Any]:
        return summary

    def write_summary(self, summary: dict[str, Any]) -> None:
        files.replace_file(self.path / "summary.json", "{}")


def test_a_full_disk_at_the_end_names_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of fsync has no file name."""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    monkeypatch.setattr(documents, "document_of", lambda _: {"name": "r"})
    out = io.StringIO()
    told = {"status": "finished", "wall_s": 1.0, "attempts": 1, "observer_failures": {"samples": 2}}
    bottleneck: Any = SimpleNamespace(summary=lambda summary: 1 / 0)
    folder: Any = Folder(tmp_path)
    documents.report_end(told, {}, bottleneck, folder, Console(file=out, width=500))
    for name in ("summary.json", "report.html"):
        line = next(
            line for line in out.getvalue().splitlines() if line.startswith(f"{tmp_path / name} is not written")
        )
        assert "No space left on device" in line
    assert list(tmp_path.iterdir()) == [], "nothing half written"


def test_the_end_of_a_run_without_its_replay_queue_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "document_of", lambda _: {"name": "r"})
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    out, before = io.StringIO(), observer_failures["summary"]
    told = {"status": "failed", "wall_s": 1.0, "attempts": 1, "error": "the rewards have failed"}
    bottleneck: Any = SimpleNamespace(summary=lambda summary: {})
    folder: Any = Folder(tmp_path)
    documents.report_end(told, {}, bottleneck, folder, Console(file=out, width=500))
    assert "the rewards have failed" in out.getvalue() and observer_failures["summary"] == before


def test_a_report_is_utf_8_and_never_half_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.html"
    write_report(file, [{"name": "∫"}])
    assert "∫" in file.read_bytes().decode("utf-8")

    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    before = file.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        write_report(file, [{"name": "other"}])
    assert file.read_bytes() == before
