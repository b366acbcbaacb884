"""Environments of the verifiers library through the gateway, in the interpreter that has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from asyncrl.config.sections import Options
from asyncrl.environments.environment import Task
from asyncrl.environments.player import Limits
from asyncrl.environments.programs.load import load_verifiers
from asyncrl.errors import ConfigError
from asyncrl.wire.environment_messages import EpisodeEnded
from tests.helpers.cli import asyncrl
from tests.helpers.doc_files import write_doc_files
from tests.helpers.programs import Played, play_program
from tests.helpers.verifiers_python import verifiers_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
TOOLS = '''
import verifiers as vf
from datasets import Dataset

def multiply(a: int, b: int) -> int:
    """The product.

    Args:
        a: a number
        b: a number
    """
    return a * b

def right(completion, answer, info):
    return float(completion[-1].content == answer) * info["weight"]

def load_environment(stop=False, key=False):
    if key:
        vf.ensure_keys(["SOME_API_KEY"])
    rows = [{"question": "6 * 7 =", "answer": "42", "info": {"weight": 0.5, "steps": [1, None]}}]
    errors = [ValueError] if stop else []
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows), tools=[multiply], rubric=vf.Rubric(funcs=[right]), stop_errors=errors
    )
'''
BROKEN = """
import verifiers as vf
from number_game import NumberGame, load_environment as load

class Broken(NumberGame):
    async def env_response(self, messages, state, **kwargs):
        raise vf.InfraError("the sandbox is gone")

def load_environment():
    environment = load()
    return Broken(dataset=environment.get_dataset(), rubric=environment.rubric, max_turns=4)
"""
RANKED = """
import os
import verifiers as vf
from number_game import NumberGame, load_environment as load, right

class Ranked(NumberGame):
    async def env_response(self, messages, state, **kwargs):
        if messages[-1].content == "breaks":
            raise vf.InfraError("the sandbox is gone")
        if messages[-1].content == "kills":
            os._exit(3)
        return await super().env_response(messages, state, **kwargs)

def shorter(completions, answers):
    said = [sum(len(one.content) for one in completion if one.role == "assistant") for completion in completions]
    assert len(set(answers)) == 1, "one task"
    return [sum(other > own for other in said) for own in said]

def load_environment(nan=False, both=False):
    rubric = vf.Rubric(funcs=[right, shorter], weights=[10.0, float("nan") if nan else 1.0])
    ranked = Ranked(dataset=load().get_dataset(), rubric=rubric, max_turns=4)
    return vf.EnvGroup([load(), ranked], ["alone", "ranked"]) if both else ranked
"""
CALL = '!multiply {"a": 6, "b": 7}'


@pytest.fixture
def classic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An interpreter with verifiers 0.3.1, in a folder with environments."""
    monkeypatch.chdir(tmp_path)
    write_doc_files("environments.md", tmp_path)
    (tmp_path / "tool_game.py").write_text(TOOLS)
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "ranked.py").write_text(RANKED)
    return verifiers_python("0.3.1")


@pytest.fixture
def tasksets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An interpreter with verifiers 0.4.0, in a folder with environments."""
    monkeypatch.chdir(tmp_path)
    write_doc_files("environments.md", tmp_path)
    return verifiers_python("0.4.0")


@cache
def tasks_of(name: str, python: str, options: str = "{}") -> list[Task]:
    """The tasks of the rows that `asyncrl data verifiers` writes."""
    out, given = Path(f"{name}.parquet"), [f"{key}={json.dumps(value)}" for key, value in json.loads(options).items()]
    code, output = asyncrl("data", "verifiers", "--env", name, "--python", python, "--out", str(out), *given)
    assert code == 0 and "rows written" in output, output
    return [
        Task(row["prompt"], row["reward_model"]["ground_truth"], name, row["extra_info"], {}, number, 5)
        for number, row in enumerate(pq.read_table(out).to_pylist())
    ]


def play(name: str, python: str, policy: Callable[[int, int], str], **more: Any) -> list[Played]:
    options: Options = more.pop("options", {})
    limits = more.pop("limits", None)
    tasks = tasks_of(name, python, json.dumps({key: options[key] for key in ("numbers", "taskset") if key in options}))
    return play_program(f"verifiers:{name}", tasks, policy, python=python, options=options, limits=limits)


def test_a_game_of_several_turns_is_one_branch_with_the_reward_of_the_rubric(classic: str) -> None:
    played = play("number-game", classic, lambda episode, turn: str(turn), options={"numbers": 6})
    for number, one in enumerate(played):
        turns = min(number + 1, 4)
        assert (one.ended.status, one.ended.ended, one.ended.error) == ("completed", "done", "")
        assert one.ended.reward == float(number < 4)
        assert one.ended.parts == {"right": float(number < 4), "num_turns": float(turns)}
        assert (len(one.wishes), len(one.branches), one.ended.unused) == (turns, 1, [])
        words = ["0higher", "1higher", "2higher", "3"]
        assert one.texts == [f"Guess a number below 6.{''.join(words)[: 7 * turns - 6]}"]


def test_calls_of_tools_go_round(classic: str) -> None:
    said = [CALL, "42"]
    (one,) = play("tool-game", classic, lambda _, turn: said[turn])
    assert one.texts == [f"6 * 7 ={CALL}4242"] and one.prompts[0][0] == 5, "the tool is shown"
    assert one.ended.reward == 0.5 and one.ended.parts["multiply_calls"] == 1.0
    row = json.loads(tasks_of("tool-game", classic)[0].extra_info["verifiers"])
    assert row["info"] == {"weight": 0.5, "steps": [1, None]}, "as it was"


def test_what_the_policy_says_is_scored_and_what_the_environment_breaks_is_not(classic: str) -> None:
    (empty,) = play("tool-game", classic, lambda _, turn: "")
    assert (empty.ended.status, empty.ended.reward, empty.ended.error) == ("completed", 0.0, "")
    (cut,) = play("tool-game", classic, lambda _, turn: "42~")
    assert (cut.ended.status, cut.ended.ended, cut.ended.reward) == ("truncated", "done", 0.5)
    broken = play("broken", classic, lambda _, turn: "11")[0].ended
    assert (broken.status, broken.ended) == ("failed", "environment") and "the sandbox is gone" in broken.error
    limits = Limits(2000, 200, 2, 60.0, 60.0)
    for one in play("number-game", classic, lambda _, turn: str(turn), options={"numbers": 3}, limits=limits):
        hit = one.ended.parts["right"]
        assert (one.ended.status, one.ended.reward) == ("completed" if hit else "truncated", hit)
        assert hit or one.ended.ended == "max_turns"
    window = Limits(45, 200, 8, 60.0, 60.0)
    ends = [one.ended for one in play("number-game", classic, lambda _, turn: "11", limits=window)]
    assert {(one.status, one.ended, one.reward) for one in ends} == {("truncated", "window", 0.0)}


def play_group(python: str, said: list[list[str]], *, row: int = 3, **more: Any) -> list[EpisodeEnded]:
    """The ends of the members of a group, which say these turns."""
    task = tasks_of(more.pop("name", "ranked"), python, json.dumps(more.get("options", {})))[row]
    played = play_program(
        "verifiers:ranked", [task] * len(said), lambda member, turn: said[member][turn], python=python, together=True,
        **more,
    )  # fmt: skip
    return [one.ended for one in played]


def test_the_members_of_a_group_are_scored_together(classic: str) -> None:
    ends = play_group(classic, [["3"], ["a", "b", "3"], ["1", ""], ["x", "x", "x", "x"]])
    assert [(one.status, one.ended, one.error) for one in ends] == [("completed", "done", "")] * 4
    assert [one.parts["shorter"] for one in ends] == [2.0, 1.0, 2.0, 0.0], "an empty turn ends a rollout"
    assert [one.parts["num_turns"] for one in ends] == [1.0, 3.0, 1.0, 4.0]
    assert [one.reward for one in ends] == [12.0, 11.0, 2.0, 0.0]
    assert all(one.scored_together for one in ends) and ends[0].group_wait_s > ends[3].group_wait_s == 0.0
    (alone,) = play_group(classic, [["3"]])
    assert (alone.reward, alone.parts["shorter"]) == (10.0, 0.0)
    limits = Limits(2000, 200, 2, 60.0, 60.0)
    ends = play_group(classic, [["0", "0"], ["3"]], limits=limits)
    assert [(one.status, one.ended, one.reward) for one in ends] == [
        ("truncated", "max_turns", 0.0), ("completed", "done", 11.0)
    ]  # fmt: skip


def test_a_member_that_fails_is_not_compared_and_is_named_by_those_that_wait(classic: str) -> None:
    limits = Limits(2000, 200, 8, 15.0, 60.0)
    first, broken, last = play_group(classic, [["3"], ["0", "breaks"], ["1", "3"]], limits=limits)
    assert (broken.status, broken.ended, broken.scored_together) == ("failed", "environment", True)
    assert "the sandbox is gone" in broken.error
    for one in (first, last):
        assert (one.status, one.ended, one.scored_together) == ("failed", "timeout", True)
        assert "waited 15 s" in one.error, one.error
    assert first.error.endswith("to be scored with them; not ended: 1"), first.error
    ends = play_group(classic, [["3"], ["0", "kills"]], limits=limits)
    assert {(one.status, one.ended) for one in ends} == {("failed", "host")}, (
        "those that wait are lost with the process"
    )
    ends = play_group(classic, [["3"], ["1", "3"]], options={"nan": True})
    assert {(one.status, one.ended) for one in ends} == {("failed", "environment")}


def test_only_the_rows_whose_rubric_compares_wait(classic: str) -> None:
    options: Options = {"both": True}
    alone = play_group(classic, [["3"], ["0", "3"]], options=options)
    assert [(one.reward, one.scored_together) for one in alone] == [(1.0, False)] * 2
    together = play_group(classic, [["3"], ["0", "3"]], options=options, row=13)
    assert [(one.reward, one.scored_together) for one in together] == [(11.0, True), (10.0, True)]


def test_tasksets_are_played_by_a_harness_in_the_process(tasksets: str) -> None:
    played = play(
        "sums", tasksets, lambda episode, turn: str(2 * episode) if turn else "?", options={"taskset": {"size": 40}}
    )
    assert len(played) == 40
    for number, one in enumerate(played):
        assert (one.ended.status, one.ended.reward, one.ended.error) == ("completed", 1.0, "")
        assert one.ended.parts == {"right": 1.0, "turns": 2.0}
        assert one.texts == [f"{number} + {number} =?Are you sure?{2 * number}"]
    wrong = play("sums", tasksets, lambda episode, turn: "7", options={"taskset": {"size": 1}})[0]
    assert (wrong.ended.status, wrong.ended.reward) == ("completed", 0.0)


def test_limits_end_a_taskset_as_truncated(tasksets: str) -> None:
    options: Options = {"taskset": {"size": 1}}
    limits = Limits(2000, 200, 1, 60.0, 60.0)
    (one,) = play("sums", tasksets, lambda episode, turn: "0", options=options, limits=limits)
    assert (one.ended.status, one.ended.ended, one.ended.reward) == ("truncated", "max_turns", 0.0)
    (own,) = play("sums", tasksets, lambda episode, turn: "0", options=options | {"agent": {"max_turns": 1}})
    assert (own.ended.status, own.ended.reward) == ("completed", 1.0), "a limit of the environment is scored by it"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nothing-here", {}, "there is no environment 'nothing-here': no module nothing_here. Install its package"),
        ("sums", {}, "'sums' is an environment of a taskset, which verifiers 0.3.1 does not load; name an interpreter"),
        ("tool-game", {"key": True}, "it asks for a key: Missing required environment variable(s): SOME_API_KEY. Set"),
        ("tool-game", {"keys": True}, "unexpected keyword argument 'keys'"),
    ],
)
def test_environments_that_cannot_be_loaded_say_why(
    classic: str, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_verifiers(name, options, classic).check()
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nothing-here", {}, "there is no environment 'nothing-here'"),
        ("number-game", {}, "'number-game' is an environment with load_environment, which verifiers 0.4.0 does not"),
        (
            "sums",
            {"agent": {"harness": {"id": "bash"}}},
            "harness 'bash' of agent runs programs that the policy writes",
        ),
        ("sums", {"agent": {"harness": {"id": "null"}}}, "harness 'null' of agent needs uv"),
        ("sums", {"id": "user-sim"}, "2 of its agents have no endpoint of their own (assistant, user), but one"),
        ("sums", {"taskset": {"sizes": 3}}, "sizes"),
    ],
)
def test_tasksets_that_cannot_be_loaded_say_why(
    tasksets: str, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    with pytest.raises(ConfigError) as refused:
        load_verifiers(name, options, tasksets).check()
    assert message in str(refused.value)
