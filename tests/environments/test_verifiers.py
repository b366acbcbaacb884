"""Environments of the verifiers library through the gateway, in the interpreter that has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from asyncrl.config.sections import Options
from asyncrl.environments.player import Limits
from asyncrl.environments.programs.program import load_verifiers
from asyncrl.errors import ConfigError
from asyncrl.types import Prompt
from tests.helpers.cli import asyncrl
from tests.helpers.doc_files import write_doc_files
from tests.helpers.programs import LIMITS, PlayedProgram, play_program
from tests.helpers.verifiers_python import verifiers_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def tasksets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An interpreter with verifiers 0.4.0, in a folder with environments."""
    monkeypatch.chdir(tmp_path)
    write_doc_files("environments.md", tmp_path)
    return verifiers_python("0.4.0")


@cache
def prompts_of(name: str, python: str, options: str = "{}") -> list[Prompt]:
    """The rows that `asyncrl data verifiers` writes."""
    out, given = Path(f"{name}.parquet"), [f"{key}={json.dumps(value)}" for key, value in json.loads(options).items()]
    code, output = asyncrl("data", "verifiers", "--env", name, "--python", python, "--out", str(out), *given)
    assert code == 0 and "rows written" in output, output
    return [
        Prompt(
            number, np.zeros(0, np.int32), row["reward_model"]["ground_truth"], name, row["extra_info"], row["prompt"]
        )
        for number, row in enumerate(pq.read_table(out).to_pylist())
    ]


def play(name: str, python: str, policy: Callable[[int, int], str], **more: Any) -> list[PlayedProgram]:
    options: Options = more.pop("options", {})
    limits = more.pop("limits", LIMITS)
    prompts = prompts_of(
        name, python, json.dumps({key: options[key] for key in ("numbers", "taskset") if key in options})
    )
    return play_program(f"verifiers:{name}", prompts, policy, python=python, options=options, limits=limits)


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
        ("nothing-here", {}, "there is no environment 'nothing-here'"),
        (
            "sums",
            {"agent": {"harness": {"id": "bash"}}},
            "harness 'bash' of agent runs programs that the policy writes",
        ),
        ("sums", {"id": "user-sim"}, "2 of its agents have no endpoint of their own (assistant, user), but one"),
    ],
)
def test_tasksets_that_cannot_be_loaded_say_why(
    tasksets: str, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    with pytest.raises(ConfigError) as refused:
        load_verifiers(name, options, tasksets).check()
    assert message in str(refused.value)
