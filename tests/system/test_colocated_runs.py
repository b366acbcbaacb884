"""Complete runs whose generator and learner use the cores in turn (`launch.colocate`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.helpers.runs import SMALL, Launched, check_ledger

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]

Start = Callable[..., Launched]
EVALUATION = ["data.eval=demo/arithmetic.parquet", "eval.samples=2", "eval.max_prompts=20", "eval.every_steps=4"]


def turns_of(run: Launched) -> list[tuple[str, str]]:
    """The times at which a role released the device, and which."""
    names = {"device released": "learner-0", "engine sleeps": "generator-0"}
    events = [(event, role) for role in names.values() for event in run.events(role)]
    return sorted((event["timestamp"], role) for event, role in events if names.get(event["event"]) == role)


def check(run: Launched, output: str, steps: int) -> dict[str, Any]:
    summary = run.summary()
    assert (summary["status"], summary["policy_version"]) == ("finished", steps), output
    check_ledger(summary)
    assert run.left_over() == []
    rows = [row for row in run.rows() if "learner/step_s" in row]
    assert len(rows) >= steps
    assert all({"card/learner_s", "card/generator_s", "card/wait_s", "card/offload_s"} <= row.keys() for row in rows)
    return summary


def test_the_roles_take_turns(launch: Start) -> None:
    run = launch(*SMALL, *EVALUATION, "--steps", "10", "launch.colocate=on", "--max-staleness", "2")
    code, output = run.end(200)
    assert code == 0, output
    summary = check(run, output, 10)
    assert [one["version"] for one in summary["eval"]] == [0, 4, 8, 10]
    turns = turns_of(run)
    assert all(one != other for (_, one), (_, other) in pairwise(turns[2:])), turns
    assert 0 < summary["weight_sync"]["count"] <= 10


def test_versions_are_handed_over_on_the_card(launch: Start) -> None:
    run = launch(*SMALL, *EVALUATION, "--steps", "6", "launch.colocate=on", "weights.transport=ipc")
    code, output = run.end(200)
    assert code == 0, output
    summary = check(run, output, 6)
    assert [one["version"] for one in summary["eval"]] == [0, 4, 6]
    rows = [row for row in run.rows() if "learner/step_s" in row]
    assert sum(row["card/hand_over_s"] for row in rows) > 0 == sum(row["weights/dropped"] for row in rows)


@pytest.mark.parametrize("transport", ["auto", "ipc"])
def test_a_killed_role_gets_its_turn_again(transport: str, launch: Start) -> None:
    settings = [*SMALL, "--steps", "12", "launch.colocate=on", "--max-staleness", "0", "generator.engine=transformers"]
    run = launch(*settings, f"weights.transport={transport}")
    for step, role in ((2, "generator-0"), (5, "learner-0")):
        run.wait_for_step(step)
        os.kill(run.pid(role), signal.SIGKILL)
    code, output = run.end(250)
    assert code == 0, output
    summary = check(run, output, 12)
    assert summary["staleness"]["max"] == 0
    assert sum(summary["restarts"].values()) == 2
