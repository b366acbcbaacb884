"""Runs whose roles are on different hosts: network namespaces with an address each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.replay.queue import SUSPECT_S
from tests.helpers.runs import SMALL, Launched, check_ledger
from tests.network.hosts import DIE_WITH_PARENT, ROOT, Host, Network
from tests.network.link import Quality

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

LAUNCHER = f"{ROOT}/tests/network/namespaces.py:Namespaces"
CUT_S = 20.0
QUICK = ["observe.samples=false", "launch.start_timeout_s=120"]


IN_POOL = ["placement.pools={a: {nodes: 2}}", "placement.roles={generator: a, learner: a}"]
"""The launcher's own host has the replay queue only."""


class Cluster:
    """Hosts, a run over them, and which hosts its launcher takes for lost."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.hosts: dict[str, Host] = {}
        self._file = folder / "hosts.json"
        self._lost: set[str] = set()
        self.runs: list[Launched] = []

    def add(self, name: str, *, linked: bool = False) -> Host:
        self.hosts[name] = self.network.add(name, linked=linked)
        self._write()
        return self.hosts[name]

    def launch(self, name: str, *settings: str, steps: int = 12, generators: int = 2, learners: int = 2) -> Launched:
        """Starts the demo with small steps on the hosts, as a run of this name."""
        head = next(iter(self.hosts.values()))
        command = [sys.executable, "-m", "asyncrl.cli", "launch", "--config", "demo", "--run", name]
        command += ["--steps", str(steps), "--generators", str(generators), "--learners", str(learners)]
        command += [f"launch.cluster={LAUNCHER}", *QUICK, *SMALL, *settings]
        environment = os.environ | {"HOSTS": str(self._file), "PYTHONPATH": str(ROOT)}
        del environment["GLOO_SOCKET_IFNAME"]  # which the other tests set
        process = subprocess.Popen(
            [*head.entry(), *DIE_WITH_PARENT, *command],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.runs.append(Launched(self.folder, name, process))
        return self.runs[-1]

    def set_lost(self, name: str, lost: bool) -> None:
        """Says to the launcher whether it still has the host."""
        (self._lost.add if lost else self._lost.discard)(name)
        self._write()

    def kill(self, run: Launched, name: str) -> None:
        """Kills the roles on a host, and the host for the launcher."""
        self.set_lost(name, True)
        for pid in self.roles(run, name):
            os.kill(pid, signal.SIGKILL)

    def roles(self, run: Launched, name: str) -> list[int]:
        """Process ids of all that runs on a host for the run."""
        network = os.readlink(f"/proc/{self.hosts[name].pid}/ns/net")
        run.note_tree()
        return [pid for pid in run.tree if psutil.pid_exists(pid) and _network(pid) == network]

    def _write(self) -> None:
        known = [
            {"name": name, "pid": host.pid, "address": host.address, "cpus": cores(), "lost": name in self._lost}
            for name, host in self.hosts.items()
        ]
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(known))
        new.replace(self._file)


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _network(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:  # it has ended
        return ""


@pytest.fixture
def cluster(network: Network, demo_folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(network, demo_folder)
    yield cluster
    for run in cluster.runs:
        run.kill()


def finish(run: Launched) -> dict[str, Any]:
    """Waits for the end of a run and returns its summary."""
    code, output = run.end(timeout_s=300)
    print(output)
    assert code == 0, output
    assert run.left_over() == []
    check_ledger(run.summary())
    return run.summary()


def hosts_of(run: Launched, role: str) -> list[str]:
    """The host of each start of a role, according to its log."""
    return [event.get("host", "") for event in run.events(role) if event["event"] == "started"]


def count(run: Launched, role: str, event: str) -> int:
    """The number of such events in the log of the role."""
    return sum(one["event"] == event for one in run.events(role))


def placed(run: Launched, *roles: str) -> dict[str, str]:
    """The host of the last start of each role."""
    return {role: (hosts_of(run, role) or ["nowhere"])[-1] for role in roles}


def await_move(run: Launched, role: str, *, away_from: str, timeout_s: float = 180.0) -> None:
    """Returns when the role has started on another host."""
    run.wait_until(lambda: placed(run, role)[role] != away_from, what=f"another host for {role}", timeout_s=timeout_s)


def test_all_data_of_a_run_is_on_the_network_that_it_names(cluster: Cluster) -> None:
    """The hosts have another one, over which they know one another; only the launcher's has the interface's name. The
    keys of its sockets are in no file once it has ended."""
    for number, name in enumerate(("head", "n1", "n2"), start=1):
        cluster.network.attach(cluster.add(name), f"data{number}", f"10.78.{number}.{number}/16")
    run = cluster.launch("named", "launch.address=10.78.0.0/16:29500", *IN_POOL, steps=4, generators=1, learners=1)
    run.wait_for_step(1)
    endpoints = json.loads((run.run_dir / "endpoints.json").read_text())
    secrets = [value for name, value in json.loads(endpoints["keys"]).items() if "secret" in name]
    assert (endpoints["replay"], len(secrets)) == ("tcp://10.78.1.1:29500", 2)
    summary = finish(run)
    for file in filter(Path.is_file, run.run_dir.rglob("*")):
        content = file.read_bytes()
        assert not any(secret.encode() in content for secret in secrets), file
    assert (summary["steps"], sum(summary["restarts"].values())) == (4, 0)
    hosts = json.loads((run.run_dir / "hosts.json").read_text())
    assert [host["address"] for host in hosts] == ["10.78.1.1", "10.78.2.2", "10.78.3.3"]
    for number, host in enumerate(cluster.hosts.values(), start=1):
        sent = [sent_bytes(host, device) for device in ("eth0", f"data{number}")]
        print(f"{host.name} sent {sent[0]:,} bytes by eth0, {sent[1]:,} by data{number}")
        assert sent[0] < 10_000 < 50_000 < sent[1]
    code, output = cluster.launch("refused", "launch.address=data1", *IN_POOL).end(timeout_s=120)
    assert code == 2 and "launch.address = 'data1': n1 has no interface of this name; it has lo (127.0.0.1)" in output
    assert "eth0 (10.77.0.2), data2 (10.78.2.2)" in output


def sent_bytes(host: Host, device: str) -> int:
    (link,) = json.loads(host.run("ip", "-stats", "-json", "link", "show", device))
    return link["stats64"]["tx"]["bytes"]


def test_hosts_are_killed_and_come_back(cluster: Cluster) -> None:
    """One with a generator, then one with the learner; both roles start again where there is room."""
    for name in ("head", "n1", "n2"):
        cluster.add(name)
    run = cluster.launch("killed", *IN_POOL, steps=60, learners=1)
    run.wait_for_step(3)
    for role in ("generator-0", "learner-0"):
        host = placed(run, role)[role]
        cluster.kill(run, host)
        killed_s, step = time.monotonic(), len(run.rows())
        await_move(run, role, away_from=host)
        run.wait_for_step(step + 3)
        print(f"{role}: the third step {time.monotonic() - killed_s:.1f} s after the death of its host")
        cluster.set_lost(host, False)
    summary = finish(run)
    assert summary["steps"] == 60
    assert summary["restarts"]["learner"] >= 1 and summary["restarts"]["generator"] >= 1


def test_a_host_that_was_only_silent_changes_nothing_when_it_is_back(cluster: Cluster) -> None:
    """The learner's host stands still until another one has taken its place: the old process is refused, and ends."""
    for name in ("head", "n1", "n2"):
        cluster.add(name)
    run = cluster.launch("silent", *IN_POOL, steps=40, generators=1, learners=1)
    run.wait_for_step(3)
    host, old = placed(run, "learner-0")["learner-0"], run.pid("learner-0")
    cluster.set_lost(host, True)
    os.kill(old, signal.SIGSTOP)
    await_move(run, "learner-0", away_from=host)
    run.wait_for_step(len(run.rows()) + 2)
    os.kill(old, signal.SIGCONT)
    run.wait_until(lambda: not psutil.pid_exists(old) or not _runs(old), what="the end of the old learner")
    told = [event for event in run.events("learner-0") if event["level"] == "error"]
    assert any("superseded" in event["error"] for event in told), told
    summary = finish(run)
    assert summary["steps"] == 40
    steps = [row["step"] for row in run.rows()]
    assert steps == sorted(set(steps)), "a step was reported twice"


def test_a_silent_host_holds_nothing_up_and_continues_when_it_is_back(cluster: Cluster) -> None:
    """All processes of a generator's host stand still, and nothing reports that it is lost. The other generator gets
    what it had. Back again it is the same process and session."""
    for name in ("head", "n1", "n2", "n3"):
        cluster.add(name)
    pools = ["placement.pools={a: {nodes: 3}}", IN_POOL[1]]
    run = cluster.launch("suspect", *pools, steps=40, learners=1)
    run.wait_until(lambda: len(run.rows()) >= 3, what="step 3", timeout_s=240)
    # One that has not been ready for a version yet is waited for: it may allocate memory.
    run.wait_until(lambda: count(run, "generator-1", "weights loaded") > 0, what="weights of generator-1")
    assert len(set(placed(run, "learner-0", "generator-0", "generator-1").values())) == 3
    silent = cluster.roles(run, placed(run, "generator-1")["generator-1"])
    assert run.pid("generator-1") in silent
    for pid in silent:
        os.kill(pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    passes_on = "lease of a silent generator passes on"
    run.wait_until(lambda: count(run, "replay", passes_on) > 0, what=passes_on, timeout_s=SUSPECT_S + 10)
    run.wait_for_step(len(run.rows()) + 1)
    print(f"a step {time.monotonic() - stopped_s:.1f} s after the host fell silent")
    loaded = count(run, "generator-1", "weights loaded")
    for pid in silent:
        os.kill(pid, signal.SIGCONT)
    run.wait_until(lambda: count(run, "generator-1", "weights loaded") > loaded, what="weights for it")
    summary = finish(run)
    assert (summary["steps"], sum(summary["restarts"].values())) == (40, 0)
    assert len(run.starts("generator-1")) == 1


def test_a_long_and_lossy_link_that_is_cut_loses_nothing(cluster: Cluster) -> None:
    """50 ms of delay and 5 % of packets lost in each direction, for groups and weights; then no packet for CUT_S."""
    cluster.add("head")
    far = cluster.add("far", linked=True)
    assert far.link
    lossy = Quality(delay_s=0.025, loss=0.05)
    far.link.set(lossy)
    run = cluster.launch("lossy", steps=20, generators=1, learners=1)
    run.wait_for_step(5)
    far.link.set(Quality(cut=True))
    time.sleep(CUT_S)
    far.link.set(lossy)
    ended_s, step = time.monotonic(), len(run.rows())
    run.wait_for_step(step + 2)
    print(f"2 steps {time.monotonic() - ended_s:.1f} s after a cut of {CUT_S:g} s")
    summary = finish(run)
    assert (summary["steps"], sum(summary["restarts"].values())) == (20, 0)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
