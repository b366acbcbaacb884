"""Runs on a SLURM cluster: the batch job, and the steps of roles, with commands that only record."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch import machine as packages
from asyncrl.launch import slurm as slurm_job
from asyncrl.launch import slurm as slurm_launcher
from asyncrl.launch.launcher import HOST_LOST, find_launcher
from asyncrl.launch.machine import Gpu, Host, package_versions
from asyncrl.launch.placement import RoleResources
from asyncrl.launch.run_dir import RunFolder
from asyncrl.launch.slurm import SlurmLauncher, code_of_step, in_pools, job_options, job_script, submit
from asyncrl.launch.worker import EXIT_CRASHED, RoleSpec
from asyncrl.observe.console import NOTICE_S, Interrupts
from asyncrl.wire.endpoints import Endpoints
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.replay import small_config

pytestmark = pytest.mark.timeout(120)

TWO_POOLS = {
    "placement__pools": {"gen": {"nodes": 2, "gpus": 8}, "train": {"nodes": 1, "gpus": 8}},
    "placement__roles": {"generator": "gen", "learner": "train"},
}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.chdir(tmp_path)
    return FakeSlurm(tmp_path / "bin", monkeypatch)


def of_slurm(**changes: Any) -> Config:
    return small_config(launch__cluster="slurm", launch__start_timeout_s=100.0, **changes)


def test_the_script_of_a_run(fake: FakeSlurm, tmp_path: Path) -> None:
    config = of_slurm(run="mine", launch__slurm={"partition": "gpu", "mem": 0}, **TWO_POOLS)
    assert (
        job_script(config)
        == f"""\
#!/bin/bash
#SBATCH --job-name=asyncrl-mine
#SBATCH --nodes=3
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=B:USR1@300
#SBATCH --partition=gpu
#SBATCH --mem=0
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output={tmp_path}/runs/mine/logs/slurm-%j.out

set -euo pipefail
cd {tmp_path}
# exec: SIGUSR1, which announces the end of the job's time, must reach the launcher.
exec {sys.executable} -P -m asyncrl.cli launch --config {tmp_path}/runs/mine/job.yaml resume=auto
"""
    )


def test_values_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch takes double quotes, in which a backslash takes the next character as it is; the shell has rules of its
    own."""
    folder = tmp_path / "my 100% 'runs'; $(touch gone)"
    folder.mkdir()
    monkeypatch.chdir(folder)
    script = job_script(of_slurm(launch__slurm={"comment": 'a "b" \\c $d #e', "hold": True, "exclusive": False}))
    assert '#SBATCH --comment="a \\"b\\" \\\\c $d #e"\n' in script
    assert "#SBATCH --hold\n" in script and "exclusive" not in script
    assert f'#SBATCH --output="{str(folder).replace("%", "%%")}/runs/' in script
    (tmp_path / "job.sh").write_text(script.replace("exec ", "printf '%s\\n' ") + "pwd\n")
    done = subprocess.run(["bash", tmp_path / "job.sh"], capture_output=True, text=True, timeout=30, check=True)
    said = done.stdout.splitlines()
    assert (said[-1], said[6]) == (str(folder), f"{folder}/runs/run/job.yaml"), said
    assert not (folder / "gone").exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"nodes": 1, "exclusive": True}),
        ({"launch__slurm": {"nodes": 2, "cpus-per-task": 8}}, {"nodes": 2, "cpus-per-task": 8}),
        ({"placement__pools": {"all": "8 x gpu"}}, {"gpus": 8, "exclusive": True}),
        ({"placement__pools": {"all": {"nodes": 2, "cpus": 4}}}, {"nodes": 2, "cpus-per-task": 4}),
    ],
)
def test_the_size_of_a_job(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    if "placement__pools" in changes:
        changes = {**changes, "placement__roles": {"generator": "all", "learner": "all"}}
    options = job_options(of_slurm(**changes))
    assert {name: options[name] for name in options if name in (*slurm_job.SIZE, *slurm_job.SHARES)} == expected


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"time": 43200}, r"launch.slurm.time = 43200: YAML reads times .* such as 0-12:00:00"),
        ({"output": "x"}, "launch.slurm.output = 'x': the launcher sets --output itself"),
        ({"Partition": "x"}, "is not an option of sbatch"),
        ({"p; rm": "x"}, "is not an option of sbatch"),
        ({"comment": "a\n#SBATCH --wrap=x"}, "must be a text on one line"),
        ({"comment": ""}, "must be a text on one line"),
        ({"signal": "USR2@60"}, "launch.slurm.signal = 'USR2@60': .* write B:USR1@SECONDS"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        job_options(of_slurm(launch__slurm=options))


@pytest.mark.parametrize(
    ("other", "options", "text"),
    [
        ({"nodes": 1, "gpus": 4}, {}, r"placement.pools \(gen, train\): all nodes of a SLURM job are alike"),
        ("8 x gpu", {}, "must have `nodes`"),
        ({"nodes": 1, "gpus": 8}, {"nodes": 3}, "launch.slurm.nodes = 3: placement.pools says"),
    ],
)
def test_pools_that_one_job_cannot_have_are_refused(other: Any, options: dict[str, Any], text: str) -> None:
    pools = {"gen": {"nodes": 2, "gpus": 8}, "train": other}
    with pytest.raises(ConfigError, match=text):
        job_options(of_slurm(launch__slurm=options, **{**TWO_POOLS, "placement__pools": pools}))


@contextmanager
def submitting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Console]:
    """A console for `submit`, whose checks of models and data are left out."""
    monkeypatch.setattr(slurm_job, "check_inputs", lambda *_: None)
    monkeypatch.setattr(slurm_job, "fetch", lambda config, _: config)
    yield Console(file=io.StringIO(), width=200)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_run_is_submitted_beside_an_earlier_one(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.answers("sbatch", "77;cluster\n")
    config = of_slurm()
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.yaml").write_text(config.to_yaml())
    with submitting(monkeypatch) as console:
        assert submit(config, console) == 0
    assert fake.calls("sbatch") == [["--parsable", "runs/run/job.sh"]]
    assert "the earlier run of this name is now runs/run.1" in text_of(console)
    assert "job        77" in text_of(console) and "tail -F runs/run/logs/slurm-77.out" in text_of(console)
    assert load_config(config.run_dir / "job.yaml") == config
    assert (config.run_dir / "job.sh").read_text() == job_script(config)
    with RunFolder(config) as folder:  # as the launcher in the job does
        assert folder.moved_to is None
    assert (config.run_dir / "job.sh").exists() and (config.run_dir / "logs").is_dir()


def test_a_dry_run_shows_the_script_and_submits_nothing(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    with submitting(monkeypatch) as console:
        assert submit(of_slurm(), console, dry_run=True) == 0
    assert fake.calls("sbatch") == []
    assert job_script(of_slurm()) in text_of(console)
    assert "later: sbatch runs/run/job.sh" in text_of(console)


def test_a_job_that_slurm_refuses(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.answers("sbatch", error="sbatch: error: invalid partition specified: x\n", code=1)
    with submitting(monkeypatch) as console, pytest.raises(RunError, match=r"SLURM refuses .* invalid partition"):
        submit(of_slurm(), console)


def test_outside_of_a_job_there_are_no_hosts(fake: FakeSlurm) -> None:
    launcher = find_launcher(of_slurm())()
    assert isinstance(launcher, SlurmLauncher)
    with pytest.raises(ConfigError, match="is not inside a SLURM job"):
        launcher.acquire(of_slurm())


@pytest.fixture
def launcher(fake: FakeSlurm) -> SlurmLauncher:
    """A launcher on n2 in a job on n1, n2 and n3."""
    fake.begin_job("n2", "n1", "n3")
    launcher = SlurmLauncher()
    launcher.acquire(of_slurm())
    return launcher


def test_the_hosts_of_a_job(fake: FakeSlurm, launcher: SlurmLauncher, tmp_path: Path) -> None:
    hosts = launcher.hosts()
    assert [host.name for host in hosts] == ["", "n1", "n3"]
    assert all(host.address == "127.0.0.1" and host.cpus for host in hosts)
    (call,) = fake.calls("srun")
    places = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=n1,n3"]
    assert call[: len(call) - 2] == [
        "--overlap", "--kill-on-bad-exit=0", "--no-kill", "--cpu-bind=none", "--export=ALL", *places, sys.executable,
        "-P", "-m", "asyncrl.launch.machine",
    ]  # fmt: skip
    assert list((tmp_path / "runs").iterdir()) == []


def test_hosts_with_other_packages_are_refused(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.begin_job("n1", "n2", "n3")
    there = package_versions()
    monkeypatch.setattr(packages, "package_versions", lambda: {**there, "torch": "1.0"})
    differs = f"has other packages: torch {there['torch']} (here 1.0)"
    with pytest.raises(ConfigError, match=re.escape(f"n2 {differs}; n3 {differs}") + "$"):
        SlurmLauncher().acquire(of_slurm())


def test_every_node_finds_its_own_address(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an interface or a network in `launch.address`; a node that has no address there is named."""
    fake.begin_job("n1", "n2")
    monkeypatch.setattr(slurm_launcher, "is_loopback", lambda address: False)  # only this interface is on every machine
    launcher = SlurmLauncher()
    launcher.acquire(of_slurm(launch__address="127.0.0.0/8:29500"))
    assert fake.calls("srun")[-1][-2] == "127.0.0.0/8"
    assert [host.address for host in launcher.hosts()] == ["127.0.0.1"] * 2
    monkeypatch.setattr(slurm_launcher, "listening_address", lambda host: "10.9.9.9")
    with pytest.raises(ConfigError, match=r"launch.address = 'none0': n2 has no interface of this name; it has lo \("):
        launcher.acquire(of_slurm(launch__address="none0"))


def spec_on(host: str, tmp_path: Path) -> RoleSpec:
    endpoints = Endpoints("id", replay="ipc://r", weights="ipc://w", learners="ipc://l", host="127.0.0.1")
    return RoleSpec("generator", 1, str(tmp_path / "runs" / "run"), endpoints, (0,), 8, host=host)


def test_a_role_on_another_node_is_a_step(
    fake: FakeSlurm, launcher: SlurmLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_GPUS", "16")
    monkeypatch.setattr(launcher, "fork_server", "which forks on this node only")
    role = launcher.start(spec_on("n3", tmp_path), RoleResources((0,), 1, ("4",), visible_gpus=("3", "4"), host="n3"))
    assert launcher.wait([role], 60.0) == []
    assert role.name == "generator-1@n3"
    # The spec arrived; the folder of the run has no config.
    assert role.code == EXIT_CRASHED, role.cause()
    call = fake.calls("srun")[-1]
    assert call == [
        "--overlap", "--kill-on-bad-exit=0", "--no-kill", "--cpu-bind=none", "--export=ALL", "--nodelist=n3",
        "--nodes=1", "--ntasks=1", "--job-name=generator-1", "env", "CUDA_VISIBLE_DEVICES=3,4", sys.executable, "-P",
        "-m",
        "asyncrl.launch.worker", "generator-1", "0", "100",
    ]  # fmt: skip
    assert "SLURM_GPUS" not in launcher.environment()
    assert "100" not in launcher.command(spec_on("", tmp_path))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (100, 0),
        (102, 2),
        (106, 6),
        (0, HOST_LOST),
        (1, EXIT_CRASHED),
        (137, -9),
        (143, -15),
        (-9, -9),
        (255, EXIT_CRASHED),
    ],
)
def test_exit_codes_of_srun(code: int, expected: int) -> None:
    assert code_of_step(code) == expected


def test_roles_elsewhere_are_signalled_by_scancel(
    fake: FakeSlurm, launcher: SlurmLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = ["sleep", "60"]
    monkeypatch.setattr(SlurmLauncher, "command", lambda *_: sleeper)
    fake.answers("squeue", "77.3 learner-0\n77.4 generator-1\n77.batch batch\n")
    here, there = (launcher.start(spec_on(host, tmp_path), RoleResources((0,), 1, host=host)) for host in ("", "n3"))
    launcher.signal([here, there], signal.SIGTERM)
    assert launcher.wait([here], 10.0) == [] and here.code == -signal.SIGTERM
    assert there.code is None
    assert fake.calls("squeue") == [["--noheader", "--steps", "--jobs=77", "--format=%i %j"]]
    assert fake.calls("scancel") == [["--signal=TERM", "77.4"]]
    assert launcher.kill([here, there], show_stacks=True) == []
    assert fake.calls("scancel")[1:] == [["--signal=USR1", "77.4"]]
    assert there.code == -signal.SIGKILL
    fake.answers("sinfo", "n1 mixed\nn3 down*\n")
    again = launcher.start(spec_on("n3", tmp_path), RoleResources((0,), 1, host="n3"))
    assert launcher.kill([again], show_stacks=True) == []
    assert len(fake.calls("scancel")) == 2, "a node that is down is not waited for"


def test_nodes_that_do_not_respond_are_missing(
    fake: FakeSlurm, launcher: SlurmLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names_after(states: str, *, code: int = 0) -> list[str]:
        fake.answers("sinfo", states, code=code)
        launcher.kill([launcher.start(spec_on("n3", tmp_path), RoleResources((0,), 1, host="n3"))])
        return [host.name for host in launcher.hosts()]

    monkeypatch.setattr(SlurmLauncher, "command", lambda *_: ["sleep", "60"])
    assert names_after("n1 mixed\nn3 mixed*\n") == ["", "n1"]
    assert names_after("", code=1) == ["", "n1"], "as before where SLURM does not answer"
    assert names_after("n1 allocated\nn3 mixed\n") == ["", "n1", "n3"]
    assert names_after("n1 down*\nn3 draining\n") == ["", "n3"]
    assert names_after("n1 idle\nn3 mixed\n") == ["", "n3"], "the job has lost a node that was down"
    monkeypatch.setattr(slurm_launcher, "LOOK_AGAIN_S", 0.0)
    assert names_after("n1 idle\nn3 mixed*\n") == [""]
    fake.answers("sinfo", "n1 idle\nn3 mixed\n")
    for _ in range(100):
        if len(launcher.hosts()) == 2:
            break
        time.sleep(0.1)
    assert [host.name for host in launcher.hosts()] == ["", "n3"], "asked again without having killed anything"


def test_pools_get_the_nodes_in_their_order() -> None:
    gpus = tuple(Gpu(str(number)) for number in range(8))
    hosts = [Host(name, (0,), gpus) for name in ("", "n2", "n3")]
    assert [host.pool for host in in_pools(of_slurm(**TWO_POOLS), hosts)] == ["gen", "gen", "train"]
    with pytest.raises(ConfigError, match=r"placement.pools.train: 1 nodes with 8 GPUs each .* the job has 0"):
        in_pools(of_slurm(**TWO_POOLS), hosts[:2])
    with pytest.raises(ConfigError, match=r"placement.pools.train: .* with \[4\] GPUs"):
        in_pools(of_slurm(**TWO_POOLS), [*hosts[:2], Host("n3", (0,), gpus[:4])])


def test_the_end_of_the_time_asks_to_go_on_later(fake: FakeSlurm) -> None:
    interrupts = Interrupts(preemptible=True)
    with interrupts.caught():
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (interrupts.count, interrupts.go_on_later) == (1, True)
        assert interrupts.limit_s(15.0) == NOTICE_S < slurm_job.NOTICE_S
    preempted = Interrupts(preemptible=True)
    with preempted.caught():
        os.kill(os.getpid(), signal.SIGTERM)
        assert (preempted.count, preempted.go_on_later) == (2, False), "there is no time for the step"
    others = Interrupts()
    with others.caught():
        os.kill(os.getpid(), signal.SIGTERM)
        assert (others.count, others.limit_s(15.0)) == (1, 15.0)


def test_a_job_is_put_into_the_queue_again(fake: FakeSlurm, launcher: SlurmLauncher) -> None:
    launcher.requeue()
    assert fake.calls("scontrol")[-1] == ["requeue", "77"]
    fake.answers("scontrol", error="Requested operation is presently disabled\n", code=1)
    with pytest.raises(RunError, match=r"job 77 cannot go on later .* presently disabled"):
        launcher.requeue()
