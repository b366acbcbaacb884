"""Runs on a Ray cluster whose nodes are all on this machine: a head without cores, and three nodes with one each."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from tests.helpers.ray_cluster import RayCluster
from tests.helpers.runs import SMALL, Launched, check_ledger

pytest.importorskip("ray", reason="Ray is not installed: pip install 'asyncrl[ray]'")
pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

ON_RAY = ["launch.cluster=ray", "launch.start_timeout_s=120", *SMALL]


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    """A separate cluster for each test, since they change its nodes."""
    with pytest.MonkeyPatch.context() as patch:
        found = RayCluster(3)
        patch.setenv("RAY_ADDRESS", found.address)
        yield found
        found.close()


def hosts_of(run: Launched, role: str) -> list[str]:
    """The host of each start of a role."""
    return [event["host"] for event in run.events(role) if event["event"] == "started"]


def test_nodes_die_while_the_demo_trains(
    launch: Callable[..., Launched], asyncrl: Callable[..., str], cluster: RayCluster
) -> None:
    """A generator is added, then its node dies, then the learner's; a new node comes. The run continues until it is
    interrupted. What the generator had is generated elsewhere within seconds."""
    settings = ["checkpoint.every_steps=20"]
    run = launch("--steps", "5000", *settings, *ON_RAY, run="on-ray", plain=True)
    run.wait_for_step(2)
    asyncrl("scale", "--generators", "2", "--run", str(run.run_dir))
    run.await_tokens(1)
    first = [hosts_of(run, role)[0] for role in ("learner-0", "generator-0", "generator-1")]
    assert len(set(first)) == 3, first
    run.wait_for_step(len(run.rows()) + 3)  # it gets weights with the others now
    cluster.remove(run.pid("generator-1"))
    run.wait_until(lambda: len(run.starts("generator-1")) > 1, what="the generator elsewhere", timeout_s=60)
    assert hosts_of(run, "generator-1")[1] in first[:2]
    run.await_tokens(1)
    run.wait_for_step(len(run.rows()) + 2)
    cluster.remove(run.pid("learner-0"))
    cluster.add()
    run.wait_until(lambda: len(run.starts("learner-0")) > 1, what="the learner elsewhere", timeout_s=120)
    assert hosts_of(run, "learner-0")[1] not in (first[0], first[2])
    run.wait_for_step(len(run.rows()) + 2)
    run.process.send_signal(signal.SIGINT)
    code, output = run.end(timeout_s=100)
    assert code == 130, output
    summary = run.summary()
    check_ledger(summary)
    assert summary["status"] == "stopped"
    assert summary["restarts"]["generator"] >= 1 and summary["restarts"]["learner"] == 1
    assert run.left_over() == []
