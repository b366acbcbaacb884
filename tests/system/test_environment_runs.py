"""Runs with an environment: complete launches with real hosts, some of whose episodes fail, and their evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from asyncrl.data.demo import make_demo_rows
from asyncrl.replay.history import JournalBatches
from tests.helpers.runs import SMALL, Launched

pytestmark = pytest.mark.system

FRAGILE = """
import os
from asyncrl.environments import Environment, Step

class Fragile(Environment):
    def reset(self):
        self.turns = self.random.choice((1, 2, 3))
        self.dice = __import__("random").Random()

    def step(self, action):
        if self.dice.random() < 0.05:
            raise OSError("the tool failed")
        if self.dice.random() < 0.002:
            os._exit(9)
        odd = sum(map(ord, action.text)) % 2
        return Step(">", reward=float(odd), done=action.turn == self.turns, parts={"odd": odd})

    async def reward(self):
        return {"score": 0.5, "asked": 1.0}
"""


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    make_demo_rows("guess", tmp_path / "guess.parquet")
    (tmp_path / "fragile.py").write_text(FRAGILE)
    return [f"data.train={tmp_path / 'guess.parquet'}", f"environment.name={tmp_path / 'fragile.py'}:Fragile"]


@pytest.mark.slow
def test_a_run_with_failing_environments_loses_nothing(
    launch: Callable[..., Launched], asyncrl: Callable[..., str], settings: list[str], tmp_path: Path
) -> None:
    """Every finished group is trained once or refunded with its reason; the journal has exact episodes."""
    run = launch(
        "--steps", "12", *SMALL, *settings, "journal.retention=all", f"data.eval={tmp_path / 'guess.parquet'}",
        "environment.hosts=2",
    )  # fmt: skip
    code, output = run.end(timeout_s=200)
    assert code == 0, output
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    asyncrl("ledger", str(run.run_dir))  # exit code 0: everything adds up
    rows = [row for row in run.rows() if "learner/tokens" in row]
    evaluated = {name for row in run.rows() for name in row if name.startswith("eval/")}
    assert [row["step"] for row in rows] == list(range(1, 13))
    scored = [row for row in rows if "environment/turns" in row]  # no group is scored during some steps
    assert max(row["environment/turns"] for row in scored) > 1.0 and scored[-1]["reward_part/asked"] == 1.0
    assert any(row["environment/tries"] > 0 for row in scored)
    assert "eval/reward" in evaluated
    trace = pq.read_table(run.run_dir / "trace.parquet").to_pylist()
    assert {row["outcome"] for row in trace} <= {"trained", "zero_variance", "environment", "in_flight"}
    batches = JournalBatches(run.run_dir / "journal", 0, ranks=1)
    for step in range(1, 13):
        shard = batches.take(step)
        assert shard is not None
        for group in shard.groups:
            scored = [member for member in group.trajectories if member.status != "failed"]
            turns = {len(member.episode.turn_rewards) for member in scored if member.episode is not None}
            assert len(scored) > 1 and len(turns) == 1, "the members of a group have the same task"
            for member in scored:
                member.check()
                assert member.episode is not None and member.status in ("completed", "truncated")
                assert member.reward == pytest.approx(0.5 + sum(member.episode.turn_rewards))
                runs = (member.action_mask[1:] & ~member.action_mask[:-1]).sum()
                assert runs == len(member.episode.turn_rewards)
    out = tmp_path / "results.json"
    asyncrl("eval", "--config", str(run.run_dir / "config.yaml"), f"--out={out}", timeout_s=150.0)
    assert len(json.loads(out.read_text())["prompts"]) == 20


@pytest.mark.slow
def test_rewards_and_environments_by_data_source_are_added(
    launch: Callable[..., Launched], asyncrl: Callable[..., str], settings: list[str], tmp_path: Path
) -> None:
    """A function scores the texts in `guess` in addition to the environment; evaluations have the function only."""
    products = tmp_path / "calculator.parquet"
    make_demo_rows("calculator", products, rows=16)
    (tmp_path / "words.py").write_text(
        "def words(solution_str):\n    return {'score': 1.0, 'turns': solution_str.count(chr(10)) + 1}\n"
    )
    words, fragile = f"{tmp_path / 'words.py'}:words", settings[1].partition("=")[2]
    run = launch(
        "--steps", "4", *SMALL, "journal.retention=all", "algorithm.advantage=turn_grpo", "replay.zero_variance=train",
        f"data.train=[{tmp_path / 'guess.parquet'},{products}]", "data.weights=[1,1]",
        f"data.eval={products}", f"environment.name={{calculator: calculator, default: {fragile}}}",
        f"rewards={{calculator: environment, default: {{environment: 0.5, '{words}': 0.25}}}}", f"eval.rewards={words}",
    )  # fmt: skip
    code, output = run.end(timeout_s=200)
    assert code == 0, output
    asyncrl("ledger", str(run.run_dir))
    batches, seen = JournalBatches(run.run_dir / "journal", 0, ranks=1), set[str]()
    for step in range(1, 5):
        shard = batches.take(step)
        assert shard is not None
        for group in shard.groups:
            for member in group.trajectories:
                if member.status == "failed":
                    continue
                assert member.episode is not None and not member.error
                given, parts = sum(member.episode.turn_rewards), member.reward_parts
                seen.add(group.data_source)
                if group.data_source == "calculator":
                    assert set(parts) == {"calls"}
                    continue
                assert parts["environment"] == pytest.approx(0.5 + 2 * given) and parts["environment/asked"] == 1.0
                assert parts[f"{words}/turns"] == len(member.episode.turn_rewards)
                assert member.reward == pytest.approx(0.5 * parts["environment"] + 0.25)
    assert len(seen) == 2
    (evaluated, *_) = [row for row in run.rows() if "eval/reward" in row]
    assert evaluated["eval/reward"] == 1.0
    assert "  policy      " in asyncrl("samples", str(run.run_dir), "--eval")
    out = tmp_path / "results.json"
    asyncrl("eval", "--config", str(run.run_dir / "config.yaml"), f"--out={out}", timeout_s=150.0)
    assert {reward for prompt in json.loads(out.read_text())["prompts"] for reward in prompt["rewards"]} == {1.0}


@pytest.mark.slow
def test_play_prints_turns_rewards_and_errors(asyncrl: Callable[..., str], settings: list[str], tmp_path: Path) -> None:
    guess = [settings[0], "environment.name=guess", "model.path=demo/model"]
    shown = asyncrl("play", "--config", "guess", *guess, "--rows", "1", "--say", "10", "--say", "25")
    assert "policy  10" in shown and "environment  ?=" in shown
    assert "truncated (max_turns): reward 0" in shown or "completed (done): reward 1" in shown
    by_model = asyncrl("play", "--config", "guess", *guess, "--rows", "2")
    assert by_model.count("row ") == 2 and "policy" in by_model
