"""Supervision of real processes that replace the roles, with a status set by the test."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import PeerTimeoutError, RunError
from asyncrl.launch import launcher as local
from asyncrl.launch import machine as gpus
from asyncrl.launch.launcher import LocalLauncher
from asyncrl.launch.placement import place_roles
from asyncrl.launch.supervisor import GRACE_S, SETTLED_S, RoleGroup, Supervisor
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


def test_second_death_soon_after_waits_and_one_after_good_work_does_not(stage: Make) -> None:
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
    one.hear(SETTLED_S + 1)
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


def test_same_crash_again_and_again_after_it_worked_is_restarted(stage: Make) -> None:
    one = stage()
    one.hear()
    fall(one, *[crash("a thread failed")] * 4)
    assert one.supervisor.restarts["generator"] == 5


def end_learner(one: Stage, *, step: int) -> None:
    """Starts the only learner rank, long after its last end, and lets it end by itself at this step."""
    one.tick(1000)
    one.await_end("learner")
    one.hear(step=step)
    one.tick()
    one.tick(GRACE_S + 0.1)


@pytest.mark.parametrize("end", [crash("a row above the embedding"), "import os; os.kill(os.getpid(), 9)"])
def test_the_same_end_at_the_same_step_ends_the_run_however_slowly_it_comes(stage: Make, end: str) -> None:
    one = stage(launch__learners=1)
    one.hear()
    one.launcher.code["learner-0"] = end
    one.supervisor.restart(one.supervisor.learners, "test", one.now_s)
    for _ in range(4):
        end_learner(one, step=3)
    assert one.supervisor.restarts["learner"] == 5
    with pytest.raises(RunError, match=r"^learner-0 .*; it has failed 5 times for this reason, and no optimizer step"):
        end_learner(one, step=3)


def test_ends_of_one_kind_with_steps_in_between_do_not_add_up(stage: Make) -> None:
    one = stage(launch__learners=1)
    one.hear()
    one.launcher.code["learner-0"] = crash("a link is down")
    one.supervisor.restart(one.group("learner"), "test", one.now_s)
    for step in range(8):
        end_learner(one, step=step)
    assert one.supervisor.restarts["learner"] == 9


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
            f"generator-1 (process {stuck.process.pid}) does not die of SIGKILL and is left running",
            "it hangs; restart 1 in 0 s",
        ]
        one.tick()
        assert one.group("generator-1").running
        assert one.queue.lost_generators == [1]
    finally:
        kill_group(stuck)
        stuck.process.wait(30)


def test_zero_restarts_end_the_run_at_the_first_death(stage: Make) -> None:
    one = stage(launch__max_restarts=0)
    one.hear()
    one.kill("replay")
    with pytest.raises(RunError, match=r"^replay was killed by signal SIGKILL$"):
        one.tick()


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


def test_final_error_of_another_rank_is_the_cause(stage: Make, tmp_path: Path) -> None:
    one = stage()
    one.launcher.code["learner-0"] = "import sys; print('the batch is stale'); sys.exit(1)"
    one.supervisor.restart(one.supervisor.learners, "test", one.now_s)
    one.tick()
    one.kill("learner", rank=1)
    one.await_end("learner")
    with pytest.raises(RunError, match="learner-0 ended with code 1: the batch is stale"):
        one.tick()


def test_codes_of_silent_peers_and_crashes_are_restarted(stage: Make) -> None:
    one = stage()
    one.hear()
    for code in (3, 4):
        one.run_code("generator-0", f"import sys; sys.exit({code})")
        one.tick()
        assert f"generator-0 ended with code {code}" in one.said[-1]


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
        "generator-0 ended with code 4: it said nothing",
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
    said = "no more generators: generator-2 would share GPU 6 with generator-0, and weights are sent between GPUs"
    assert [text for text in run.said if text.startswith(said)]
    assert run.queue.wanted == [2]
    run.hear(generators_wanted=2)
    run.tick()
    assert [group.name for group in run.supervisor.generators if group.running] == ["generator-0", "generator-1"]
