"""Rewards that are all 0 are reported after a minute, with samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.errors import JournalError
from asyncrl.observe import sample_watch
from asyncrl.observe.sample_search import Found, Query
from asyncrl.observe.sample_watch import CHECK_AFTER_S, ZeroRewardCheck
from asyncrl.observe.samples import Samples
from asyncrl.observe.stats import OutcomeStats, count_rewards
from asyncrl.replay.codec import pack_group
from asyncrl.types import Lease, Prompt
from tests.helpers.replay import make_group

NONE = {"scored": 0, "failed": 0, "all_zero": True}
ZERO = {"scored": 40, "failed": 2, "all_zero": True}


def config_of(**settings: Any) -> Config:
    return load_config(None, {"model.path": "m", "data.train": "t.parquet", **settings})


def found(run_dir: Path, query: Query) -> Found:
    """Two trajectories of a refunded group, and two of a trained one."""

    group = make_group(Lease(0, 0, Prompt(0, np.arange(3, dtype=np.int32), "1", "test")), 0, rewards=(0.0, 0.0))
    samples = Samples.of_groups([group], outcome="zero_variance" if query.refunded else "trained")
    for name in ("prompt", "completion", "ground_truth"):
        samples = samples.with_column(name, pa.array([f"{name}\x1b" * 100, None], pa.string()))
    return Found(samples, "")


def test_the_run_says_once_that_all_rewards_are_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_watch, "find_samples", found)
    said: list[str] = []
    look = ZeroRewardCheck(tmp_path, config_of(rewards="gsm8k"), said.append)
    look.update(NONE, 0.0)
    look.update(ZERO, 500.0)
    look.update(ZERO, 500.0 + CHECK_AFTER_S - 1)
    assert said == [], "the minute begins with the first rewards"
    look.update(ZERO, 500.0 + CHECK_AFTER_S)
    assert said[0].startswith(
        "warning: all 42 rewards so far are 0, 2 of them because they could not be computed; noth"
    )
    assert len(said) == 5
    assert all("\x1b" not in line and len(line) < 1600 for line in said)
    assert said[1].startswith("  prompt 'prompt") and said[1].endswith("completed, reward 0")
    assert said[4].startswith("Is rewards = 'gsm8k' right") and said[4].endswith(
        f"asyncrl samples {tmp_path} --refunded"
    )
    look.update(ZERO, 9999.0)
    assert len(said) == 5


def test_a_reward_other_than_zero_ends_the_check(tmp_path: Path) -> None:
    said: list[str] = []
    look = ZeroRewardCheck(tmp_path, config_of(rewards="gsm8k"), said.append)
    for now_s, all_zero in ((0.0, True), (9.0, False), (CHECK_AFTER_S, True)):
        look.update(ZERO | {"all_zero": all_zero}, now_s)
    assert said == []


def test_a_journal_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Found:
        raise JournalError("damaged")

    monkeypatch.setattr(sample_watch, "find_samples", fail)
    said: list[str] = []
    look = ZeroRewardCheck(tmp_path, config_of(rewards="gsm8k"), said.append)
    look.update(ZERO, 0.0)
    look.update(ZERO, CHECK_AFTER_S)
    assert said[1] == "  (no samples: damaged)"


@pytest.mark.parametrize(
    ("rewards", "begin"),
    [("environment", "Does any episode"), ({"environment": 1.0, "number": 0.1}, "Is rewards = {'environment': 1.0,")],
)
def test_with_an_environment_it_asks_what_is_to_be_seen_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewards: Any, begin: str
) -> None:
    monkeypatch.setattr(sample_watch, "find_samples", found)
    said: list[str] = []
    look = ZeroRewardCheck(tmp_path, config_of(rewards=rewards, **{"environment.name": "guess"}), said.append)
    for now_s in (0.0, CHECK_AFTER_S):
        look.update(ZERO, now_s)
    assert said[-1].startswith(begin) and "reward_part/calls_failed" in said[-1]
    assert f"asyncrl play --config {tmp_path / 'config.yaml'}. More: asyncrl samples {tmp_path} --ref" in said[-1]


def test_rewards_are_counted_over_all_outcomes() -> None:

    prompt = Prompt(0, np.arange(3, dtype=np.int32), "1", "test")
    outcomes = {name: OutcomeStats() for name in ("trained", "zero_variance")}
    assert count_rewards(outcomes.values()) == NONE
    zero, one = (make_group(Lease(0, 0, prompt), 0, rewards=rewards) for rewards in ((0.0, 0.0), (0.0, 1.0)))
    zero.trajectories[0].error = "broken"
    outcomes["zero_variance"].add(pack_group(zero)[0], [3, 3])
    assert count_rewards(outcomes.values()) == {"scored": 1, "failed": 1, "all_zero": True}
    outcomes["trained"].add(pack_group(one)[0], [3, 3])
    assert count_rewards(outcomes.values()) == {"scored": 3, "failed": 1, "all_zero": False}
