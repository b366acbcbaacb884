"""Runs on a Ray cluster whose nodes are all on this machine: a head without cores, and three nodes with one each."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from statistics import fmean

import pytest

from tests.helpers.ray_cluster import RayCluster
from tests.helpers.runs import SMALL, Launched, check_ledger
from tests.helpers.second_attempts import second_attempts, stop_with_leases

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


def test_pools_that_cannot_be_had_are_refused(launch: Callable[..., Launched], cluster: RayCluster) -> None:
    """Once finally, with the present and the missing resources; and once after the wait for resources in use."""
    roles = "placement.roles={generator: gen, learner: train}"
    pools = "placement.pools={gen: {nodes: 4}, train: {nodes: 1}}"
    code, output = launch("--steps", "1", roles, pools, *ON_RAY, run="nodes", plain=True).end(timeout_s=100)
    assert code == 2
    assert "placement.pools.gen: 4 nodes with 1 cores each are asked for; " in output
    assert output.count("of 1 cores free") == 3 and output.count("0 of 0 cores free") == 1
    assert "1 nodes are missing" in output
    pools = "placement.pools={gen: 8 x gpu, train: {nodes: 1}}"
    code, output = launch("--steps", "1", roles, pools, *ON_RAY, run="gpus", plain=True).end(timeout_s=100)
    assert code == 2
    assert "placement.pools.gen: 8 GPUs with 1 cores each are asked for; " in output
    assert output.count("has 0 of 0 GPUs") == 4 and "8 GPUs are missing" in output


def test_the_demo_learns_over_three_nodes(launch: Callable[..., Launched], cluster: RayCluster) -> None:
    settings = ["launch.cluster=ray", "launch.start_timeout_s=120", "observe.samples=false"]
    run = launch("--steps", "100", "--generators", "2", *settings, run="learns", plain=True)
    code, output = run.end(timeout_s=300)
    print(output)
    assert code == 0, output
    assert len({hosts_of(run, role)[0] for role in ("learner-0", "generator-0", "generator-1")}) == 3
    rewards = [row["reward/mean"] for row in run.rows()]
    assert fmean(rewards[:5]) < 0.35 and fmean(rewards[-10:]) > 0.6, rewards
    check_ledger(run.summary())
    assert sum(run.summary()["restarts"].values()) == 0


def test_nodes_die_while_the_demo_trains(
    launch: Callable[..., Launched], asyncrl: Callable[..., str], cluster: RayCluster
) -> None:
    """A generator is added, then its node dies, then the learner's; a new node comes. The run continues until it is
    interrupted. What the generator had is generated elsewhere within seconds."""
    settings = ["checkpoint.every_steps=20", "journal.retention=all"]
    run = launch("--steps", "5000", *settings, *ON_RAY, run="on-ray", plain=True)
    run.wait_for_step(2)
    asyncrl("scale", "--generators", "2", "--run", str(run.run_dir))
    run.await_tokens(1)
    first = [hosts_of(run, role)[0] for role in ("learner-0", "generator-0", "generator-1")]
    assert len(set(first)) == 3, first
    run.wait_for_step(len(run.rows()) + 3)  # it gets weights with the others now
    stop_with_leases(run.run_dir, 1, [run.pid("generator-1")])
    died_s = time.monotonic()
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
    again = second_attempts(run.run_dir, 1, died_s)
    print(again)
    assert min(again.leased_s) < 5 and min(again.finished_s) < 30
