"""The launcher for Ray: actors, their hosts and logs, and jobs of a cluster elsewhere."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from asyncrl.errors import ConfigError
from asyncrl.launch.launcher import HOST_LOST
from asyncrl.launch.machine import Host, HostFacts, package_versions
from asyncrl.launch.placement import RoleResources
from asyncrl.launch.ray_actor import NodeLauncher, PoolActor
from asyncrl.launch.ray_launcher import RayLauncher, RayRole
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


def test_a_host_that_cannot_be_reached_for_a_while_keeps_its_roles(actor: Actor, host: Any, tmp_path: Path) -> None:
    generator = role("generator", 0, host, tmp_path)
    actor.last("run").give(unavailable())
    assert generator.code is None and actor.count("run") == 2
    host.check(True, 1.0)
    actor.last("ping").give(unavailable())
    host.check(True, 2.0)
    actor.last("ping").give({})
    host.check(True, 3.0)
    assert (host.lost, host.heard_s) == ("", 3.0)
    actor.last("run").give((0, ""))
    assert generator.code == 0


def test_roles_of_a_dead_node_are_lost(actor: Actor, host: Any, tmp_path: Path) -> None:
    learner = role("learner", 1, host, tmp_path)
    host.check(False, 2.0)
    assert learner.code == HOST_LOST
    assert learner.cause() == "learner-0@n1: its host is lost (Ray has declared its node dead)"
    assert actor.count("killed") == 1


def test_a_silent_host(actor: Actor, host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets no roles after 15 s, its kills are not waited for, and after 60 s it is lost."""
    learner, launcher, clock = role("learner", 0, host, tmp_path), RayLauncher(), SimpleNamespace(now_s=10.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.now_s)
    launcher._roles.append(learner)
    for clock.now_s, answers, code in ((10.0, True, None), (16.0, False, None), (61.0, False, HOST_LOST)):
        host.check(True, clock.now_s)
        assert (host.answers(), learner.code) == (answers, code)
        if clock.now_s == 16.0:
            assert launcher.kill([learner]) == [] and actor.count("kill") == 0
    assert host.lost == "it was silent for 60 s"


@pytest.mark.parametrize("is_silent", [False, True])
def test_roles_that_could_not_be_killed_are_killed_when_their_host_answers_again(
    actor: Actor, host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    generator, launcher = role("generator", 7, host, tmp_path), RayLauncher()
    launcher._roles.append(generator)
    monkeypatch.setattr("time.monotonic", lambda: 16.0 if is_silent else 1.0)
    monkeypatch.setattr(actor, "kill", SimpleNamespace(remote=lambda *_, **__: fails), raising=False)
    fails = Ref()
    fails.give(unavailable())
    assert launcher.kill([generator]) == []
    monkeypatch.delattr(actor, "kill")
    for _ in range(2):
        host.check(True, 17.0)
        actor.last("ping").give({})
    host.check(True, 18.0)
    assert [arguments for name, arguments, _ in actor.calls if name == "kill"] == [([7],)]


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


@pytest.mark.parametrize(
    ("bundle", "count", "free", "text"),
    [
        (
            {"CPU": 1},
            3,
            False,
            "3 nodes with 1 cores each are asked for; n1 has 0 of 4 cores free, n2",
        ),
        ({"CPU": 2, "GPU": 8}, 2, True, "2 nodes with 8 GPUs and 2 cores each are asked for; n1 has 0 of 8 GPUs and 0"),
    ],
)
def test_a_pool_that_cannot_be_had_is_refused_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, bundle: dict[str, float], count: int, free: bool, text: str
) -> None:
    """Finally, and after the wait for resources that others use."""
    from asyncrl.launch import ray_cluster as cluster

    resources = {"CPU": 4, "GPU": 8}
    nodes = {name: {"NodeManagerHostname": name, "Resources": resources} for name in ("n1", "n2")}
    monkeypatch.setattr(cluster, "alive_nodes", lambda: nodes)
    monkeypatch.setattr(cluster, "available_resources_per_node", lambda: {"n2": {"CPU": 2, "GPU": 8}})
    monkeypatch.setattr(cluster, "INFEASIBLE_S", 0.1)
    table = {"state": "PENDING", "stats": {"scheduling_state": "QUEUED"}}
    monkeypatch.setattr(cluster, "placement_group_table", lambda _: table)
    group = cluster.PoolGroup("gen", bundle, None, count, True, 0.0)  # type: ignore[arg-type]
    said: list[str] = []
    with pytest.raises(
        ConfigError, match=f"^placement.pools.gen: {text}.*: 1 nodes are missing; ask for less"
    ) as caught:
        group.wait(timeout_s=0.3, say=said.append)
    assert str(caught.value).endswith("(waited launch.start_timeout_s = 0.3 s)") == free and said == []


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
    ("named", "own", "head"),
    [
        ("127.0.0.1", "10.0.0.1", "10.0.0.1"),
        ("lo", "10.0.0.1", "10.0.0.1"),
        ("10.5.0.1:29500", "10.5.0.1", "10.5.0.1"),
        ("ib0:29500", "10.5.0.1", "ib0"),
        ("10.5.0.0/16", "10.5.0.1", "10.5.0.0/16"),
    ],
)
def test_nodes_are_asked_for_their_addresses_on_the_network_of_the_run(
    actor: Actor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str, own: str, head: str
) -> None:
    """A node without an address there is refused."""
    from asyncrl.launch import ray_cluster as module

    found = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.5.0.1"}
    addresses = {name: [SimpleNamespace(address=one, family=socket.AF_INET)] for name, one in found.items()}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: addresses)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    monkeypatch.setattr(module, "free_resources", lambda node: (1, 0))
    monkeypatch.setattr(module, "PoolActor", lambda *_: None)
    hosts = module.RayHosts(small_config(runs_dir=str(tmp_path), launch__address=named))
    assert (hosts.own_address, hosts.head) == (own, head)
    options = SimpleNamespace(remote=lambda *_: actor)
    monkeypatch.setattr(ray, "remote", lambda _: SimpleNamespace(options=lambda **_: options))
    for address in (own, "10.5.0.2"):
        one = hosts._start(module.Place("ab" * 28))
        assert actor.calls[-1][1][0] == head
        one.facts.give(HostFacts(Host("n", (0,), address=address), head, package_versions()))
        assert hosts._join(one, 0.0) == ""
    assert [(one.host.name, one.host.address) for one in hosts.all] == [("n", own), ("n-2", "10.5.0.2")]
    one = hosts._start(module.Place("cd" * 28))
    problem = "launch.address = 'ib0': n3 has none"
    one.facts.give(HostFacts(Host("n3", (0,), address=""), head, package_versions(), problem))
    assert hosts._join(one, 0.0) == f"{problem} (node cdcdcd)"
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


CORES = RoleResources(tuple(sorted(os.sched_getaffinity(0))), threads=1)
WAIT_S = 20.0
SHOWS = "import os, sys; print(sorted(n for n in os.environ if n.startswith(('RAY_', 'PASSED_'))), os.getppid()); "


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PoolActor:
    """An actor with Python code in place of the roles: that in `index`."""
    codes = {0: SHOWS + "sys.exit(7)", 1: "import time; time.sleep(600)"}
    monkeypatch.setattr(NodeLauncher, "command", lambda _, spec: [sys.executable, "-c", codes[spec.index]])
    monkeypatch.setenv("RAY_JOB_ID", "01000000")
    monkeypatch.chdir(tmp_path)
    return PoolActor(str(tmp_path), {"PASSED_ON": "1"})


def spec(index: int, folder: Path) -> RoleSpec:
    return RoleSpec("generator", index, str(folder), loopback_endpoints(1), (), 8, host="n1")


def do(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, WAIT_S))


def test_roles_are_its_children_and_know_nothing_of_ray(real: PoolActor, tmp_path: Path) -> None:
    code, cause = do(real.run(0, spec(0, tmp_path), CORES))
    assert code == 7
    assert cause == f"generator-0@n1 ended with code 7: ['PASSED_ON'] {os.getpid()}"
    assert do(real.run(0, spec(0, tmp_path), CORES))[0] == 7, "asking again starts nothing"


def test_roles_are_killed_also_before_they_start(real: PoolActor, tmp_path: Path) -> None:
    async def kill() -> tuple[Any, ...]:
        running = asyncio.create_task(real.run(0, spec(1, tmp_path), CORES))
        await asyncio.sleep(0.1)
        immortal = await real.kill([0, 1], show_stacks=False)
        return immortal, await running, await real.run(1, spec(1, tmp_path), CORES)

    immortal, killed, never = do(kill())
    assert immortal == []
    assert killed == (-signal.SIGKILL, "generator-1@n1 was killed by signal SIGKILL")
    assert never == (-signal.SIGKILL, "generator-1@n1 was killed before it started")


def test_its_address_is_the_one_on_the_network_of_the_run(
    real: PoolActor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it has none, it says so. It has the same packages as other hosts."""
    context = types.SimpleNamespace(get_accelerator_ids=dict)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr("platform.node", lambda: "n2")
    token = tmp_path / "token"
    token.touch()
    told = [do(real.describe(head, str(token))) for head in ("127.0.0.1", "lo", "127.0.0.0/8", "none0")]
    assert [facts.host.address for facts in told] == ["127.0.0.1", "127.0.0.1", "127.0.0.1", ""]
    assert [facts.refusal for facts in told[:3]] == [""] * 3
    assert f"n2 does not share {tmp_path}; set runs_dir to" in do(real.describe("lo", str(tmp_path / "other"))).problem
    assert told[3].problem.startswith("launch.address = 'none0': n2 has no interface of this name; it has lo (")


@pytest.mark.slow
def test_a_cluster_of_its_own(tmp_path: Path) -> None:
    """It is started because there is none, its actor starts roles and says how they ended, and it ends with the
    launcher."""
    if any(one.info["name"] == "gcs_server" for one in psutil.process_iter(["name"])):
        pytest.skip("a Ray cluster runs on this machine, which the launcher would take")
    short = tempfile.mkdtemp(prefix="ray-")  # the paths of Ray's sockets have little room
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.helpers.ray_launcher", str(tmp_path)],
            env=environment | {"RAY_TMPDIR": short},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    finally:
        left = [one for one in psutil.process_iter(["cmdline"]) if short in " ".join(one.info["cmdline"] or ())]
        for process in left:
            process.kill()
        shutil.rmtree(short, ignore_errors=True)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    own, only, name = seen["hosts"]
    assert (own, only) == ("", True) and name
    assert seen["left"] == []
    code, cause = seen["ended"]
    assert code not in (None, 0) and cause.startswith(f"generator-0@{name} ended with code") and "config.yaml" in cause
    assert seen["told"]["cluster"].startswith("Ray on this machine alone, started for this run")
    assert seen["files"] == ["logs"], "no token file is left"
    assert [process for process in left if process.name() != "python"] == []
