"""The supervisor on several hosts: a lost host is not a dead run, its roles start where there is room."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import RunError
from asyncrl.launch.launcher import HOST_LOST, Launcher, RoleHandle
from asyncrl.launch.placement import Host, RoleResources, place_roles
from asyncrl.launch.supervisor import LOCAL_RUNS, Supervisor
from asyncrl.launch.worker import RoleSpec
from tests.helpers.replay import loopback_endpoints, small_config

CONFIG = small_config(launch__generators=2, launch__learners=1, launch__start_timeout_s=60.0)


class FakeRole:
    """A role on a host of the test."""

    def __init__(self, spec: RoleSpec, resources: RoleResources, lost: set[str]) -> None:
        self.spec, self.resources, self._lost = spec, resources, lost
        self.place, self.name = "process 1", spec.label

    @property
    def code(self) -> int | None:
        return HOST_LOST if self.spec.host in self._lost else None

    def cause(self) -> str:
        return f"{self.name}: its host is lost"


class FakeHosts(Launcher):
    """Three hosts with 2 cores each, of which the test may lose some, and one that does not share the run folder."""

    def __init__(self) -> None:
        self.all = [Host(name, (0, 1), address=f"10.0.0.{place}") for place, name in enumerate(("", "n1", "n2"))]
        self.lost: set[str] = set()
        self.started: list[FakeRole] = []
        self.wanted: list[int] = []
        self.waits_for = ""
        self.asked = 0

    def hosts(self) -> list[Host]:
        self.asked += 1
        return [host for host in self.all if host.name not in self.lost]

    def start(self, spec: RoleSpec, resources: RoleResources) -> RoleHandle:
        self.started.append(FakeRole(spec, resources, self.lost))
        return self.started[-1]

    def wait(self, roles: Any, timeout_s: float) -> list[RoleHandle]:
        return []

    def kill(self, roles: Any, *, show_stacks: bool = False) -> list[RoleHandle]:
        return []

    def end(self, *, grace_s: float) -> list[RoleHandle]:
        return []

    def resize(self, generators: int) -> str:
        self.wanted.append(generators)
        return self.waits_for

    def last(self, name: str) -> FakeRole:
        return next(role for role in reversed(self.started) if role.spec.name == name)


class FakeQueue:
    """Takes what the supervisor tells the replay queue."""

    def __init__(self) -> None:
        self.lost_generators: list[int] = []
        self.wanted: list[int] = []

    def lost(self, index: int) -> None:
        self.lost_generators.append(index)

    def scale(self, generators: int) -> None:
        self.wanted.append(generators)


@pytest.fixture
def launcher() -> FakeHosts:
    return FakeHosts()


@pytest.fixture
def said() -> list[str]:
    return []


Tick = Callable[[float], None]


@pytest.fixture
def supervisor(launcher: FakeHosts, said: list[str], tmp_path: Path) -> Iterator[Supervisor]:
    placement = place_roles(CONFIG, hosts=launcher.hosts())
    spec = RoleSpec("", 0, str(tmp_path), loopback_endpoints(1), (), 8)
    yield Supervisor(CONFIG, placement, spec, launcher, FakeQueue(), say=said.append)  # type: ignore[arg-type]


def test_each_role_is_told_the_address_of_its_host(supervisor: Supervisor, launcher: FakeHosts) -> None:
    supervisor.tick(0.0)
    told = {role.spec.name: (role.spec.host, role.spec.endpoints.host) for role in launcher.started}
    assert told == {
        "replay": ("", "127.0.0.1"),
        "learner-0": ("", "127.0.0.1"),
        "generator-0": ("n1", "10.0.0.1"),
        "generator-1": ("n2", "10.0.0.2"),
    }
    assert launcher.last("generator-1").name == "generator-1@n2"


def test_roles_of_a_lost_host_start_on_another_one(
    supervisor: Supervisor, launcher: FakeHosts, said: list[str]
) -> None:
    supervisor.tick(0.0)
    launcher.lost.add("n2")
    supervisor.tick(1.0)
    moved = launcher.last("generator-1").spec
    assert (moved.host, moved.endpoints.host, moved.start) == ("n1", "10.0.0.1", 1)
    assert any("generator-1@n2: its host is lost; restart 1" in text for text in said), said
    assert "generator-1 moves from n2 to n1" in said
    assert [role.spec.name for role in launcher.started].count("generator-0") == 1, "the others stay"


def test_a_role_that_moves_to_the_launchers_host_gets_its_address_and_the_run_folder(
    launcher: FakeHosts, tmp_path: Path
) -> None:
    launcher.all[2] = Host("n2", (0, 1), address="10.0.0.2", shares_run_dir=False)
    spec = RoleSpec("", 0, str(tmp_path), loopback_endpoints(1), (), 8)
    placement = place_roles(CONFIG, hosts=launcher.hosts())
    supervisor = Supervisor(CONFIG, placement, spec, launcher, FakeQueue(), say=lambda _: None)  # type: ignore[arg-type]
    supervisor.tick(0.0)
    assert launcher.last("generator-1").spec.run_dir == f"{LOCAL_RUNS}/run"
    launcher.lost |= {"n1", "n2"}
    supervisor.tick(1.0)
    moved = launcher.last("generator-1").spec
    assert (moved.host, moved.endpoints.host, moved.run_dir, moved.config) == ("", "127.0.0.1", str(tmp_path), "")


def test_hosts_are_asked_for_once_for_all_roles_that_are_placed(launcher: FakeHosts, tmp_path: Path) -> None:
    placement = place_roles(CONFIG, hosts=launcher.hosts())
    spec = RoleSpec("", 0, str(tmp_path), loopback_endpoints(1), (), 8)
    launcher.asked = 0
    supervisor = Supervisor(CONFIG, placement, spec, launcher, FakeQueue(), say=lambda _: None)  # type: ignore[arg-type]
    assert launcher.asked == 1
    supervisor.tick(0.0)
    launcher.asked = 0
    supervisor._join([2, 3], 4)
    assert launcher.asked == 1


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_host_that_is_lost_while_the_run_starts_does_not_end_it(
    launcher: FakeHosts, tmp_path: Path, comes_back: bool
) -> None:
    placement = place_roles(CONFIG, hosts=launcher.hosts())
    spec = RoleSpec("", 0, str(tmp_path), loopback_endpoints(1), (), 8)
    launcher.lost = {"n2"}
    supervisor = Supervisor(CONFIG, placement, spec, launcher, FakeQueue(), say=lambda _: None)  # type: ignore[arg-type]
    if comes_back:
        launcher.lost.clear()
    supervisor.tick(0.0)
    started = launcher.last("generator-1").spec
    assert (started.host, started.endpoints.host) == (("n2", "10.0.0.2") if comes_back else ("n1", "10.0.0.1"))


def test_the_next_start_of_the_learner_has_another_epoch(launcher: FakeHosts, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"placement": small_config(**POOL).placement})
    for host in launcher.all[1:]:
        object.__setattr__(host, "pool", "a")
    spec = RoleSpec("", 0, str(tmp_path), loopback_endpoints(1), (), 8)
    placement = place_roles(config, hosts=launcher.hosts())
    supervisor = Supervisor(config, placement, spec, launcher, FakeQueue(), say=lambda _: None)  # type: ignore[arg-type]
    supervisor.tick(0.0)
    first = launcher.last("learner-0").spec
    launcher.lost.add(first.host)
    supervisor.tick(1.0)
    supervisor.tick(3.0)  # the other ranks have a second to report the cause
    supervisor.tick(5.0)
    second = launcher.last("learner-0").spec
    assert second.host != first.host
    assert (first.endpoints.epoch, second.endpoints.epoch) == (0, 1)
    supervisor.restart(supervisor.replay, "test", 6.0)
    supervisor.tick(7.0)
    assert (launcher.last("replay").spec.start, launcher.last("replay").spec.endpoints.epoch) == (1, 0)


POOL = {"placement__pools": {"a": {"nodes": 2}}, "placement__roles": {"generator": "a", "learner": "a"}}


def test_a_role_waits_for_room_and_says_so_and_the_run_fails_when_none_comes(
    launcher: FakeHosts, said: list[str], tmp_path: Path
) -> None:
    config = CONFIG.model_copy(update={"placement": small_config(**POOL).placement})
    for host in launcher.all[1:]:
        object.__setattr__(host, "pool", "a")
    spec = RoleSpec("", 0, str(tmp_path), loopback_endpoints(1), (), 8)
    placement = place_roles(config, hosts=launcher.hosts())
    supervisor = Supervisor(config, placement, spec, launcher, FakeQueue(), say=said.append)  # type: ignore[arg-type]
    supervisor.tick(0.0)
    launcher.lost |= {"n1", "n2"}
    for now_s in (1.0, 3.0, 5.0, 20.0):
        supervisor.tick(now_s)
    assert sum("no host has room for generator-0, whose host n" in text for text in said) == 1, said
    with pytest.raises(RunError, match=r"no host had room for .*, within launch.start_timeout_s = 60 s$"):
        for now_s in range(30, 200, 10):
            supervisor.tick(float(now_s))


def test_learner_ranks_do_not_move_to_a_host_without_the_run_folder(
    launcher: FakeHosts, said: list[str], tmp_path: Path
) -> None:
    launcher.all[0] = Host("", (0, 1), replay_only=True)
    spec = RoleSpec("", 0, str(tmp_path), loopback_endpoints(1), (), 8)
    placement = place_roles(CONFIG, hosts=launcher.hosts())
    supervisor = Supervisor(CONFIG, placement, spec, launcher, FakeQueue(), say=said.append)  # type: ignore[arg-type]
    supervisor.tick(0.0)
    assert launcher.last("learner-0").spec.host == "n1"
    launcher.lost |= {"n1", "n2"}
    launcher.all.append(Host("n3", (0, 1), address="10.0.0.3", shares_run_dir=False))
    for now_s in (1.0, 3.0, 5.0):
        supervisor.tick(now_s)
    assert launcher.last("generator-0").spec.host == "n3", "generators need no run folder"
    folder = rf"run folder {CONFIG.run_dir.absolute()}, to which learner and critic ranks write checkpoints"
    problem = rf"learner-0, whose host n1 is lost.* \(n3 would have room, but does not share the {folder}; set runs_dir"
    assert [text for text in said if re.search(rf"no host has room for {problem}.*; waiting for one", text)], said
    with pytest.raises(RunError, match=rf"no host had room for {problem}"):
        supervisor.tick(70.0)
    launcher.lost.remove("n2")
    supervisor.tick(80.0)
    assert launcher.last("learner-0").spec.host == "n2"


def test_a_host_that_does_not_share_the_folder_gets_the_config(supervisor: Supervisor, launcher: FakeHosts) -> None:
    launcher.all[2] = Host("n3", (0, 1), address="10.0.0.3", shares_run_dir=False)
    supervisor.tick(0.0)
    launcher.lost |= {"n1", "n2"}
    supervisor.tick(1.0)
    moved = launcher.last("generator-1").spec
    assert moved.host in ("", "n3")
    apart = next(role.spec for role in launcher.started if role.spec.host == "n3")
    assert apart.run_dir == f"{LOCAL_RUNS}/run" and "group_size" in apart.config


def test_a_joining_generator_gets_the_least_loaded_host(supervisor: Supervisor, launcher: FakeHosts) -> None:
    supervisor.tick(0.0)
    status = {"done": False, "generators_wanted": 2, "generators": {}, "learners": {}, "step": 0}
    supervisor.update(status, 1.0)
    launcher.all.append(Host("n3", (0, 1), address="10.0.0.3"))
    supervisor.update(status | {"generators_wanted": 3}, 2.0)
    supervisor.tick(3.0)
    assert launcher.wanted == [3] and launcher.last("generator-2").spec.host == "n3"


def test_a_joining_generator_waits_for_a_host_that_is_asked_for(
    supervisor: Supervisor, launcher: FakeHosts, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.launch.supervisor.find_room", lambda *_: None)
    queue: FakeQueue = supervisor._client  # type: ignore[assignment]
    status = {"done": False, "generators_wanted": 2, "generators": {}, "learners": {}, "step": 0}
    supervisor.tick(0.0)
    supervisor.update(status, 1.0)
    launcher.waits_for = "1 GPUs in pool gen"
    for now_s in (2.0, 3.0):
        supervisor.update(status | {"generators_wanted": 3}, now_s)
    assert (said, queue.wanted) == (["waiting for 1 GPUs in pool gen"], [])
    launcher.waits_for = ""
    supervisor.update(status | {"generators_wanted": 3}, 4.0)
    assert said[1:] == ["no more generators: no host has a free GPU for a generator"] and queue.wanted == [2]
