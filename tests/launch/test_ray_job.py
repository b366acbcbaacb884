"""Jobs of a Ray cluster elsewhere, with a stand-in for its client."""

from __future__ import annotations

import io
import sys
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from asyncrl.cli import app
from asyncrl.errors import ConfigError
from asyncrl.launch.ray_launcher import submit_job, url_of


class Client:
    """A cluster's dashboard, which takes one job."""

    interrupts = False

    def __init__(self, url: str) -> None:
        if "nowhere" in url:
            raise ConnectionError(f"no answer from {url}")
        jobs.append({"url": url})

    def submit_job(self, **options: Any) -> str:
        jobs[-1] |= options
        return "raysubmit_1"

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        yield "step 1/2 [bold]\n"
        if self.interrupts and "stopped" not in jobs[-1]:
            raise KeyboardInterrupt
        yield "step 2/2\n"

    def stop_job(self, job: str) -> None:
        jobs[-1]["stopped"] = job

    def get_job_info(self, job: str) -> Any:
        return types.SimpleNamespace(driver_exit_code=-15 if "stopped" in jobs[-1] else 3, status="", message="")


jobs: list[dict[str, Any]] = []


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.clear()
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.job_submission", types.SimpleNamespace(JobSubmissionClient=Client))


def test_the_same_command_is_submitted() -> None:
    """With the exit code of the job."""
    arguments = ["--generators", "2", "--config", "gsm8k_0.5b", "learner.lr=1e-6", "--resume"]
    done = CliRunner().invoke(app, ["launch", "--cluster", "ray://10.0.0.5", *arguments])
    assert done.exit_code == 3, done.output
    assert done.output.endswith("step 1/2 [bold]\nstep 2/2\n")
    (job,) = jobs
    assert job["url"] == "http://10.0.0.5:8265"
    assert job["entrypoint"] == (
        "python -P -m asyncrl.cli launch --cluster ray learner.lr=1e-6 launch.generators=2 --config gsm8k_0.5b --resume"
    )
    assert job["runtime_env"]["working_dir"] == str(Path.cwd()) and "/runs" in job["runtime_env"]["excludes"]


@pytest.mark.parametrize(("answer", "code", "said"), [("y", 1, "step 2/2"), ("n", 130, "it goes on: ray job logs")])
def test_ctrl_c_asks_whether_to_stop_the_job(
    monkeypatch: pytest.MonkeyPatch, answer: str, code: int, said: str
) -> None:
    monkeypatch.setattr(Client, "interrupts", True)
    monkeypatch.setattr("builtins.input", lambda *_: answer)
    out = io.StringIO()
    assert submit_job("ray://10.0.0.5:9000", [], Console(file=out)) == code
    assert said in out.getvalue() and ("stopped" in jobs[-1]) == (answer == "y")


@pytest.mark.parametrize("address", ["ray://", "ray://a/b", "ray://a:b", "ray://a:1:2"])
def test_wrong_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match="must be ray://HOST or ray://HOST:PORT"):
        url_of(address)


def test_a_cluster_that_does_not_answer() -> None:
    with pytest.raises(ConfigError, match=r"--cluster ray://nowhere: no answer from http://nowhere:8265"):
        submit_job("ray://nowhere", [], Console(file=io.StringIO()))
