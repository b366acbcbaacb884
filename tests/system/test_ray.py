"""Runs on a Ray cluster of three nodes, all of them on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.helpers.ray_cluster import RayCluster
from tests.helpers.runs import SMALL, Launched, check_ledger

pytest.importorskip("ray", reason="Ray is not installed: pip install 'asyncrl[ray]'")
pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    found = RayCluster(3)
    monkeypatch.setenv("RAY_ADDRESS", found.address)
    yield found
    found.close()


def hosts_of(run: Launched, role: str) -> list[str]:
    """The host of each start of a role."""
    return [event["host"] for event in run.events(role) if event["event"] == "started"]


def test_roles_on_three_nodes(launch: Callable[..., Launched], cluster: RayCluster) -> None:
    run = launch("--steps", "6", "--generators", "2", "launch.cluster=ray", *SMALL, plain=True)
    code, output = run.end(timeout_s=300)
    print(output)
    assert code == 0, output
    check_ledger(run.summary())
    hosts = [*hosts_of(run, "learner-0"), *hosts_of(run, "generator-0"), *hosts_of(run, "generator-1")]
    assert len(set(hosts)) == 3, hosts
    assert run.left_over() == []
