"""Environments of other projects, played in this process: what they are asked, what the policy reads, the reward."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.config.sections import Options
from asyncrl.environments.dialogue.dialogue import Dialogue
from asyncrl.environments.environment import Action, Task, ToolCall
from asyncrl.environments.table import Named, load_environment
from asyncrl.errors import ConfigError
from tests.helpers import adapters
from tests.helpers.chat_models import save_chat_model
from tests.helpers.kernel import why_not_confined
from tests.helpers.played import ASK, Played, call
from tests.helpers.sockets import await_port, free_port


@pytest.fixture(scope="module")
def dialogue(tmp_path_factory: pytest.TempPathFactory) -> Dialogue:
    folder = tmp_path_factory.mktemp("model")
    save_chat_model(folder, "qwen")
    return Dialogue(str(folder), trust_remote_code=False, max_observation_tokens=400)


@pytest.fixture
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The packages of the test's project, which this process forgets afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(adapters.installed(request.param))
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("gymnasium", "skyrl_gym", "verl"):
            del sys.modules[name]


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def play(dialogue: Dialogue, name: str, *said: str, options: dict[str, Any] | None = None, **start: Any) -> Played:
    return Played(dialogue, load_environment(name, options or {}), list(said), start)  # type: ignore[arg-type]


def refused(name: str, text: str, **options: Any) -> None:
    with pytest.raises(ConfigError, match=text):
        load_environment(name, options)


def test_a_class_of_trl_is_played_as_by_its_trainer(dialogue: Dialogue, tmp_path: Path) -> None:
    file = write(tmp_path, "counter.py", adapters.TRL)
    for name in ("CounterEnv", "make_counter"):
        calls = [call("increment", step=2) + call("look"), call("increment", step=9), call("_hidden"), "done"]
        played = play(dialogue, f"trl:{file}:{name}", *calls, columns={"start": 3})
        assert played.ended.error == "" and played.ended.reward == 5.0
        assert "Go. The counter is at 3.<|im_end|>" in played.read[0]
        assert '"name": "increment"' in played.read[0] and "get_reward" not in played.read[0]
        assert "The amount to add to the counter." in played.read[0]
        assert "<tool_response>\n5\n</tool_response>\n<tool_response>\n{'count': 5}\n" in played.read[1]
        assert "Error: too large a step" in played.read[2] and "there is no tool '_hidden'" in played.read[3]
        assert played.ended.parts["calls/increment"] == 2.0 and played.ended.parts["calls_failed/increment"] == 1.0


def test_a_reward_function_of_trl_gets_environments_and_columns(dialogue: Dialogue, tmp_path: Path) -> None:
    file = write(tmp_path, "noted.py", adapters.TRL)
    name, options = f"trl:{file}:Unscored", {"reward": f"{file}:noted"}
    said = [call("note", text="it"), call("step", action="abc"), "done"]
    played = play(dialogue, name, *said, options=options, columns={"answer": "2"})
    assert played.ended.error == "" and played.ended.reward == 1.0 + 10.0 * 5 + 0.5 + 2.0
    assert "noted it" in played.read[1] and "\ncba\n" in played.read[2]
    assert not played.read[0].endswith("Go.None<|im_end|>\n<|im_start|>assistant\n")
    refused(name, r"Unscored has no method get_reward\(self\); add it, or give a reward function in TRL's form")
    refused(f"trl:{file}:Resetless", r"Resetless has no method reset\(self, \*\*row\)")
    refused(f"trl:{file}:Nothing", r"has no 'Nothing'")
    refused(f"trl:{file}", r"names no class; give one as trl:file\.py:Class")
    refused(name, r"option reward = 'noted': names no function", reward="noted")


@pytest.mark.slow
@pytest.mark.parametrize("package", ["gymnasium"], indirect=True)
@pytest.mark.usefixtures("package")
def test_gymnasium_is_played_as_text(dialogue: Dialogue, tmp_path: Path) -> None:
    name, options = "gymnasium:FrozenLake-v1", {"is_slippery": False}
    for chat in (ASK, None):
        played = play(dialogue, name, "left", "1", "4", " 2", "1", options=options, chat=chat)
        ended = played.ended
        assert (ended.error, ended.ended, ended.reward, ended.parts) == ("", "done", 0.0, {"unread": 2.0})
        assert "Answer with a number from 0 to 3" in played.read[1] and "4" in played.read[2]
    played = play(dialogue, name, "1", "1", "2", "2", "1", options=options)
    assert (played.ended.ended, played.ended.parts) == ("max_turns", {"unread": 0.0})
    file = write(
        tmp_path,
        "cart.py",
        "def see(observation):\n    return f'at {observation[0]:.4f}'\n"
        "def act(text):\n    if text not in ('left', 'right'):\n        raise ValueError('Say left or right')\n"
        "    return int(text == 'right')\n",
    )
    own = {"observe": f"{file}:see", "act": f"{file}:act"}
    played = play(dialogue, "gymnasium:CartPole-v1", "left", "up", "right", "left", "left", options=own)
    assert played.ended.error == "" and played.ended.reward == 4.0 and "Say left or right" in played.read[2]
    assert played.ended.parts["unread"] == 1.0
    again = play(dialogue, "gymnasium:CartPole-v1", "left", "up", "right", "left", "left", options=own)
    assert again.read == played.read, "the same seed for all members of a group"
    refused("gymnasium:FrozenLake-v9", "cannot be made .* VersionNotFound")
    refused("gymnasium:CartPole-v1", r"have a form of their own, others need environment\.options\.NAME\.observe")
    refused(name, "unexpected keyword argument 'slippery'", slippery=True)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["skyrl"], indirect=True)
@pytest.mark.usefixtures("package")
def test_skyrl_gym_is_played_as_by_its_generator(dialogue: Dialogue, tmp_path: Path) -> None:
    played = play(dialogue, "skyrl:gsm8k_multi_turn", "none", "#### 8", "#### 7", options={"max_turns": 4})
    assert played.ended.error == "" and played.ended.turn_rewards == [0.0, 0.05, 1.0]
    assert played.ended.parts == {"steps": 3.0, "postprocessed": 0.0}
    assert "also include a tentative numeric answer" in played.read[1] and played.read[1].count("<|im_start|>") == 2
    played = play(dialogue, "skyrl:gsm8k_multi_turn", "#### 7", chat=None)
    assert played.ended.reward == 1.0
    name = f"skyrl:{write(tmp_path, 'echo.py', adapters.SKYRL)}:Echo"
    options: Options = {"scale": 2.0, "max_turns": 3}
    said = ["1234", "12345678901", "1"]
    played = play(dialogue, name, *said, options=options, extra_info={"begin": True})
    assert "Begin.<|im_end|>" in played.read[0] and "> 1234567890<|im_end|>" in played.read[2]
    assert played.ended.turn_rewards == [2.0, 4.0, 2.0] and played.ended.ended == "done"
    assert played.ended.parts == {"postprocessed": 1.0, "turns": 3.0}
    played = play(dialogue, name, extra_info={"changed": True})
    assert "init has changed the prompt" in played.ended.error
    refused("skyrl:gsm8", r"skyrl_gym has no 'gsm8'; did you mean gsm8k\?")


def test_tools_of_an_mcp_server_are_called(dialogue: Dialogue, tmp_path: Path) -> None:
    name = f"mcp:{sys.executable} {write(tmp_path, 'server.py', adapters.MCP)}"
    named = load_environment(name, {})
    assert isinstance(named, Named)
    said = [call("add", first=3, second=4), call("add", first="x") + call("fail", why="so"), call("count"), "7"]
    played = Played(dialogue, named, said, {})
    assert played.ended.error == "" and played.ended.reward == 1.0
    assert '"name": "add", "description": "Adds two numbers."' in played.read[0]
    assert "<tool_response>\n7\n</tool_response>" in played.read[1]
    assert "Error: Error executing tool add" in played.read[2] and "Error: Error executing tool fail" in played.read[2]
    assert "\n1 in " in played.read[3]
    assert played.ended.parts["calls_failed/add"] == 1.0 and played.ended.parts["calls/add"] == 2.0
    died = Played(dialogue, named, [call("die"), "7"], {"ground_truth": ""})
    assert (died.ended.status, died.ended.ended) == ("failed", "environment")
    assert "the server has ended (Connection closed)" in died.ended.error
    assert not children(named)


def test_tools_of_an_mcp_server_at_a_url_are_called(dialogue: Dialogue, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, write(tmp_path, "server.py", adapters.MCP), str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            await_port(port)
            name = f"mcp:http://127.0.0.1:{port}/mcp"
            played = play(dialogue, name, call("add", first=3, second=4), call("fail", why="so"), "7")
            assert played.ended.error == "" and played.ended.reward == 1.0
            assert "<tool_response>\n7\n</tool_response>" in played.read[1]
            assert "Error: Error executing tool fail" in played.read[2]
            died = play(dialogue, name, call("die"), "7")
            assert (died.ended.status, died.ended.ended) == ("failed", "environment")
            assert "the server has ended (Connection closed)" in died.ended.error
        finally:
            server.kill()


@pytest.mark.slow
def test_episodes_share_a_server_until_it_has_ended(tmp_path: Path) -> None:
    named = load_environment(f"mcp:{sys.executable} {write(tmp_path, 'server.py', adapters.MCP)}", {})
    assert isinstance(named, Named)
    asyncio.run(asyncio.wait_for(servers(named), 60.0))
    assert not children(named)


def children(named: Named) -> list[int]:
    """Processes of servers that this one has started and that still run."""
    command = vars(named.kind)["target"].split()[-1]
    running: list[int] = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # has ended, or is a zombie
            if command in process.cmdline():
                running.append(process.pid)
    return running


async def servers(named: Named) -> None:

    async def counted(environment: Any) -> str:
        action = Action("", 0, tool_calls=(ToolCall("count", {}, "0"),))
        return (await environment.step(action)).observation[0]["content"]

    task = Task("p", "7", "test", {}, {}, 0, 1)
    first, second = (named.make(task) for _ in range(2))
    await asyncio.gather(first.reset(), second.reset())
    assert await counted(first) == await counted(second)
    own = named._replace(options={"per_episode": True}).make(task)
    await own.reset()
    process = int((await counted(own)).split()[-1])
    assert str(process) not in await counted(first)
    await own.close()
    assert not psutil.pid_exists(process)
    with pytest.raises(RuntimeError, match="the server has ended"):
        await second.step(Action("", 0, tool_calls=(ToolCall("die", {}, "0"),)))
    third = named.make(task)
    await third.reset()
    assert "0 in " in await counted(third)


def test_an_mcp_server_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    refused("mcp:no-such-command", "cannot list the tools of the server: FileNotFoundError")
    refused("mcp:false", "cannot list the tools of the server: MCPError: Connection closed")
    refused("mcp:http://127.0.0.1:9/mcp", "cannot list the tools of the server: ConnectError")
    refused("mcp:", "names no server; give mcp:COMMAND or mcp:URL")


@pytest.mark.skipif(bool(why_not_confined()), reason=why_not_confined())
def test_the_python_tool_runs_programs_in_the_sandbox(dialogue: Dialogue, tmp_path: Path) -> None:
    file = write(tmp_path, "score.py", "def score(task, answer):\n    return {'score': 2.0, 'length': len(answer)}\n")
    programs = ["print(3 + 4)", "x = 1", "1 / 0", "open('/etc/passwd')"]
    played = play(dialogue, "python", *[call("run", program=program) for program in programs], "7")
    assert played.ended.ended == "done" and played.ended.reward == 1.0
    for expected, text in zip(
        ("\n7\n", "(no output)", "ZeroDivisionError", "PermissionError"), played.read[1:], strict=True
    ):
        assert expected in text
    assert played.ended.parts["calls/run"] == 4.0 and played.ended.parts["calls_failed/run"] == 2.0
    options: Options = {"reward": f"{file}:score", "time_limit_s": 0.5}
    slow = [call("run", program="while True: pass"), call("run", program="def"), "seven"]
    played = play(dialogue, "python", *slow, options=options)
    assert "the program was ended: out of time" in played.read[1] and "SyntaxError" in played.read[2]
    assert played.ended.reward == 2.0 and played.ended.parts["length"] == 5.0
    refused("python", "option time_limit_s = 0.0: must be above 0", time_limit_s=0.0)
    refused("python", "option memory_bytes = 5: must be at least", memory_bytes=5)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["verl"], indirect=True)
@pytest.mark.usefixtures("package")
def test_tools_of_verl_are_called_as_by_its_loop(
    dialogue: Dialogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, "verl_ledger.py", adapters.VERL)
    functions = write(tmp_path, "verl_functions.py", adapters.VERL_FUNCTIONS)
    file = write(tmp_path, "tools.yaml", adapters.VERL_YAML.format(module="verl_ledger"))
    options: Options = {"functions": functions}
    extra = {"tools_kwargs": {"book": {"create_kwargs": {"truth": 4}}}}
    said = [call("book", amount=4) + call("double", value=3), call("book", amount=-1), call("later", value=1), "7"]
    named = load_environment(f"verl:{file}", options)
    assert isinstance(named, Named)
    played = Played(dialogue, named, said, {"extra_info": extra})
    ledger = vars(named.kind)["foreign"]["book"]
    assert ledger.log == ["create", "release"] * 2 and not ledger.instances
    assert played.ended.error == "" and played.ended.turn_rewards == [0.75, 0.0, 0.0, 0.0]
    assert played.ended.reward == 1.75
    assert "booked 4" in played.read[1] and "\n6\n" in played.read[1] and "Error: unknown amount" in played.read[2]
    assert '{"value": 1}' in played.read[3] and '"description": "The amount."' in played.read[0]
    one = play(
        dialogue, f"verl:{file}", call("double", value=3), "8", options=options, extra_info={"tool_selection": ["book"]}
    )
    assert "double" not in one.read[0] and "there is no tool 'double'; there are book" in one.read[1]
    alone = play(dialogue, f"verl:{functions}", call("double", value=3), "7")
    assert alone.ended.reward == 1.25
    refused(f"verl:{tmp_path}/none.yaml", "no file")
    bad = write(tmp_path, "bad.yaml", adapters.VERL_YAML.format(module="no_such_module"))
    refused(f"verl:{bad}", "cannot load its tools")


@pytest.mark.parametrize("name", ["gymnasium:FrozenLake-v1", "skyrl:gsm8k", "mcp:server"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = {"gymnasium": "gymnasium", "skyrl": "skyrl_gym", "mcp": "mcp"}[name.partition(":")[0]]
    monkeypatch.setitem(sys.modules, module, None)
    refused(name, f"cannot import {module} .*; pip install {module.replace('_', '-')}==")
