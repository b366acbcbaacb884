"""The actor that starts roles on a Ray node, and the copies of their logs, without Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import types
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from asyncrl.launch import ray_launcher as logs
from asyncrl.launch.placement import RoleResources
from asyncrl.launch.ray_actor import NodeLauncher, PoolActor
from asyncrl.launch.ray_launcher import RemoteLogs
from asyncrl.launch.worker import RoleSpec
from tests.helpers.replay import loopback_endpoints

RESOURCES = RoleResources(tuple(sorted(os.sched_getaffinity(0))), threads=1)
WAIT_S = 20.0
SHOWS = "import os, sys; print(sorted(n for n in os.environ if n.startswith(('RAY_', 'PASSED_'))), os.getppid()); "


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PoolActor:
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


def test_roles_are_its_children_and_know_nothing_of_ray(actor: PoolActor, tmp_path: Path) -> None:
    code, cause = do(actor.run(0, spec(0, tmp_path), RESOURCES))
    assert code == 7
    assert cause == f"generator-0@n1 ended with code 7: ['PASSED_ON'] {os.getpid()}"
    assert do(actor.run(0, spec(0, tmp_path), RESOURCES))[0] == 7, "asking again starts nothing"


def test_roles_are_killed_also_before_they_start(actor: PoolActor, tmp_path: Path) -> None:
    async def kill() -> tuple[Any, ...]:
        running = asyncio.create_task(actor.run(0, spec(1, tmp_path), RESOURCES))
        await asyncio.sleep(0.1)
        immortal = await actor.kill([0, 1], show_stacks=False)
        return immortal, await running, await actor.run(1, spec(1, tmp_path), RESOURCES)

    immortal, killed, never = do(kill())
    assert immortal == []
    assert killed == (-signal.SIGKILL, "generator-1@n1 was killed by signal SIGKILL")
    assert never == (-signal.SIGKILL, "generator-1@n1 was killed before it started")


def test_its_address_is_the_one_on_the_network_of_the_run(
    actor: PoolActor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one, that in the cluster. Where it has none, it says so."""
    context = types.SimpleNamespace(get_node_id=lambda: "1", get_accelerator_ids=dict)
    util = types.SimpleNamespace(get_node_ip_address=lambda: "10.0.0.2")
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(get_runtime_context=lambda: context, util=util))
    monkeypatch.setattr("platform.node", lambda: "n2")
    told = [do(actor.describe(str(tmp_path / "token"), "", network)) for network in ("", "lo", "127.0.0.0/8", "none0")]
    assert [facts.address for facts in told] == ["10.0.0.2", "127.0.0.1", "127.0.0.1", ""]
    assert [facts.problem for facts in told[:3]] == [""] * 3
    assert told[3].problem.startswith("launch.address = 'none0': n2 has no interface of this name; it has lo (")


class Answers:
    """In place of an actor's handle: methods that answer at once."""

    def __init__(self, actor: PoolActor) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return types.SimpleNamespace(remote=lambda *arguments: [do(method(*arguments))])


def test_complete_lines_of_this_run_are_copied(
    actor: PoolActor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = types.SimpleNamespace(wait=lambda refs, timeout: (refs, []), get=lambda ref: ref[0])
    monkeypatch.setitem(sys.modules, "ray", answered)
    monkeypatch.setitem(sys.modules, "ray.exceptions", types.SimpleNamespace(RayError=OSError))
    monkeypatch.setattr(logs, "EVERY_S", 0.0)
    monkeypatch.setattr(logs, "MAX_BYTES", 16)
    there, here = tmp_path / "there", tmp_path / "here"
    source, copy = there / "logs" / "generator-0.jsonl", here / "generator-0.jsonl"
    source.parent.mkdir(parents=True)
    source.write_text("of an earlier run\n")
    copies = RemoteLogs(here)
    copies.follow(Answers(actor), spec(0, there))
    copies.tick()
    with source.open("a") as log:
        log.write("one\ntwo\nthree and a ha")
    for _ in range(3):
        copies.tick()
    assert copy.read_text() == "one\ntwo\n"
    with source.open("a") as log:
        log.write("lf, longer than a read is\nfour")
    copies.drain(timeout_s=2.0)
    assert copy.read_text() == "one\ntwo\nthree and a half, longer than a read is\nfour"
