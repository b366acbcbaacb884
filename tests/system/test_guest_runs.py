"""Guests: a machine that joins a run by hand, with a key of its own and weights through files.

The machines are network namespaces, with the run's folder on one file system and a home folder for each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from asyncrl.types import FIRST_GUEST
from tests.helpers.runs import SMALL, Launched, check_ledger
from tests.network.hosts import DIE_WITH_PARENT, ROOT, Host, Network

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]

QUICK = ["observe.samples=false", "launch.pin_cores=false", "launch.start_timeout_s=120", "weights.transport=files"]
STEAL = """
import sys
from contextlib import closing
from asyncrl.errors import PeerTimeoutError
from asyncrl.launch.commands.join import Head
from asyncrl.launch.invitations import read_key
from asyncrl.wire.guests import HELLO_ID
from asyncrl.wire.launcher_messages import ReadStatus, Scale, Shutdown, Stop
from asyncrl.wire.rpc import Connection
from pathlib import Path
key = read_key(Path(sys.argv[1]))
head = Head(key, key.address)
welcome = head.hello({})
for body in (ReadStatus(), Scale(9), Stop("stolen"), Shutdown()):
    with closing(Connection(head.endpoints(welcome.run_id), linger_s=0.0)) as connection:
        try:
            print("answered", connection.request(body, timeout_s=0.5))
        except PeerTimeoutError:
            print("silent")
"""
"""Actions that a guest's key does not permit, attempted with all that the guest knows."""


class Machine:
    """A host on which commands run with a home folder of its own."""

    def __init__(self, host: Host, folder: Path, home: Path) -> None:
        self.host, self._folder = host, folder
        self._environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(home)}
        self._environment.pop("GLOO_SOCKET_IFNAME", None)  # which the other tests set
        home.mkdir(exist_ok=True)

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.host.entry(), *DIE_WITH_PARENT, sys.executable, *command],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str) -> str:
        process = self.start(*command)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        return output

    def launch(self, *arguments: str) -> Launched:
        return Launched(
            self._folder, "guests", self.start("-m", "asyncrl.cli", "launch", "--run", "guests", *arguments)
        )


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    network = Network(tmp_path)
    yield network
    network.close()


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes whose trees are killed at the end."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        kill_tree(process)


def kill_tree(process: subprocess.Popen[str]) -> None:
    tree = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.kill()
    for child in tree:
        if child.is_running():
            child.kill()
    process.communicate(timeout=10)


def status_of(machine: Machine, run: Launched) -> dict[str, Any]:
    """The run's status, asked for on the head."""
    code = (
        "import sys, json; from pathlib import Path; from asyncrl.launch.run_dir import read_endpoints; "
        "from asyncrl.replay.client import LauncherClient; "
        "print(json.dumps(LauncherClient(read_endpoints(Path(sys.argv[1])), timeout_s=30.0).status()))"
    )
    return json.loads(machine.run("-c", code, str(run.run_dir)))


def await_tokens_of_guest(machine: Machine, run: Launched, since: int = 0) -> int:
    """Returns the guest's tokens once they are more than `since`."""
    deadline_s = time.monotonic() + 300
    while (tokens := status_of(machine, run)["generators"].get(str(FIRST_GUEST), {}).get("tokens", 0)) <= since:
        assert time.monotonic() < deadline_s, f"the guest generated no more than {since} tokens"
        assert run.process.poll() is None
        time.sleep(0.5)
    return tokens


def test_a_guest_joins_dies_comes_back_and_leaves(
    network: Network, demo_folder: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    """A guest generates next to the run's own generator, is killed and comes back, survives a kill and a resumption of
    the run, and leaves by Ctrl-C; another key of it is revoked. The ledger balances, its groups were trained, and its
    key opens nothing else."""
    head = Machine(network.add("head"), demo_folder, tmp_path / "head")
    guest = Machine(network.add("guest"), tmp_path, tmp_path / "guest")
    store = tmp_path / "weights"
    store.mkdir()
    run = head.launch(
        "--config", "demo", "--steps", "100000", *SMALL, *QUICK, f"weights.url={store}",
        f"launch.address={head.host.address}", "launch.heartbeat_timeout_s=10", "checkpoint.every_steps=5",
    )  # fmt: skip
    started.append(run.process)  # pyright: ignore
    run.wait_for_step(2)
    key = tmp_path / "lab.key"
    options = ["--name", "lab", "--generators", "2", "--out", str(key)]
    said = head.run("-m", "asyncrl.cli", "invite", "--run", "guests", *options)
    assert said == f"{key}: the key of lab; copy it to the guest and start there: asyncrl join --key {key.name}\n"
    secret = json.loads((run.run_dir / "server_key.json").read_text())["secret"]
    assert secret not in key.read_text()

    def join() -> subprocess.Popen[str]:
        command = ["join", "--key", str(key), "--generators", "1", "--model", str(demo_folder / "demo" / "model")]
        started.append(guest.start("-m", "asyncrl.cli", *command))
        return started[-1]

    first = join()
    tokens = await_tokens_of_guest(head, run)
    kill_tree(first)
    second = join()
    tokens = await_tokens_of_guest(head, run, tokens)
    shown = head.run("-m", "asyncrl.cli", "logs", "guests", f"generator-{FIRST_GUEST}")
    assert f"generator-{FIRST_GUEST}@lab" in shown and " started " in shown, shown
    assert Counter(guest.run("-c", STEAL, str(key)).split()) == {"silent": 4}
    status = status_of(head, run)
    assert (status["generators_wanted"], status["bad_messages"] >= 4) == (1, True)

    kill_tree(run.process)  # pyright: ignore
    run = head.launch("--resume")
    started.append(run.process)  # pyright: ignore
    steps = len(run.rows())
    run.wait_until(lambda: len(run.rows()) >= steps + 2, what="a step of the resumed run", timeout_s=300.0)
    await_tokens_of_guest(head, run, tokens)
    second.send_signal(signal.SIGINT)
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 130, output
    assert "guests was started again" in output and "its leases are handed back" in output, output
    assert str(FIRST_GUEST) not in status_of(head, run)["generators"]

    assert "lab is not admitted" in head.run("-m", "asyncrl.cli", "invite", "--run", "guests", "--revoke", "lab")
    third = guest.start("-m", "asyncrl.cli", "join", "--key", str(key), "--patience", "3s")
    output, _ = third.communicate(timeout=60)
    assert third.returncode == 1 and "does not admit this key" in output, output

    run.wait_for_step(len(run.rows()) + 2)
    run.process.send_signal(signal.SIGINT)
    code, output = run.end(timeout_s=100)
    assert code == 130, output
    check_ledger(run.summary())
    trace = pq.read_table(run.run_dir / "trace.parquet").to_pylist()
    trained = Counter(row["generator"] for row in trace if row["outcome"] == "trained")
    assert trained[FIRST_GUEST] and trained[0], trained
