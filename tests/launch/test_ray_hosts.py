"""Hosts that are taken for lost on a Ray cluster, with actors whose answers the test provides."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.launch.launcher import HOST_LOST
from asyncrl.launch.machine import package_versions
from asyncrl.launch.placement import Host, RoleResources
from asyncrl.launch.ray_actor import NodeFacts
from asyncrl.launch.ray_launcher import RayRole
from asyncrl.launch.worker import RoleSpec
from tests.helpers.replay import loopback_endpoints, small_config

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'asyncrl[ray]'")

RESOURCES = RoleResources((0,), threads=1, host="n1")


class Ref:
    """In place of a reference: its value or error, once there is one."""

    value: Any = None

    def give(self, value: Any) -> None:
        self.value = value


class Actor:
    """In place of an actor's handle. `calls` are all calls: the method, its arguments and the reference."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], Ref]] = []

    def __getattr__(self, name: str) -> Any:
        return type("Method", (), {"remote": staticmethod(lambda *args, **kwargs: self._call(name, args))})

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Ref:
        self.calls.append((name, arguments, Ref()))
        return self.calls[-1][2]

    def last(self, name: str) -> Ref:
        return [ref for called, _, ref in self.calls if called == name][-1]

    def count(self, name: str) -> int:
        return sum(called == name for called, _, _ in self.calls)


def get(ref: Ref) -> Any:
    if isinstance(ref.value, Exception):
        raise ref.value
    return ref.value


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Actor:
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: ([ref for ref in refs if ref.value is not None], []))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", lambda actor: actor.calls.append(("killed", (), Ref())))
    return Actor()


@pytest.fixture
def host(actor: Actor) -> Any:
    from asyncrl.launch.ray_cluster import Place, RayHost

    return RayHost(Host("n1", (0,)), Place("node"), actor, heard_s=0.0)


def role(name: str, key: int, host: Any, folder: Path) -> RayRole:
    return RayRole(key, RoleSpec(name, 0, str(folder), loopback_endpoints(1), (), 8, host="n1"), RESOURCES, host)


def unavailable() -> Exception:
    from ray.exceptions import ActorUnavailableError

    return ActorUnavailableError("the actor cannot be reached", os.urandom(16))


def died() -> Exception:
    from ray.exceptions import ActorDiedError

    return ActorDiedError()


def test_a_role_that_ended(actor: Actor, host: Any, tmp_path: Path) -> None:
    generator = role("generator", 0, host, tmp_path)
    assert generator.code is None
    actor.last("run").give((3, "generator-0@n1 ended with code 3: why"))
    assert (generator.code, generator.cause()) == (3, "generator-0@n1 ended with code 3: why")


def test_generators_are_given_up_at_once_and_learners_when_the_host_is_lost(
    actor: Actor, host: Any, tmp_path: Path
) -> None:
    generator, learner = role("generator", 0, host, tmp_path), role("learner", 1, host, tmp_path)
    actor.last("run").give(unavailable())
    assert (learner.code, generator.code) == (None, HOST_LOST)
    host.check(True, 1.0)
    assert learner.code is None and not host.lost
    host.check(False, 2.0)
    assert learner.code == HOST_LOST
    assert learner.cause() == "learner-0@n1: its host is lost (Ray has declared its node dead)"
    assert actor.count("killed") == 1


def test_a_host_that_answers_again(actor: Actor, host: Any, tmp_path: Path) -> None:
    """Its generator was replaced and is killed; its learner is watched on."""
    generator, learner = role("generator", 0, host, tmp_path), role("learner", 1, host, tmp_path)
    actor.last("run").give(unavailable())
    assert (learner.code, generator.code) == (None, HOST_LOST)
    host.check(True, 1.0)
    actor.last("ping").give(True)
    host.check(True, 2.0)
    assert not host.suspect and learner.code is None
    assert actor.count("run") == 3
    assert [arguments for name, arguments, _ in actor.calls if name == "kill"] == [([0],)]
    actor.last("run").give((0, ""))
    assert learner.code == 0


def test_a_silent_host(actor: Actor, host: Any, tmp_path: Path) -> None:
    learner = role("learner", 0, host, tmp_path)
    host.check(True, 10.0)
    assert not host.suspect
    host.check(True, 16.0)
    assert host.suspect and learner.code is None
    host.check(True, 61.0)
    assert host.lost and learner.code == HOST_LOST


def test_the_death_of_an_actor_is_that_of_its_host(actor: Actor, host: Any, tmp_path: Path) -> None:
    learner = role("learner", 0, host, tmp_path)
    actor.last("run").give(died())
    assert learner.code == HOST_LOST
    assert "its actor has died" in learner.cause()


def test_a_bundle_of_the_generators_has_the_gpus_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrl.launch import ray_cluster as cluster

    monkeypatch.setattr(cluster, "placement_group", lambda bundles, strategy, name: (bundles, strategy, name))
    pools = {
        "placement__pools": {"gen": "8 x gpu", "train": "2 x gpu"},
        "placement__roles": {"generator": "gen", "learner": "train"},
    }
    config = small_config(generator__tensor_parallel=4, **pools)
    for pool, bundles in (("gen", [{"CPU": 4, "GPU": 4}] * 2), ("train", [{"CPU": 1, "GPU": 1}] * 2)):
        group = cluster.reserve(config, pool)
        assert group.group == (bundles, "PACK", f"asyncrl/{config.run}/{pool}")
    assert cluster.reserve(config, "gen", count=1).group[0] == [{"CPU": 4, "GPU": 4}]  # type: ignore[index]


def test_a_pool_of_gpus_grows(actor: Actor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Once for each GPU that is missing; what does not come in time is given back."""
    from asyncrl.launch import ray_cluster as module
    from asyncrl.launch.ray_cluster import PoolGroup

    given_back: list[Any] = []
    monkeypatch.setattr(PoolGroup, "remove", lambda self: given_back.append(self.count))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    monkeypatch.setattr(
        module,
        "reserve",
        lambda config, pool, count: PoolGroup(pool, {"CPU": 1, "GPU": 1}, None, count, False, 1e9),  # type: ignore[arg-type]
    )
    pools = {"placement__pools": {"a": "2 x gpu"}, "placement__roles": {"generator": "a", "learner": "a"}}
    found = module.RayHosts(small_config(runs_dir=str(tmp_path), **pools))
    first = PoolGroup("a", {"CPU": 1, "GPU": 1}, None, 2, False, 0.0)  # type: ignore[arg-type]
    found.add(first)
    found.all = [module.RayHost(Host(f"n{n}", (0,)), module.Place("node", first, n), actor, 0.0) for n in (0, 1)]
    assert found.grow("a", 2) == ""
    assert found.grow("a", 5) == found.grow("a", 5) == "3 GPUs in pool a"
    found._groups[-1].asked_s = -1e9
    assert found.grow("a", 5) == "" and given_back == [3]


@pytest.mark.parametrize(
    ("named", "own", "network"),
    [
        ("127.0.0.1", "10.0.0.1", ""),
        ("lo", "10.0.0.1", ""),
        ("10.5.0.1:29500", "10.5.0.1", ""),
        ("ib0:29500", "10.5.0.1", "ib0"),
        ("10.5.0.0/16", "10.5.0.1", "10.5.0.0/16"),
    ],
)
def test_nodes_are_asked_for_their_addresses_on_the_network_of_the_run(
    actor: Actor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str, own: str, network: str
) -> None:
    """The launcher's machine is the same at both of its addresses; a node without an address there is refused."""
    from asyncrl.launch import ray_cluster as module

    found = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.5.0.1"}
    addresses = {name: [SimpleNamespace(address=one, family=socket.AF_INET)] for name, one in found.items()}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: addresses)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    monkeypatch.setattr(module, "free_resources", lambda node: (1, 0))
    monkeypatch.setattr(module, "PoolActor", lambda *_: None)
    hosts = module.RayHosts(small_config(runs_dir=str(tmp_path), launch__address=named))
    assert (hosts.own_address, hosts._network) == (own, network)
    options = SimpleNamespace(remote=lambda *_: actor)
    monkeypatch.setattr(ray, "remote", lambda _: SimpleNamespace(options=lambda **_: options))
    there = "10.5.0.2" if network else "10.0.0.2"
    for address in (own if network else "10.0.0.1", there):
        one = hosts._start(module.Place("ab" * 28))
        assert actor.calls[-1][1][2] == network
        one.facts.give(NodeFacts("node", "n", address, (0,), (), package_versions(), True))
        assert hosts._join(one, 0.0) == ""
    assert [one.host.address for one in hosts.all] == [own, there]
    one = hosts._start(module.Place("cd" * 28))
    one.facts.give(
        NodeFacts("node", "n3", "", (0,), (), package_versions(), True, "launch.address = 'ib0': n3 has none")
    )
    assert hosts._join(one, 0.0) == "launch.address = 'ib0': n3 has none"
    assert len(hosts.all) == 2 and actor.count("killed") == 1
    with pytest.raises(ConfigError, match=r"launch.address = 'none0': this machine has no interface of this name"):
        module.RayHosts(small_config(runs_dir=str(tmp_path / "none"), launch__address="none0"))
    assert not (tmp_path / "none").exists()


def test_a_cluster_that_was_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrl.launch import ray_cluster as cluster

    with socket.create_server(("127.0.0.1", 0)) as alive:
        address = f"127.0.0.1:{alive.getsockname()[1]}"
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(cluster, "read_ray_address", lambda: address)
        assert cluster.find_cluster() == address
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert cluster.find_cluster() == address
    with pytest.raises(ConfigError, match=rf"launch.cluster = 'ray': no cluster at RAY_ADDRESS={address}"):
        cluster.find_cluster()
    monkeypatch.delenv("RAY_ADDRESS")
    assert cluster.find_cluster() == "", "the file of the last cluster is still there"
    monkeypatch.setattr(cluster, "read_ray_address", lambda: None)
    assert cluster.find_cluster() == ""
