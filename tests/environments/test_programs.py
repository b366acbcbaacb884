"""Agent programs: functions, commands and other interpreters, and what their episodes come to."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from asyncrl.environments.episode import Limits
from asyncrl.environments.gateway.openai_api import Access
from asyncrl.environments.programs import program as program_module
from asyncrl.environments.programs.program import load_agent
from asyncrl.errors import ConfigError
from asyncrl.types import Prompt
from tests.helpers.programs import play_program

PROMPT = Prompt(7, np.array(list(map(ord, "hello")), np.int32), "42", "test")
PROGRAM = '''
import json, os, sys, time, urllib.error, urllib.request

def ask(base_url, api_key, text, **more):
    """The policy's answer."""
    body = {"model": "policy", "messages": [{"role": "user", "content": text}], **more}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        error.close()  # it has the socket
        raise

def run(task, *, base_url, api_key, scale=1.0):
    said = ask(base_url, api_key, task["prompt"])
    print("this is no reward")
    return {"score": scale * (said == task["ground_truth"]), "length": len(said)}

async def later(task, *, base_url, api_key):
    import asyncio
    return await asyncio.to_thread(lambda: float(ask(base_url, api_key, "x") == "42"))

class Agent:
    def __init__(self, scale=1.0):
        self.scale = scale
    def run(self, task, **access):
        return self.scale * float(ask(access["base_url"], access["api_key"], "x") == "42")

def fails(task, base_url, api_key):
    ask(base_url, api_key, "x")
    raise KeyError("no such tool")

def silent(task, base_url, api_key):
    return 1.0

def nothing(task, base_url, api_key):
    ask(base_url, api_key, "x")

def long(task, base_url, api_key):
    for length in (10, 1000):
        ask(base_url, api_key, "x" * length)

def endless(task, base_url, api_key):
    while True:
        ask(base_url, api_key, "x")

def hangs(task, base_url, api_key):
    ask(base_url, api_key, "x")
    time.sleep(3.0)

def hangs_at_first(task):
    """Returns in no process but the second."""
    try:
        with open("first", "x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        pass
    if open("first").read() in ("", str(os.getpid())):
        time.sleep(60.0)
    return 1.0

async def blocks_at_first(task):
    return hangs_at_first(task)

async def keeps_the_lock_at_first(task):
    import re
    if not os.path.exists("locked"):
        open("locked", "w").close()
        re.match("(a+)+$", "a" * 40 + "b")
    return 1.0

def number(task):
    return task["x"]

async def is_cancelled(task):
    import asyncio
    raise asyncio.CancelledError

def dies(task, base_url, api_key):
    os._exit(7)

def curious(task, base_url, api_key):
    """Runs a program that reads its standard input, and looks for modules of others."""
    import importlib.util, subprocess
    ask(base_url, api_key, "x")
    read = subprocess.run([sys.executable, "-c", "import sys; print(len(sys.stdin.read()))"], capture_output=True)
    return {"score": float(read.stdout), "found": float(importlib.util.find_spec("subprocess_agent") is not None)}

if __name__ == "__main__":
    task = json.load(sys.stdin)
    access = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    print("thinking")
    print(json.dumps(run(task, **access)))
'''


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(PROGRAM)
    return "agent.py"


def play(name: str, *, python: str | None = None, times: int = 1, timeout_s: float = 20.0, **options: Any) -> Any:
    """The ends of episodes of a program at once; the policy says 42."""
    before = set(psutil.Process().children(recursive=True))
    limits = Limits(400, 50, 5, timeout_s, timeout_s)
    played = play_program(
        f"agent:{name}", [PROMPT] * times, lambda episode, turn: "42", python=python, options=options, limits=limits
    )
    ended = [one.ended for one in played]
    left = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert not psutil.wait_procs(left, timeout=5.0)[1], "what a program has started ends with its episode"
    return ended if times > 1 else ended[0]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("{}:run", {"length": 2.0}),
        ("{}:later", {}),
        ("{}:Agent", {}),
        (f"{sys.executable} {{}}", {"length": 2.0}),
    ],
)
def test_functions_classes_and_commands_have_their_reward(program: str, name: str, parts: dict[str, float]) -> None:
    ended = play(name.format(program))
    assert (ended.status, ended.ended, ended.reward, ended.error) == ("completed", "done", 1.0, "")
    assert (ended.parts, ended.turn_rewards, ended.unused) == (parts, [], [])


def test_options_reach_the_program_and_many_episodes_run_at_once(program: str) -> None:
    ended = play(f"{program}:run", times=50, scale=0.5)
    assert {one.reward for one in ended} == {0.5}
    assert len({one.episode for one in ended}) == 50


def test_programs_see_nothing_of_what_runs_them(program: str) -> None:
    ended = play(f"{program}:curious")
    assert (ended.error, ended.reward, ended.parts) == ("", 0.0, {"found": 0.0})


@pytest.mark.parametrize(
    ("function", "status", "end", "error"),
    [
        ("is_cancelled", "failed", "environment", "CancelledError"),
        ("fails", "failed", "environment", "failed: KeyError: 'no such tool'"),
        ("silent", "failed", "environment", "ended without a request for a turn of the policy"),
        ("nothing", "failed", "environment", "ended without a reward: it returned and posted none"),
        ("long", "truncated", "window", ""),
        ("endless", "truncated", "max_turns", ""),
    ],
)
def test_ends_of_programs(program: str, function: str, status: str, end: str, error: str) -> None:
    ended = play(f"{program}:{function}")
    assert (ended.status, ended.ended) == (status, end)
    assert error in ended.error


def test_a_program_that_hangs_is_out_of_time(program: str) -> None:
    ended = play(f"{program}:hangs", timeout_s=2.0)
    assert (ended.status, ended.ended) == ("failed", "timeout") and "environment.timeout_s = 2 s" in ended.error
    ended = play(f"sleep 60; {sys.executable} {program}", timeout_s=2.0)
    assert (ended.status, ended.ended) == ("failed", "timeout")


@pytest.mark.parametrize("function", ["hangs_at_first", "blocks_at_first", "keeps_the_lock_at_first"])
def test_a_process_whose_calls_do_not_return_is_replaced(
    program: str, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    folder = str(program_module.SCRIPT.parent)
    Path("script.py").write_text(
        f"import sys\nsys.path.insert(0, {folder!r})\nimport subprocess_agent as script\n"
        "script.CANCEL_S, script.MAX_STUCK = 0.5, 2\nscript.main()\n"
    )
    monkeypatch.setattr(program_module, "SCRIPT", Path("script.py").absolute())
    monkeypatch.setattr(program_module, "CANCEL_S", 0.5)

    async def play() -> None:
        agent, ends, deadline_s = load_agent(f"{program}:{function}", {}, None), list[Any](), time.monotonic() + 30.0
        while ends[-1:] != [1.0]:
            assert time.monotonic() < deadline_s
            runs = [asyncio.wait_for(agent.run({"text": "x" * 100_000}, Access("", "")), 1.0) for _ in range(2)]
            ends += await asyncio.gather(*runs, return_exceptions=True)
        await agent.close()

    asyncio.run(play())


def test_a_process_that_dies_loses_its_episodes(program: str) -> None:
    ended = play(f"{program}:dies")
    assert (ended.status, ended.ended) == ("failed", "host")
    assert "ended with exit code 7" in ended.error
    ended = play("exit 3")
    assert (ended.status, ended.ended) == ("failed", "environment") and "exit code 3" in ended.error
    ended = play("echo hello")
    assert "the last line of its output is no reward: 'hello'" in ended.error


HOST = """
import asyncio, sys
from asyncrl.environments.gateway.gateway import Access
from asyncrl.environments.programs.program import load_agent

async def main():
    agent = load_agent(sys.argv[1], {}, None)
    runs = [asyncio.ensure_future(agent.run({}, Access("", ""))) for _ in range(2)]
    await asyncio.wait(runs)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("name", "running", "killed"),
    [
        ("sleep 291 | sleep 292; true", 7, "host"),
        ("sleep 291 | sleep 292; true", 7, "agent"),
        ("agent.py:hangs", 1, "host"),
    ],
)
def test_programs_end_with_a_host_or_agent_process_that_is_killed(
    tmp_path: Path, name: str, running: int, killed: str
) -> None:
    (tmp_path / "agent.py").write_text("import time\n\ndef hangs(task):\n    time.sleep(290)\n")
    host = subprocess.Popen([sys.executable, "-c", HOST, name], cwd=tmp_path)
    try:
        deadline_s = time.monotonic() + 20
        while len(started := programs_in(tmp_path) - {host.pid}) < running:
            assert time.monotonic() < deadline_s and host.poll() is None
            time.sleep(0.05)
        if killed == "agent":
            (agent,) = psutil.Process(host.pid).children()
            agent.kill()
            host.wait(20)
    finally:
        host.kill()
        host.wait()
    deadline_s = time.monotonic() + 5
    while left := programs_in(tmp_path):
        if time.monotonic() > deadline_s:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"{len(left)} of {len(started)} processes run on")
        time.sleep(0.05)


def programs_in(folder: Path) -> set[int]:
    """Processes that run in the folder."""
    found: set[int] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
    return found


def test_programs_that_cannot_start_are_named(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[str, str, str]] = [
        ("nothere/python", "agent.py:run", "environment.python = 'nothere/python': cannot be started (No such file"),
        (sys.executable, "agent.py:walk", "has no attribute 'walk'"),
        (sys.executable, "other.py:run", "there is no file other.py"),
        ("/bin/true", "agent.py:run", "/bin/true cannot load it: it ended before it was ready"),
    ]
    for python, name, message in cases:
        with pytest.raises(ConfigError) as refused:
            load_agent(name, {}, python).check()
        assert message in str(refused.value)
    Path("slow.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(program_module, "START_S", 0.5)
    with pytest.raises(ConfigError, match=r"has not loaded it within 0.5 s"):
        load_agent("slow.py:run", {}, sys.executable).check()


@pytest.mark.parametrize("stream", ["", " >&2"])
def test_what_a_command_writes_without_end_is_bounded(stream: str) -> None:
    async def play() -> int:
        program, before = load_agent(f'yes "a line of the log"{stream}', {}, None), set(psutil.Process().children())
        running = asyncio.ensure_future(program.run({}, Access("http://127.0.0.1:1/v1", "key")))

        def agents() -> set[psutil.Process]:
            return set(psutil.Process().children()) - before

        while not (commands := [command for agent in agents() for command in agent.children()]):
            await asyncio.sleep(0.05)
        (agent,) = agents()
        await asyncio.sleep(0.3)
        used_bytes = agent.memory_info().rss
        await asyncio.sleep(1.0)
        grown = agent.memory_info().rss - used_bytes
        running.cancel()
        await asyncio.wait({running})
        assert not psutil.wait_procs(commands, timeout=5.0)[1]
        await program.close()
        return grown

    assert asyncio.run(play()) < 8 << 20


def test_a_command_that_does_not_read_its_task_and_writes_much_has_its_reward() -> None:
    async def play() -> Any:
        program = load_agent("head -c 3000000 /dev/zero | tr '\\0' 'x'; echo; echo 0.5", {}, None)
        reward = await program.run({"text": "y" * 1_000_000}, Access("http://127.0.0.1:1/v1", "key"))
        await program.close()
        return reward

    assert asyncio.run(play()) == 0.5


def test_a_value_of_the_row_that_is_no_number_stays_one(program: str) -> None:
    async def play() -> Any:
        agent = load_agent(f"{program}:number", {}, None)
        reward = await agent.run({"x": math.nan}, Access("", ""))
        await agent.close()
        return reward

    assert math.isnan(asyncio.run(play()))


def test_an_interpreter_that_is_gone_loses_its_episodes(program: str) -> None:
    ended = play(f"{program}:run", python="gone/python")
    assert (ended.status, ended.ended) == ("failed", "host") and "'gone/python': cannot be started" in ended.error
