"""Recorded samples of episodes: what the policy said and what it heard are told apart, with the rewards of turns."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from rich.console import Console

from asyncrl.cli.show_samples import show_group, show_samples
from asyncrl.config.load import load_config
from asyncrl.environments import Environment, Step
from asyncrl.environments.dialogue.dialogue import Dialogue
from asyncrl.environments.table import Named
from asyncrl.observe.document import run_document
from asyncrl.observe.sample_search import Query, find_samples, page_samples
from asyncrl.observe.sample_watch import ShownSamples
from asyncrl.observe.samples import SampleBook
from asyncrl.types import EpisodeOutcome, Group, Trajectory
from tests.helpers.chat_models import save_chat_model
from tests.helpers.played import Played


class Twice(Environment):
    """Asks a second time."""

    def step(self, action: Any) -> Any:
        return Step(reward=1.0, done=True) if action.turn else Step("Again?", reward=-0.5)


def recorded(folder: Path, *, chat: bool) -> Path:
    """A run with a recorded group of one episode of two rows, of which the second has only its first turn."""
    save_chat_model(folder / "model")
    dialogue = Dialogue(str(folder / "model"), trust_remote_code=False, max_observation_tokens=200)
    start = {} if chat else {"chat": None}
    played = Played(dialogue, Named(Twice, {}), ["one", "two"], start)
    mask = np.array(played.said)
    rewards = played.ended.turn_rewards
    outcome = EpisodeOutcome("done", rewards, 3, 0.0, 0, 0)
    tokens = np.array(played.tokens, dtype=np.int32)
    zeros = np.zeros(len(tokens), dtype=np.float32)
    row = Trajectory(
        tokens, mask, zeros, np.where(mask, 3, -1).astype(np.int32), "completed", 0.5, member=0, episode=outcome
    )
    end = int(np.flatnonzero(np.diff(mask))[1]) + 1
    arrays = {name: getattr(row, name)[:end] for name in ("tokens", "action_mask", "behavior_logprobs", "versions")}
    branch = replace(row, **arrays, episode=structs.replace(outcome, turn_rewards=rewards[:1]))
    run_dir = folder / "runs" / "r"
    run_dir.mkdir(parents=True)
    settings = {"model.path": str(folder / "model"), "data.train": "gone.parquet", "environment.name": "guess"}
    (run_dir / "config.yaml").write_text(load_config(None, settings).to_yaml())
    SampleBook(run_dir).record(4, [Group(7, 0, 0, 0, "test", 3, 3, [row, branch])])
    return run_dir


@pytest.mark.parametrize(
    ("chat", "prompt", "heard", "policy"),
    [
        (True, ["user        Go."], "user        Again?", "assistant"),
        (False, ["prompt      Go."], "environment Again?", "policy"),
    ],
)
def test_turns_are_told_apart_everywhere(
    tmp_path: Path, chat: bool, prompt: list[str], heard: str, policy: str
) -> None:
    run_dir = recorded(tmp_path, chat=chat)
    console = Console(file=io.StringIO(), width=200)
    query = Query(limit=1)
    show_samples(run_dir, query, console, special_tokens=False, as_json=False, out=None)
    lines = [line.strip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    turns = [f"{policy:<12}one   reward -0.5", heard, f"{policy:<12}two   reward 1"]
    facts = "step 4 · ticket 7.0 · test · reward 0.5 · staleness 0 · completed"
    assert lines[0].startswith(facts) and lines[1:5] == [*prompt, *turns]
    assert lines[6].startswith("step 4 · ticket 7.1 (member 0) · test") and lines[7:9] == [*prompt, turns[0]]
    assert len(find_samples(run_dir, query).samples) == 2, "all rows of one member"

    console = Console(file=io.StringIO(), width=200)
    show_group(run_dir, 7, console, special_tokens=False)
    lines = [line.strip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert lines[1] == prompt[0] and lines[3:6] == turns and lines[7:] == turns[:1]
    console = Console(file=io.StringIO(), width=200)
    show_group(run_dir, 7, console, special_tokens=True)
    assert "one<|im_end|>   reward -0.5" in console.file.getvalue()  # type: ignore[attr-defined]

    (shown,) = ShownSamples(run_dir, load_config(run_dir / "config.yaml")).update()
    assert (shown.prompt, shown.completion) == ("Go.", "one [Again?] two")
    document = run_document(run_dir, {}, samples=page_samples(run_dir))
    first, second = document["samples"]["trained"]
    said = [(line["text"], line["said"], line["reward"]) for line in first["conversation"]]
    assert said == [("Go.", False, None), ("one", True, -0.5), ("Again?", False, None), ("two", True, 1.0)]
    assert len(second["conversation"]) == 2


def test_a_step_with_rows_that_is_recorded_again_is_there_once(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path, chat=False)
    file = run_dir / "samples" / "trained.jsonl"
    file.write_text(file.read_text() * 2)
    assert find_samples(run_dir, Query()).samples["index"].tolist() == [0, 1]
