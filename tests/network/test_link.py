"""Links have the quality that was set, and nothing is left of hosts."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.network.hosts import ROOT, Host, Network, hosts_fault
from tests.network.link import Link, Quality

TIMEOUT_S = 60.0


@pytest.fixture
def pair(network: Network) -> tuple[Host, Host, Link]:
    """A host that serves traffic, one across a link, and the link."""
    near, far = network.add("near"), network.add("far", linked=True)
    server = near.start("tests.network.traffic", "serve")
    assert server.stdout and server.stdout.readline() == "up\n"
    assert far.link
    return near, far, far.link


def measure(host: Host, *arguments: str) -> Any:
    output, _ = host.start("tests.network.traffic", *arguments).communicate(timeout=TIMEOUT_S)
    return json.loads(output)


def test_delay_loss_and_cut(pair: tuple[Host, Host, Link]) -> None:
    near, far, link = pair
    link.set(Quality(delay_s=0.04))
    round_trips_s = measure(far, "echo", near.address, "50")
    assert len(round_trips_s) == 50 and 0.08 <= statistics.median(round_trips_s) < 0.1
    link.set(Quality(loss=0.2))
    assert 0.5 < len(measure(far, "echo", near.address, "300")) / 300 < 0.78, "0.64 are lost neither there nor back"
    link.set(Quality(cut=True))
    assert measure(far, "echo", near.address, "10") == []
    link.set(Quality())
    assert len(measure(far, "echo", near.address, "10")) == 10


def test_rate(pair: tuple[Host, Host, Link]) -> None:
    near, far, link = pair
    link.set(Quality(rate_bits_per_s=20e6))
    slow_s = measure(far, "send", near.address, "5000000")
    link.set(Quality())
    fast_s = measure(far, "send", near.address, "5000000")
    assert 15e6 < 8 * 5e6 / slow_s < 20e6 and fast_s < slow_s / 4


def test_hosts_reach_one_another_but_nothing_else(network: Network) -> None:
    first, second = network.add("first"), network.add("second")
    server = first.start("tests.network.traffic", "serve")
    assert server.stdout and server.stdout.readline() == "up\n"
    assert measure(second, "send", first.address, "1000") < TIMEOUT_S
    (route,) = second.run("ip", "route").splitlines()
    assert route.strip() == f"10.77.0.0/24 dev eth0 proto kernel scope link src {second.address}"


SCRIPT = """
import pathlib, sys
from tests.network.hosts import Network
network = Network(pathlib.Path(sys.argv[1]))
host = network.add("host", linked=True)
server = host.start("tests.network.traffic", "serve")
server.stdout.readline()
print(network._switch.pid, host.pid, server.pid, network._links[0].pid, flush=True)
sys.stdin.read()
"""


def runs(process: Path) -> bool:
    """True unless the process of this folder has ended, whether or not anybody has asked for its exit status."""
    try:
        return "\nState:\tZ" not in (process / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(bool(hosts_fault()), reason=f"no network namespaces here: {hosts_fault()}")
def test_nothing_is_left_of_a_test_that_was_killed(tmp_path: Path) -> None:
    test = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert test.stdin and test.stdout
    processes = [Path("/proc", pid) for pid in test.stdout.readline().split()]
    assert len(processes) == 4 and all(map(runs, processes))
    test.kill()
    test.wait(TIMEOUT_S)
    test.stdin.close()
    test.stdout.close()
    deadline_s = time.monotonic() + TIMEOUT_S
    while any(map(runs, processes)):
        assert time.monotonic() < deadline_s, processes
        time.sleep(0.05)
