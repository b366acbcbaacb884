"""`asyncrl logs` on the folder of a run, ended and running."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.cli import show_logs as logs_module
from asyncrl.cli.show_logs import show_logs
from asyncrl.launch.run_dir import RunFolder
from tests.helpers.cli import asyncrl
from tests.helpers.replay import small_config

pytestmark = pytest.mark.timeout(120)


def entry(event: str, *, ago_s: float, level: str = "info", **fields: Any) -> str:
    when = datetime.now(UTC) - timedelta(seconds=ago_s)
    return json.dumps({**fields, "event": event, "level": level, "timestamp": when.isoformat()}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with runs/one of four roles."""
    logs = tmp_path / "runs" / "one" / "logs"
    logs.mkdir(parents=True)
    (logs / "launcher.jsonl").write_text(entry("first", ago_s=7200) + entry("last", ago_s=1))
    (logs / "learner-0.jsonl").write_text(entry("step done", ago_s=60, step=1) + entry("late", ago_s=2, level="error"))
    for index in range(2):
        (logs / f"generator-{index}.jsonl").write_text(entry(f"up {index}", ago_s=100 - index, level="warning"))
    return tmp_path


ALL = ["launcher first", "generator-0 up 0", "generator-1 up 1", "learner-0 step done step=1", "learner-0 late"]
ALL += ["launcher last"]


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        (["one"], [0, 1, 2, 3, 4, 5]),
        (["runs/one"], [0, 1, 2, 3, 4, 5]),
        (["one", "generator"], [1, 2]),
        (["one", "generator-1", "learner"], [2, 3, 4]),
        (["one", "--level", "warning"], [1, 2, 4]),
        (["one", "launcher", "-f"], [0, 5]),
    ],
)
def test_entries_of_the_chosen_roles_by_time(folder: Path, arguments: list[str], numbers: list[int]) -> None:
    code, output = asyncrl("logs", *arguments, cwd=folder)
    assert code == 0, output
    lines = [line for line in output.splitlines() if not line.endswith("the run has ended")]
    assert [" ".join((line.split()[2], *line.split()[4:])) for line in lines] == [ALL[number] for number in numbers]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["on"], "runs/on: there is no such run; did you mean one? (of one); give its name in runs/, or the path of"),
        (["else/on"], "else/on: there is no such run (of none)"),
        (
            ["one", "generater"],
            "generater: runs/one has no such role; did you mean generator? (of generator-0, generator-1, launcher, ",
        ),
        (["one", "critic"], "critic: runs/one has no such role (of generator-0, generator-1, launcher, learner-0)"),
        (["one", "critic", "-f"], "critic: runs/one has no such role"),
        (["one", "--level", "loud"], "--level = 'loud': there is no such one (of debug, info, warning, error, critic"),
    ],
)
def test_what_is_not_there_is_refused(folder: Path, arguments: list[str], message: str) -> None:
    code, output = asyncrl("logs", *arguments, cwd=folder)
    assert code == 2 and output.startswith(f"error: {message}"), output


class Followed:
    """`asyncrl logs -f` of a running run, in a thread."""

    def __init__(self, run_dir: Path, *roles: str, level: str = "debug") -> None:
        self._out = io.StringIO()
        console = Console(file=self._out, width=200)
        self._thread = threading.Thread(target=lambda: show_logs(run_dir, roles, console, follow=True, level=level))
        self._thread.start()

    def wait_for(self, event: str) -> None:
        deadline_s = time.monotonic() + 20
        while event not in self._out.getvalue():
            assert self._thread.is_alive() and time.monotonic() < deadline_s, self._out.getvalue()
            time.sleep(0.01)

    def end(self) -> str:
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self._out.getvalue()


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_it_follows_new_entries_and_new_roles_until_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logs_module, "POLL_S", 0.01)
    with RunFolder(small_config(run="one")) as folder:
        logs = folder.path / "logs"
        logs.mkdir()
        append(logs / "replay.jsonl", entry("started", ago_s=5))
        everything, learner = Followed(folder.path), Followed(folder.path, "learner-0", level="warning")
        everything.wait_for("started")
        append(logs / "replay.jsonl", '{"event": "half')  # killed here, and started again
        append(logs / "learner-0.jsonl", entry("joined", ago_s=1) + entry("late", ago_s=0, level="warning"))
        everything.wait_for("joined")
        learner.wait_for("late")
        append(logs / "replay.jsonl", "\n" + entry("started again", ago_s=0))
        everything.wait_for("started again")
        append(logs / "learner-0.jsonl", entry("ended", ago_s=0, level="warning").rstrip())
    printed = everything.end().splitlines()
    assert [line.split(maxsplit=4)[-1] for line in printed] == [
        "started", "joined", "late", '{"event": "half', "started again", "ended"
    ]  # fmt: skip
    assert [line.split(maxsplit=4)[-1] for line in learner.end().splitlines()] == ["late", "ended"]


def test_a_reader_that_goes_away_ends_it(folder: Path) -> None:
    """`asyncrl logs one | head -1`."""
    log = folder / "runs" / "one" / "logs" / "launcher.jsonl"
    log.write_text(entry("many", ago_s=1) * 20_000)
    command = [sys.executable, "-m", "asyncrl.cli", "logs", "one"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 1
        assert process.stderr.read() == b""
