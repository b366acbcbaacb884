"""A complete run whose MLflow server is killed in the middle."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.mlflow_server import logged_steps
from tests.helpers.runs import SMALL, Launched

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]

pytest.importorskip("mlflow", reason="the extra mlflow is not installed")


class Server:
    """An MLflow server on one port, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0
        self.start()

    def start(self) -> None:
        arguments = [sys.executable, "-m", "tests.helpers.mlflow_server", str(self.folder), str(self.port)]
        self._process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.kill()


def begin(launch: Callable[..., Launched], server: Server, monkeypatch: pytest.MonkeyPatch, steps: int) -> Launched:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.port}")
    return launch(f"steps={steps}", *SMALL, "observe.trackers=[mlflow]", plain=True)


def test_rows_of_an_outage_are_complete_when_the_server_is_back(
    launch: Callable[..., Launched], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(launch, server, monkeypatch, steps=40)
    run.wait_for_step(5)
    server.kill()
    before, killed_s = len(run.rows()), time.monotonic()
    run.wait_for_step(before + 10)
    server.start()
    away_s = time.monotonic() - killed_s
    code, output = run.end(timeout_s=200)
    assert code == 0, output
    summary = run.summary()
    print(f"{before} rows, {away_s:.1f} s without a server, {summary['trackers']}")
    assert logged_steps(server.folder) == list(range(1, 41)), "in order, none missing, none twice"
    assert summary["trackers"]["mlflow"]["failures"] >= 1 and summary["trackers"]["mlflow"]["unsent_rows"] == 0
    assert not any(summary["restarts"].values())


def test_a_run_finishes_without_its_server_and_a_resumed_one_sends_the_rest(
    launch: Callable[..., Launched], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(launch, server, monkeypatch, steps=10)
    run.wait_for_step(3)
    server.kill()
    code, output = run.end(timeout_s=200)
    assert code == 0 and "trackers   mlflow: " in output, output
    summary = run.summary()
    sent = len(logged_steps(server.folder))
    assert not any(summary["restarts"].values())
    unsent = summary["trackers"]["mlflow"]["unsent_rows"]
    assert unsent - (10 - sent) in (0, 1) and unsent > 0, "the answer to one row may be lost"
    server.start()
    resumed = launch("--resume", "--steps", "12", run=run.run, plain=True)
    code, output = resumed.end(timeout_s=200)
    assert code == 0, output
    assert logged_steps(server.folder) == list(range(1, 13))
