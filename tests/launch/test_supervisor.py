"""Supervision of real processes that replace the roles, of hosts, and of progress; the test sets the time."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.config import Config
from asyncrl.errors import PeerTimeoutError, RunError
from asyncrl.launch import launcher as local
from asyncrl.launch import machine as gpus
from asyncrl.launch.launcher import HOST_LOST, Launcher, LocalLauncher, RoleHandle
from asyncrl.launch.machine import Host
from asyncrl.launch.placement import RoleResources, place_roles
from asyncrl.launch.supervisor import GRACE_S, Progress, RestartHistory, RoleGroup, Supervisor
from asyncrl.launch.worker import RoleSpec
from tests.helpers.replay import loopback_endpoints, small_config

pytestmark = pytest.mark.timeout(240)

SLEEP = "import time; time.sleep(600)"


class StandIns(LocalLauncher):
    """A launcher that starts Python code instead of each role, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.code: dict[str, str] = {}

    def command(self, spec: RoleSpec) -> list[str]:
        return [sys.executable, "-c", self.code.get(spec.name, SLEEP)]


class ScriptedQueue:
    """A fake of the replay queue's client, with the requests that the launcher sends."""

    def __init__(self) -> None:
        self.lost_generators: list[int] = []
        self.wanted: list[int] = []
        self.silent = False

    def lost(self, index: int) -> None:
        if self.silent:
            raise PeerTimeoutError("the replay queue did not answer")
        self.lost_generators.append(index)

    def scale(self, generators: int) -> None:
        self.wanted.append(generators)


class Stage:
    """A supervisor, its processes, and a clock set by the test."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.launcher, self.queue, self.said = StandIns(), ScriptedQueue(), list[str]()
        self.now_s = 1000.0
        spec = RoleSpec("", 0, str(folder), loopback_endpoints(1), (), 8)
        placement = place_roles(config)
        self.supervisor = Supervisor(config, placement, spec, self.launcher, self.queue, say=self.said.append)  # type: ignore[arg-type]
        self.supervisor.tick(self.now_s)

    def status(self, **told: Any) -> dict[str, Any]:
        generators = self.heard(
            **{group.name: 0.0 for group in self.supervisor.generators if group.restart_at_s is None}
        )
        status = {
            "done": False, "generators_wanted": self.config.launch.generators, "generators": generators,
            "learners": dict.fromkeys(map(str, range(self.config.launch.learners)), 0.0), "step": 0,
        }  # fmt: skip
        return status | told

    def heard(self, *, former: bool = False, **ago_s: float) -> dict[str, Any]:
        """Returns the status of generators with the seconds since their last heartbeat, in their latest start or the
        one before it."""
        told: dict[str, Any] = {}
        for name, seconds in ago_s.items():
            index = name.removeprefix("generator-").removeprefix("g")
            start = self.group(f"generator-{index}").starts - former
            told[index] = {"heard_ago_s": seconds, "session": f"session-{start}"}
        return told

    def hear(self, after_s: float = 1.0, **told: Any) -> None:
        self.now_s += after_s
        self.supervisor.update(self.status(**told), self.now_s)

    def tick(self, after_s: float = 0.1) -> None:
        self.now_s += after_s
        self.supervisor.tick(self.now_s)

    def group(self, name: str) -> RoleGroup:
        groups = [self.supervisor.learners, self.supervisor.replay, *self.supervisor.generators]
        return next(group for group in groups if group.name == name)

    def pids(self, name: str) -> list[int]:
        return [role.process.pid for role in self.group(name).processes]

    def await_end(self, name: str, rank: int = 0) -> None:
        self.group(name).processes[rank].process.wait(30)

    def run_code(self, name: str, code: str) -> None:
        """Restarts the only process of a group with this code, and waits for its end."""
        self.launcher.code[name] = code
        self.supervisor.restart(self.group(name), "test", self.now_s)
        self.tick(100)
        self.await_end(name)

    def kill(self, name: str, rank: int = 0) -> None:
        os.kill(self.pids(name)[rank], signal.SIGKILL)
        self.await_end(name, rank)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def make(**settings: object) -> Stage:
        made.append(Stage(small_config(**{"launch__generators": 2, "launch__learners": 2} | settings), tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.launcher.end(grace_s=0)


Make = Callable[..., Stage]


def test_only_the_dead_generator_is_reported_and_restarted(stage: Make) -> None:
    one = stage()
    one.hear()
    before = {name: one.pids(name) for name in ("generator-0", "replay", "learner")}
    one.kill("generator-1")
    one.tick()
    assert one.queue.lost_generators == [1]
    assert one.said == ["generator-1 was killed by signal SIGKILL; restart 1 in 0 s"]
    assert one.group("generator-1").running
    assert one.group("generator-1").processes[0].spec.start == 1
    assert {name: one.pids(name) for name in before} == before
    assert one.supervisor.restarts == {"generator": 1, "replay": 0, "learner": 0, "reward_model": 0}


def test_second_death_waits_and_one_after_a_step_does_not(stage: Make) -> None:
    one = stage()
    one.hear()
    one.kill("generator-0")
    one.tick()
    one.kill("generator-0")
    one.tick()
    assert one.said[-1].endswith("restart 2 in 1 s")
    assert not one.group("generator-0").running
    one.tick(1.0)
    assert one.group("generator-0").running
    one.hear(step=1)
    one.kill("generator-0")
    one.tick()
    assert one.said[-1].endswith("restart 3 in 0 s")


def test_too_many_restarts_end_the_run_with_the_cause(stage: Make) -> None:
    one = stage(launch__max_restarts=1)
    one.hear()
    one.kill("generator-0")
    one.tick()
    one.kill("generator-0")
    with pytest.raises(RunError, match=r"generator-0 was killed by signal SIGKILL; it was restarted 1 times within"):
        one.tick()


def crash(said: str, code: int = 4) -> str:
    return f"import sys; print({said!r}); sys.exit({code})"


def fall(one: Stage, *codes: str) -> None:
    """Starts generator-0 with each code in turn; each start ends by itself."""
    one.run_code("generator-0", codes[0])
    for code in codes[1:]:
        one.launcher.code["generator-0"] = code
        one.tick()
        one.tick(100)
        one.await_end("generator-0")
    one.tick()


def test_same_crash_twice_before_it_ever_worked_is_final(stage: Make) -> None:
    first, second = crash("out of memory: 17 MiB left, at 0x7f12ab"), crash("out of memory: 9 MiB left, at 0x1200")
    with pytest.raises(RunError, match=r"^generator-0 ended with code 4: out of memory: 9 MiB .*; it has never worked"):
        fall(stage(), first, second)


@pytest.mark.parametrize(
    "codes",
    [
        [crash("one cause"), crash("another cause")],
        [crash("no answer", 3), crash("no answer", 3)],
        ["import os; os.kill(os.getpid(), 9)"] * 2,
    ],
)
def test_other_ends_of_a_role_that_never_worked_are_restarted(stage: Make, codes: list[str]) -> None:
    one = stage()
    fall(one, *codes)
    assert one.said[-1].endswith("; restart 3 in 2 s")


def end_learner(one: Stage, *, step: int) -> None:
    """Starts the only learner rank, long after its last end, and lets it end by itself at this step."""
    one.tick(1000)
    one.await_end("learner")
    one.hear(step=step)
    one.tick()
    one.tick(GRACE_S + 0.1)


@pytest.mark.parametrize("end", [crash("a row above the embedding"), "import os; os.kill(os.getpid(), 9)"])
def test_ends_at_the_same_step_end_the_run_however_slowly_they_come(stage: Make, end: str) -> None:
    one = stage(launch__learners=1, launch__max_restarts=5)
    one.hear()
    one.launcher.code["learner-0"] = end
    one.supervisor.restart(one.supervisor.learners, "test", one.now_s)
    for _ in range(5):
        end_learner(one, step=3)
    assert one.supervisor.restarts["learner"] == 6
    with pytest.raises(RunError, match=r"^learner-0 .*; it was restarted 5 times .*, or without an optimizer step"):
        end_learner(one, step=3)


def test_of_ranks_that_end_together_the_one_that_failed_is_the_cause(stage: Make) -> None:
    one = stage()
    one.hear()
    one.launcher.code |= {"learner-0": crash("another rank stopped", 3), "learner-1": crash("index out of range")}
    one.supervisor.restart(one.supervisor.learners, "test", one.now_s)
    one.tick(100)
    for rank in range(2):
        one.await_end("learner", rank)
    one.tick()
    one.tick(GRACE_S + 0.1)
    assert one.said[-1].startswith("learner-1 ended with code 4: index out of range; restart 2")


def test_process_that_does_not_die_is_named_and_left_behind(stage: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "KILL_S", 0.2)
    one = stage()
    one.hear()
    stuck = one.group("generator-1").processes[0]
    kill_group = LocalLauncher._kill_group
    monkeypatch.setattr(
        LocalLauncher, "_kill_group", staticmethod(lambda role: None if role is stuck else kill_group(role))
    )
    one.supervisor.restart(one.group("generator-1"), "it hangs", one.now_s)
    try:
        assert one.said == [
            f"generator-1 (process {stuck.process.pid}) could not be killed (SIGKILL) and was left running",
            "it hangs; restart 1 in 0 s",
        ]
        one.tick()
        assert one.group("generator-1").running
        assert one.queue.lost_generators == [1]
    finally:
        kill_group(stuck)
        stuck.process.wait(30)


def test_learner_ranks_are_restarted_together(stage: Make) -> None:
    one = stage()
    one.hear()
    before = one.pids("learner")
    one.kill("learner", rank=1)
    one.tick()
    assert one.pids("learner") == before, "another rank may still log the cause"
    one.tick(GRACE_S)
    assert len(set(one.pids("learner")) - set(before)) == 2
    assert not Path(f"/proc/{before[0]}").exists()
    assert one.supervisor.restarts["learner"] == 1
    assert one.supervisor.restarts["generator"] == 0


def test_cause_is_of_the_latest_start(stage: Make, tmp_path: Path) -> None:
    one = stage()
    one.hear()
    for number in (1, 2):
        text = '{"level": "error", "error": "cause 1"}' if number == 1 else ""
        file = tmp_path / "logs" / "generator-0.jsonl"
        one.run_code("generator-0", f"import sys; open({str(file)!r}, 'a').write({text!r} + chr(10)); sys.exit(4)")
        one.tick()
    assert [said.partition(";")[0] for said in one.said if "code 4" in said] == [
        "generator-0 ended with code 4: cause 1",
        "generator-0 ended with code 4: no output",
    ]


def test_silent_generator_is_killed_once_it_was_heard(stage: Make) -> None:
    one = stage(launch__heartbeat_timeout_s=10, launch__start_timeout_s=100)
    one.hear()
    frozen = one.pids("generator-1")[0]
    os.kill(frozen, signal.SIGSTOP)
    one.hear(9.0, generators=one.heard(g0=0.0, g1=9.0))
    assert one.pids("generator-1") == [frozen]
    one.hear(3.0, generators=one.heard(g0=0.0, g1=12.0))
    assert one.said == ["generator-1 sent no heartbeat for launch.heartbeat_timeout_s = 10 s; restart 1 in 0 s"]
    assert not Path(f"/proc/{frozen}").exists()
    one.tick()
    # The queue may still have the old process: a heartbeat from before this start does not count.
    one.hear(50.0, generators=one.heard(g0=0.0, g1=62.0))
    assert len(one.said) == 1
    one.hear(51.0, generators=one.heard(g0=0.0))
    assert one.said[-1] == "generator-1 sent no heartbeat for launch.start_timeout_s = 100 s; restart 2 in 1 s"


def test_a_generator_that_builds_its_engine_is_told_from_one_that_does_not_come_up(stage: Make, tmp_path: Path) -> None:
    one = stage(launch__start_timeout_s=200)
    began = datetime.now(UTC) - timedelta(seconds=50)
    build = {"event": "starts", "doing": "building its engine", "timestamp": began.isoformat()}
    log = tmp_path / "logs" / "generator-0.jsonl"
    log.write_text("".join(json.dumps(event) + "\n" for event in ({"event": "started"}, build, {"event": "joins"})))
    for after_s in (1.0, 58.0):
        one.hear(after_s, generators={})
    assert one.said == []
    one.hear(2.0, generators={})
    limit = r"\(limit: launch.start_timeout_s = 200 s\)"
    has_been = r"it has been building its engine for 5\d s"
    assert re.fullmatch(rf"generator-0 is not up 61 s after its start; {has_been} {limit}", one.said[0])
    assert re.fullmatch(rf"generator-1 is not up 61 s after its start {limit}", one.said[1])
    one.hear(59.0, generators={})
    assert len(one.said) == 2
    one.kill("generator-1")
    one.tick()
    assert one.said[2:] == ["generator-1 was killed by signal SIGKILL; restart 1 in 0 s"]
    one.tick()
    one.hear(81.0, generators=one.heard(g1=0.0))
    assert re.match(
        rf"generator-0 sent no heartbeat for launch.start_timeout_s = 200 s; {has_been}; restart 1", one.said[-1]
    )
    with log.open("a") as file:
        file.write(json.dumps({"event": "started"}) + "\n")
    one.tick()
    one.hear(61.0, generators=one.heard(g1=0.0))
    assert one.said[-1] == "generator-0 is not up 61 s after its start (limit: launch.start_timeout_s = 200 s)"


def test_no_role_is_blamed_for_the_time_that_the_queue_was_down(stage: Make) -> None:
    one = stage(launch__heartbeat_timeout_s=10)
    one.hear()
    one.now_s += 100
    one.kill("replay")
    one.tick()
    assert one.supervisor.answering_s is None
    one.hear(100.0, generators={})
    one.hear(9.0, generators={})
    assert one.supervisor.restarts["generator"] == 0
    one.hear(2.0, generators={})
    assert one.supervisor.restarts["generator"] == 2


def test_generator_that_starts_is_not_up_since_a_restarted_queue_knew_the_one_before(stage: Make) -> None:
    one = stage(launch__heartbeat_timeout_s=10, launch__start_timeout_s=100)
    one.hear()
    one.kill("generator-1")
    one.tick()
    known = one.heard(g0=0.0) | one.heard(former=True, g1=0.0)
    one.hear(5.0, generators=known)
    one.hear(30.0, generators=one.heard(g0=0.0))
    assert one.supervisor.restarts["generator"] == 1
    assert one.supervisor.missing == ["generator-1"]


def test_queue_that_does_not_answer_is_killed(stage: Make) -> None:
    one = stage(launch__heartbeat_timeout_s=10, launch__start_timeout_s=100)
    one.supervisor.miss(one.now_s + 50)
    assert one.said == []
    one.hear(60.0)
    before = one.pids("replay")
    os.kill(before[0], signal.SIGSTOP)
    one.supervisor.miss(one.now_s + 11)
    one.tick()
    assert one.said == ["replay did not answer within launch.heartbeat_timeout_s = 10 s; restart 1 in 0 s"]
    assert one.pids("replay") != before


def test_lost_generator_is_reported_when_the_queue_is_back(stage: Make) -> None:
    one = stage()
    one.hear()
    one.queue.silent = True
    one.kill("generator-0")
    one.tick()
    one.queue.silent = False
    one.hear(generators=one.heard(g1=0.0))
    assert one.queue.lost_generators == [0]
    one.hear()
    assert one.queue.lost_generators == [0]


def test_wanted_generators_join_and_leave(stage: Make) -> None:
    one = stage()
    one.hear()
    before = one.pids("generator-0")
    one.hear(generators_wanted=3)
    one.tick()
    assert [group.name for group in one.supervisor.generators] == ["generator-0", "generator-1", "generator-2"]
    assert one.pids("generator-0") == before
    assert one.group("generator-2").processes[0].spec.cpus
    one.run_code("generator-2", "pass")
    one.tick()
    one.hear(generators_wanted=2)  # the queue may receive the change before the launcher
    one.tick()
    assert [group.index for group in one.supervisor.generators] == [0, 1]
    assert one.said[-1] == "generator-2 has left"
    assert one.queue.lost_generators[-1] == 2
    assert one.supervisor.restarts["generator"] == 1


def test_generator_that_does_not_leave_is_killed(stage: Make) -> None:
    one = stage(launch__stop_timeout_s=5)
    one.hear()
    one.hear(generators_wanted=1)
    pid = one.pids("generator-1")[0]
    one.hear(9.0, generators_wanted=1)
    assert Path(f"/proc/{pid}").exists()
    one.hear(3.0, generators_wanted=1)
    assert not Path(f"/proc/{pid}").exists()
    assert [group.index for group in one.supervisor.generators] == [0]


def test_number_of_the_config_counts_at_the_start_of_a_launch(stage: Make) -> None:
    one = stage()
    one.hear(generators_wanted=4)
    assert one.queue.wanted == [2]
    assert len(one.supervisor.generators) == 2


def test_generators_are_not_missed_at_the_end(stage: Make) -> None:
    one = stage()
    one.hear()
    one.hear(done=True)
    one.kill("generator-0")
    one.tick()
    assert (one.said, [group.index for group in one.supervisor.generators]) == ([], [1])
    one.kill("replay")
    one.tick()
    assert one.group("replay").running, "it writes the summary"


def test_generators_that_the_last_status_has_heard_end_by_themselves(stage: Make) -> None:
    one = stage()
    one.hear(done=True, generators=one.heard(g1=0.0))
    one.supervisor.end_generation()
    assert [group.index for group in one.supervisor.generators] == [1]
    assert one.group("generator-1").running


def test_generator_that_ends_before_the_run_is_restarted(stage: Make) -> None:
    one = stage()
    one.hear()
    one.run_code("generator-0", "pass")
    one.tick()
    assert len(one.said) == 1, "only a status shows whether it was allowed to end"
    one.hear()
    one.tick()
    assert one.said[-1] == "generator-0 ended before the run did; restart 2 in 1 s"


def test_learners_that_are_never_heard_are_restarted(stage: Make) -> None:
    one = stage(launch__start_timeout_s=20)
    one.hear(learners={})
    assert "learner" in one.supervisor.missing
    one.hear(22.0, learners={"0": 1.0})
    assert one.said == ["learner sent no heartbeat for launch.start_timeout_s = 20 s; restart 1 in 0 s"]
    one.tick()
    one.hear(5.0)
    assert one.supervisor.missing == []


def test_learners_that_ended_well_have_ended(stage: Make) -> None:
    one = stage(launch__learners=1)
    one.launcher.code["learner-0"] = "pass"
    assert not one.supervisor.learners_ended
    one.supervisor.restart(one.supervisor.learners, "test", one.now_s)
    one.tick()
    one.await_end("learner")
    deadline_s = time.monotonic() + 30
    while not one.supervisor.learners_ended and time.monotonic() < deadline_s:
        time.sleep(0.01)
    one.tick()
    assert one.supervisor.learners_ended


def test_a_generator_without_a_separate_gpu_is_refused_and_the_others_continue(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(gpus, "torch_is_cpu_build", lambda: False)
    monkeypatch.setattr(gpus, "_listed_gpus", lambda: None)
    run = stage(launch__generators=1)
    run.hear()
    run.hear(generators_wanted=3)
    assert run.said[-1] == "no more generators: no host has a free GPU for one"
    assert run.queue.wanted == [2]
    run.hear(generators_wanted=2)
    run.tick()
    assert [group.name for group in run.supervisor.generators if group.running] == ["generator-0", "generator-1"]


def test_a_generator_that_left_returns_to_the_gpu_that_it_shares(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(gpus, "torch_is_cpu_build", lambda: False)
    monkeypatch.setattr(gpus, "_listed_gpus", lambda: None)
    run = stage(launch__colocate="on", generator__engine="transformers")
    first = [run.group(f"generator-{index}").members[0][1] for index in range(2)]
    run.hear()
    run.hear(generators_wanted=1)
    run.supervisor._forget(run.group("generator-1"))
    run.hear(generators_wanted=3)
    assert run.queue.wanted == [2], "a third one has no GPU"
    run.hear(generators_wanted=2)
    run.tick()
    assert [group.members[0][1] for group in run.supervisor.generators if group.running] == first


CONFIG = small_config(launch__generators=2, launch__learners=1, launch__start_timeout_s=60.0)


POOL = {"placement__pools": {"a": {"nodes": 2}}, "placement__roles": {"generator": "a", "learner": "a"}}


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
    """Three hosts with 2 cores each, of which the test may lose some."""

    def __init__(self) -> None:
        self.all = [Host(name, (0, 1), address=f"10.0.0.{place}") for place, name in enumerate(("", "n1", "n2"))]
        self.lost: set[str] = set()
        self.started: list[FakeRole] = []
        self.wanted: list[int] = []
        self.waits_for = ""

    def hosts(self) -> list[Host]:
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


@pytest.fixture
def launcher() -> FakeHosts:
    return FakeHosts()


@pytest.fixture
def said() -> list[str]:
    return []


Supervise = Callable[..., Supervisor]


@pytest.fixture
def supervise(launcher: FakeHosts, said: list[str], tmp_path: Path) -> Supervise:
    """Makes the supervisor of a run on the hosts that are there, with the learner in their pool if `in_pool`."""

    def make(*, in_pool: bool = False) -> Supervisor:
        config = CONFIG
        if in_pool:
            config = CONFIG.model_copy(update={"placement": small_config(**POOL).placement})
            launcher.all[1:] = [replace(host, pool="a") for host in launcher.all[1:]]
        placement = place_roles(config, hosts=launcher.hosts())
        spec = RoleSpec("", 0, str(tmp_path), loopback_endpoints(1), (), 8)
        return Supervisor(config, placement, spec, launcher, ScriptedQueue(), say=said.append)  # type: ignore[arg-type]

    return make


@pytest.fixture
def supervisor(supervise: Supervise) -> Supervisor:
    return supervise()


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


def test_a_role_that_moves_to_the_launchers_host_gets_its_address(launcher: FakeHosts, supervise: Supervise) -> None:
    supervisor = supervise()
    supervisor.tick(0.0)
    launcher.lost |= {"n1", "n2"}
    supervisor.tick(1.0)
    moved = launcher.last("generator-1").spec
    assert (moved.host, moved.endpoints.host) == ("", "127.0.0.1")


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_host_that_is_lost_while_the_run_starts_does_not_end_it(
    launcher: FakeHosts, tmp_path: Path, comes_back: bool
) -> None:
    placement = place_roles(CONFIG, hosts=launcher.hosts())
    spec = RoleSpec("", 0, str(tmp_path), loopback_endpoints(1), (), 8)
    launcher.lost = {"n2"}
    supervisor = Supervisor(CONFIG, placement, spec, launcher, ScriptedQueue(), say=print)  # type: ignore[arg-type]
    if comes_back:
        launcher.lost.clear()
    supervisor.tick(0.0)
    started = launcher.last("generator-1").spec
    assert (started.host, started.endpoints.host) == (("n2", "10.0.0.2") if comes_back else ("n1", "10.0.0.1"))


def test_the_next_start_of_the_learner_has_another_epoch(launcher: FakeHosts, supervise: Supervise) -> None:
    supervisor = supervise(in_pool=True)
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


def test_a_role_waits_for_room_and_says_so_and_the_run_fails_when_none_comes(
    launcher: FakeHosts, said: list[str], supervise: Supervise
) -> None:
    supervisor = supervise(in_pool=True)
    supervisor.tick(0.0)
    launcher.lost |= {"n1", "n2"}
    for now_s in (1.0, 3.0, 5.0, 20.0):
        supervisor.tick(now_s)
    assert sum("no host has room for generator-0, whose host n" in text for text in said) == 1, said
    with pytest.raises(RunError, match=r"no host had room for .*, within launch.start_timeout_s = 60 s$"):
        for now_s in range(30, 200, 10):
            supervisor.tick(float(now_s))


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
    queue: ScriptedQueue = supervisor._client  # type: ignore[assignment]
    status = {"done": False, "generators_wanted": 2, "generators": {}, "learners": {}, "step": 0}
    supervisor.tick(0.0)
    supervisor.update(status, 1.0)
    launcher.waits_for = "1 GPUs in pool gen"
    for now_s in (2.0, 3.0):
        supervisor.update(status | {"generators_wanted": 3}, now_s)
    assert (said, queue.wanted) == (["waiting for 1 GPUs in pool gen"], [])
    launcher.waits_for = ""
    supervisor.update(status | {"generators_wanted": 3}, 4.0)
    assert said[1:] == ["no more generators: no host has a free GPU for one"] and queue.wanted == [2]


def test_pauses_grow_and_are_reset_by_a_step() -> None:
    history = RestartHistory(max_restarts=100, window_s=10_000)
    assert [history.next(10.0 * n, 4) for n in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert [history.next(100.0, 5), history.next(110.0, 5), history.total] == [0, 1, 10]


def test_restarts_without_a_step_count_however_long_ago_they_were() -> None:
    history = RestartHistory(max_restarts=3)
    assert [history.next(10_000.0 * n, 4) for n in range(4)] == [0, 1, 2, None]
    assert [history.next(10_000.0 * n, n) for n in range(8)] == [0] * 8


def test_more_than_allowed_within_the_window_is_refused() -> None:
    history = RestartHistory(max_restarts=3, window_s=60)
    assert [history.next(t, int(t)) for t in (0.0, 10.0, 20.0)] == [0, 0, 0]
    assert history.next(30.0, 30) is None
    assert history.total == 3
    later = RestartHistory(max_restarts=3, window_s=60)
    assert [later.next(t, int(t)) for t in (0.0, 10.0, 20.0, 61.0, 71.0)] == [0] * 5


def status(
    step: int, *, taken: bool, again: int | None = None, tokens: int = 0, finished: int = 1, refunded: int = 0
) -> dict[str, Any]:
    return {
        "refunded": {"environment": refunded},
        "generators": {"0": {"tokens": tokens}, "1": {"tokens": 7}},
        "step": step,
        "taken": taken,
        "leased": 3,
        "finished": finished,
        "eval": {"prompts_done": 0, "running": [{"version": 0, "done": 1, "prompts": 9}]},
        "catching_up": None if again is None else {"step": again, "of": step},
    }


def check(progress: Progress, told: dict[str, Any], now_s: float, started_s: float = 0.0) -> str:
    return progress.check(told, learners_started_s=started_s, missing=[], now_s=now_s)


def test_learners_that_hold_a_batch_are_blamed_once_for_a_step() -> None:
    progress = Progress(small_config(launch__progress_timeout_s=60), 0.0)
    assert check(progress, status(4, taken=True), 50.0) == ""
    assert check(progress, status(4, taken=True), 100.0) == ""
    reason = check(progress, status(4, taken=True), 111.0)
    assert reason.startswith("no optimizer step ended within launch.progress_timeout_s = 60 s: step 4, 3 groups leased")
    assert check(progress, status(4, taken=True), 150.0, started_s=112.0) == ""
    assert check(progress, status(4, taken=True, again=3), 170.0, started_s=112.0) == "", "repeated steps are progress"
    with pytest.raises(RunError, match="no optimizer step ended"):
        check(progress, status(4, taken=True, again=3), 231.0, started_s=112.0)


def test_without_a_batch_the_run_fails_and_says_what_is_awaited() -> None:
    progress = Progress(small_config(launch__progress_timeout_s=60, launch__start_timeout_s=90), 0.0)
    assert progress.check(status(0, taken=False), learners_started_s=0.0, missing=["generator-0"], now_s=1.0) == ""
    assert progress.check(status(0, taken=False), learners_started_s=0.0, missing=["generator-0"], now_s=90.0) == ""
    with pytest.raises(RunError, match="evaluation of version 0 at 1 of 9 prompts; not up: generator-0"):
        progress.check(status(0, taken=False), learners_started_s=0.0, missing=["generator-0"], now_s=92.0)


def test_the_time_restarts_once_all_are_up() -> None:
    progress = Progress(small_config(launch__progress_timeout_s=60, launch__start_timeout_s=120), 0.0)
    told = status(0, taken=False)
    assert progress.check(told, learners_started_s=0.0, missing=["generator-0"], now_s=110.0) == ""
    assert check(progress, told, 111.0) == ""
    assert check(progress, told, 169.0) == ""
    with pytest.raises(RunError, match="no optimizer step ended"):
        check(progress, told, 171.0)


def test_generated_tokens_count_while_no_batch_is_with_the_learners() -> None:
    progress = Progress(small_config(launch__progress_timeout_s=60), 0.0)
    for now_s in range(0, 1000, 50):
        assert check(progress, status(4, taken=False, tokens=now_s), now_s) == "", "a step may take long to generate"
    assert check(progress, status(4, taken=True, tokens=951), 1005.0) == ""
    assert check(progress, status(4, taken=True, tokens=2000), 1060.0) == ""
    assert check(progress, status(4, taken=True, tokens=3000), 1066.0).startswith("no optimizer step ended within")
    idle = Progress(small_config(launch__progress_timeout_s=60), 0.0)
    assert check(idle, status(4, taken=False, tokens=5), 50.0) == ""
    with pytest.raises(RunError, match=r"no optimizer step ended, and no token was generated, within launch.progress"):
        check(idle, status(4, taken=False, tokens=5), 111.0)


def test_learners_that_leave_a_batch_lying_are_blamed() -> None:
    progress = Progress(small_config(launch__progress_timeout_s=60), 0.0)
    assert check(progress, status(4, taken=False, tokens=1, finished=2), 1.0) == ""
    reason = check(progress, status(4, taken=False, tokens=900, finished=2), 62.0)
    assert reason.startswith("no optimizer step ended within")
    with pytest.raises(RunError, match="no optimizer step ended within"):
        check(progress, status(4, taken=False, tokens=900, finished=2), 124.0, started_s=63.0)


def test_refunded_groups_are_progress_while_there_is_no_batch() -> None:
    """The replay queue ends a run whose groups all fail."""
    progress = Progress(small_config(launch__progress_timeout_s=60), 0.0)
    for refunded in range(9):
        assert check(progress, status(4, taken=False, refunded=refunded), 50.0 * refunded) == ""
    with pytest.raises(RunError, match="no optimizer step ended"):
        check(progress, status(4, taken=False, refunded=8), 8 * 50.0 + 61)
