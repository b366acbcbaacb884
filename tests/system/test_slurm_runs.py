"""Runs on a SLURM cluster: with commands that stand in for SLURM's, and with SLURM itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl.launch.machine import find_port
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.runs import SMALL, Launched, check_ledger
from tests.helpers.slurm import FOLDER, SlurmCluster, extract

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SETTINGS = [*SMALL, "observe.samples=0", "launch.start_timeout_s=120"]


def test_a_run_in_a_job(demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two generators are steps, which run on this machine; they end by scancel, or by themselves."""
    fake = FakeSlurm(tmp_path / "bin", monkeypatch)
    fake.begin_job("n1", "n2", "n3")
    command = [sys.executable, "-m", "asyncrl.cli", "launch", "--config", "demo", "--run", "in-job", *SETTINGS]
    process = subprocess.Popen(
        [*command, "--cluster", "slurm", "--generators", "2", "--steps", "8"],
        cwd=demo_folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run = Launched(demo_folder, "in-job", process)
    try:
        code, output = run.end(timeout_s=240)
    finally:
        run.kill()
    assert code == 0, output
    assert "job        77 on n1, n2, n3" in output
    check_ledger(run.summary())
    assert sum(run.summary()["restarts"].values()) == 0
    hosts = {role: run.events(role)[0].get("host") for role in ("generator-0", "generator-1")}
    assert hosts == {"generator-0": "n2", "generator-1": "n3"}
    steps = [call for call in fake.calls("srun") if "asyncrl.launch.worker" in call]
    assert sorted(call[-3] for call in steps) == ["generator-0", "generator-1"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    root = extract(Path(os.environ[FOLDER]))
    assert root is not None
    addresses = [one.address for own in psutil.net_if_addrs().values() for one in own if one.family.name == "AF_INET"]
    address = next((one for one in addresses if not one.startswith("127.")), "127.0.0.1")
    cluster = SlurmCluster(root, tmp_path_factory.mktemp("slurm"), address=address, port=find_port())
    cluster.environment["PYTHONPATH"] = str(ROOT)
    cluster.environment.pop("GLOO_SOCKET_IFNAME", None)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


class Job:
    """A run that was submitted."""

    def __init__(self, cluster: SlurmCluster, folder: Path, name: str, *settings: str) -> None:
        self.cluster = cluster
        self.run_dir = folder / "runs" / name
        command = [sys.executable, "-m", "asyncrl.cli", "launch", "--config", "demo", "--run", name, *SETTINGS]
        command += ["--cluster", "slurm", "--generators", "2", "launch.slurm={nodes: 3, exclusive: true}", *settings]
        done = subprocess.run(
            command, cwd=folder, env=cluster.environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        self.id = next(line.split()[1].rstrip(",") for line in done.stdout.splitlines() if line.startswith("job "))

    @property
    def output(self) -> str:
        file = self.run_dir / "logs" / f"slurm-{self.id}.out"
        return file.read_text() if file.exists() else ""

    def steps(self) -> int:
        file = self.run_dir / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def shows(self, field: str) -> str:
        """Returns a field of `scontrol show job`."""
        words = self.cluster.run("scontrol", "show", "job", self.id).split()
        return next((word.partition("=")[2] for word in words if word.startswith(f"{field}=")), "")

    def hosts_of(self, role: str) -> list[str]:
        """The host of each start of a role."""
        lines = (self.run_dir / "logs" / f"{role}.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        return [event.get("host", "") for event in events if event["event"] == "started"]

    def wait_until(self, condition: Callable[[], bool], *, what: str, timeout_s: float = 120.0) -> None:
        try:
            self.cluster.wait_until(condition, what=what, timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.output}") from None

    def await_end(self) -> None:
        ongoing = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
        self.wait_until(lambda: self.shows("JobState") not in ongoing, what="the end of the job", timeout_s=300)
        assert self.shows("JobState") == "COMPLETED", self.output

    def summary(self) -> dict[str, object]:
        return json.loads((self.run_dir / "summary.json").read_text())


@pytest.mark.slurm
def test_a_job_goes_on_after_its_time(cluster: SlurmCluster, demo_folder: Path) -> None:
    """SIGUSR1, as SLURM sends it before the end of a job's time: the step is saved, and the next start resumes."""
    job = Job(cluster, demo_folder, "requeued", "--steps", "12")
    job.wait_until(lambda: job.steps() >= 3, what="step 3", timeout_s=180)
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    job.wait_until(lambda: job.shows("Restarts") == "1", what="the requeue")
    assert job.summary()["status"] == "stopped" and job.steps() < 12
    job.wait_until(lambda: job.shows("JobState") == "PENDING", what="the job in the queue")
    cluster.run("scontrol", "update", f"JobId={job.id}", "StartTime=now")  # SLURM waits for two minutes
    job.await_end()
    summary = job.summary()
    check_ledger(summary)
    assert (summary["status"], summary["steps"], summary["attempts"]) == ("finished", 12, 2)
    assert f"{job.id} on n1, n2, n3, start 2" in job.output
    assert len(job.hosts_of("generator-1")) == 2


@pytest.mark.slurm
def test_a_node_is_lost(cluster: SlurmCluster, demo_folder: Path) -> None:
    """Its generator continues elsewhere, and the job to its end."""
    job = Job(cluster, demo_folder, "lost", "--steps", "300", "launch.heartbeat_timeout_s=20")
    generators = ("generator-0", "generator-1")
    job.wait_until(lambda: job.steps() >= 3, what="step 3", timeout_s=180)
    lost = next(role for role in generators if job.hosts_of(role)[-1] == "n3")
    cluster.kill_node("n3")
    job.wait_until(lambda: job.hosts_of(lost)[-1] != "n3", what="another host", timeout_s=240)
    job.await_end()
    summary = job.summary()
    check_ledger(summary)
    assert (summary["status"], summary["steps"], summary["attempts"]) == ("finished", 300, 1)
    assert f"{lost} moves from n3 to" in job.output
