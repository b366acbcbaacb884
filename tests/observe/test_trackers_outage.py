"""A failing tracker does not stop the training: failures are counted, and rows wait on the disk."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError, observer_failures
from asyncrl.observe import trackers as trackers_module
from asyncrl.observe.trackers import TRACKERS, JsonLines, make_trackers, tracker_summary
from tests.helpers.mlflow_server import logged_steps
from tests.helpers.replay import small_config


class Faulty:
    """Keeps the rows that it receives; `fault` is called before each, at each start and at the close."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.last_steps: list[int] = []
        self.closed = 0
        self.fault: Callable[[str, int], None] = lambda place, step: None

    def __call__(self, config: Config, run_dir: Path, last_step: int) -> Faulty:
        self.last_steps.append(last_step)
        self.fault("start", last_step)
        return self

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.rows]

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.fault("log", step)
        self.rows.append((step, metrics))

    def close(self) -> None:
        self.fault("close", 0)
        self.closed += 1


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Faulty:
    tracker = Faulty()
    monkeypatch.setitem(TRACKERS, "faulty", lambda config, run_dir, last_step: tracker(config, run_dir, last_step))
    monkeypatch.setattr(trackers_module, "MAX_PAUSE_S", 0.01)
    return tracker


CONFIG = small_config(observe__trackers=["faulty"])


def log_steps(run_dir: Path, steps: range, close_s: float = 20.0) -> None:
    trackers = make_trackers(CONFIG, run_dir)
    for step in steps:
        trackers.log(step, {"reward/mean": float(step)})
    trackers.close(close_s)


class Failing:
    """Raises in some calls of one place."""

    def __init__(self, place: str, count: float, error: Callable[[], BaseException] = lambda: OSError("down")) -> None:
        self.place, self.left, self.error = place, count, error

    def __call__(self, place: str, step: int) -> None:
        if place == self.place and self.left > 0:
            self.left -= 1
            raise self.error()


@pytest.mark.parametrize("error", [OSError, KeyError, SystemExit])
def test_a_tracker_that_raises_receives_every_row_once_and_in_order(
    tracker: Faulty, tmp_path: Path, error: type[BaseException]
) -> None:
    tracker.fault = Failing("log", 3, error)
    log_steps(tmp_path, range(1, 9))
    assert tracker.steps == list(range(1, 9)) and tracker.closed == 1
    summary = tracker_summary(tmp_path)["faulty"]
    assert (summary["failures"], summary["refused"], summary["unsent_rows"]) == (3, 0, 0)
    assert summary["error"].startswith(error.__name__)


def test_rows_of_an_outage_are_sent_by_the_next_start(tracker: Faulty, tmp_path: Path) -> None:
    tracker.fault = lambda place, step: Failing("log", 1)(place, step) if step > 2 else None
    log_steps(tmp_path, range(1, 6), close_s=0.2)
    assert tracker.steps == [1, 2] and tracker_summary(tmp_path)["faulty"]["unsent_rows"] == 3
    tracker.fault = lambda place, step: None
    log_steps(tmp_path, range(4, 9))
    assert tracker.steps == list(range(1, 9)) and tracker.last_steps == [0, 2]
    assert tracker_summary(tmp_path)["faulty"]["unsent_rows"] == 0


def test_a_row_that_alone_is_refused_is_passed_over(tracker: Faulty, tmp_path: Path) -> None:
    tracker.fault = lambda place, step: (
        Failing("log", 1, lambda: KeyError("reward"))(place, step) if step == 3 else None
    )
    log_steps(tmp_path, range(1, 7))
    assert tracker.steps == [1, 2, 4, 5, 6] and tracker_summary(tmp_path)["faulty"]["refused"] == 1


def test_a_tracker_that_hangs_delays_neither_steps_nor_the_end(tracker: Faulty, tmp_path: Path) -> None:
    release = threading.Event()
    tracker.fault = lambda place, step: (release.wait(30), None)[1] if place == "log" else None
    started_s = time.monotonic()
    log_steps(tmp_path, range(1, 100), close_s=0.2)
    assert time.monotonic() - started_s < 5
    assert tracker_summary(tmp_path)["faulty"]["unsent_rows"] == 99
    release.set()


def test_the_first_start_of_a_bad_tracker_is_an_error_and_a_restart_is_none(tracker: Faulty, tmp_path: Path) -> None:
    tracker.fault = Failing("start", 1, lambda: OSError("Connection refused"))
    with pytest.raises(ConfigError, match=r"observe.trackers = 'faulty': does not start: OSError: Connection refused"):
        make_trackers(CONFIG, tmp_path)
    log_steps(tmp_path, range(1, 3))
    tracker.fault = Failing("start", 2)
    log_steps(tmp_path, range(3, 5))
    assert tracker.steps == [1, 2, 3, 4] and tracker.last_steps == [0, 0, 2, 2, 2]


def test_a_first_start_has_a_deadline(tracker: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    tracker.fault = lambda place, step: (release.wait(30), None)[1]
    monkeypatch.setattr(trackers_module, "START_S", 0.05)
    with pytest.raises(ConfigError, match=r"'faulty': does not start within 0.05 s"):
        make_trackers(CONFIG, tmp_path)
    release.set()


def test_a_tracker_that_raises_a_timeout_has_not_missed_the_deadline(tracker: Faulty, tmp_path: Path) -> None:
    tracker.fault = Failing("start", 1, lambda: TimeoutError("server: no answer"))
    with pytest.raises(ConfigError, match=r"'faulty': does not start: TimeoutError: server: no answer"):
        make_trackers(CONFIG, tmp_path)


def test_rows_that_are_cut_off_with_the_journal_are_sent_again(tracker: Faulty, tmp_path: Path) -> None:
    log_steps(tmp_path, range(1, 5))
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:2]))
    log_steps(tmp_path, range(3, 6))
    assert tracker.steps == [1, 2, 3, 4, 3, 4, 5] and tracker.last_steps == [0, 2]


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"faulty": {"rows_bytes": "x"}}', b"\xff\x00"])
def test_a_damaged_file_of_states_does_not_stop_a_restart(tracker: Faulty, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trackers.json").write_bytes(content)
    log_steps(tmp_path, range(1, 3))
    assert tracker.steps == [1, 2]


def test_a_damaged_line_stops_neither_restart_nor_tracker(tracker: Faulty, tmp_path: Path) -> None:
    log_steps(tmp_path, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew\n')
    log_steps(tmp_path, range(2, 6))
    assert tracker.steps == [1, 2, 3, 4, 5]


class FullDisk:
    """A file that takes `free` bytes."""

    def __init__(self, file: Any, free: int) -> None:
        self.file, self.free = file, free

    def write(self, data: bytes) -> int:
        if not self.free:
            raise OSError(28, "No space left on device")
        written = self.file.write(data[: self.free])
        self.free -= written
        return written

    def close(self) -> None:
        self.file.close()


def test_rows_that_a_full_disk_did_not_take_are_written_when_there_is_room(tmp_path: Path) -> None:
    trackers = make_trackers(small_config(), tmp_path)
    rows: Any = trackers._rows
    assert isinstance(rows, JsonLines)
    disk = rows._file = FullDisk(rows._file, 30)  # type: ignore[assignment]
    before = observer_failures["metrics.jsonl"]
    for step in (1, 2):
        trackers.log(step, {"reward/mean": 0.5})
    disk.free = 1000
    trackers.log(3, {"reward/mean": 0.5})
    trackers.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3] and observer_failures[
        "metrics.jsonl"
    ] - before == 2


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.slow
def test_rows_of_an_outage_of_mlflow_are_complete_and_none_is_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    command = [sys.executable, "-m", "tests.helpers.mlflow_server", str(tmp_path)]

    def serve(port: int) -> tuple[subprocess.Popen[str], int]:
        server = subprocess.Popen([*command, str(port)], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        return server, int(server.stdout.readline())

    server, port = serve(0)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    trackers = make_trackers(small_config(observe__trackers=["mlflow"]), tmp_path)
    try:
        trackers.log(1, {"reward/mean": 0.5})
        wait_for(lambda: logged_steps(tmp_path) == [1])
        server.kill()
        server.wait()
        for step in range(2, 6):
            trackers.log(step, {"reward/mean": 0.5})
        wait_for(lambda: bool(tracker_summary(tmp_path)["mlflow"]["failures"]))
        assert tracker_summary(tmp_path)["mlflow"]["unsent_rows"] == 4
        server, _ = serve(port)
        trackers.close()
    finally:
        server.kill()
        server.wait()
    assert logged_steps(tmp_path) == [1, 2, 3, 4, 5]
