"""The reward of an environment, alone and added to those of functions."""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.launch.checks import check_data_and_rewards
from asyncrl.rewards import reward_worker
from asyncrl.rewards.calling import CompletedGroup, PlayedEpisode, Score
from asyncrl.rewards.pool import RewardPool, Scored
from asyncrl.rewards.reward_worker import score_groups, start_worker
from asyncrl.rewards.table import environment_weight
from tests.helpers.reward_pool import gather, make_config, prompt, save_tokenizer, tokens

FUNCTIONS = """
    def said(solution_str):
        return {"score": 10.0, "lines": solution_str.count("\\n") + 1}

    def seen(completions, completion_texts, completion_ids, environment_rewards):
        assert completion_texts == ["12\\n19", "7"], completion_texts
        assert [len(ids) for ids in completion_ids] == [6, 2], completion_ids
        assert environment_rewards == [{"score": 0.5, "calls": 2.0}, {"score": 1.0}], environment_rewards
        if isinstance(completions[0], str):
            assert completions == completion_texts
            return [1.0, 2.0]
        return [float(sum(one["role"] == "tool" for one in completion)) for completion in completions]

    def fails(solution_str):
        if "7" in solution_str:
            raise ValueError("no")
        return 1.0
"""
CHAT = [{"role": "user", "content": "12+07="}]
MESSAGES = [
    {"role": "assistant", "content": "12"},
    {"role": "tool", "content": "it is 19"},
    {"role": "assistant", "content": "19"},
]
TURNS = [tokens("12"), tokens("19")]
SAID = [*TURNS[0], *TURNS[1]]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.py").write_text(textwrap.dedent(FUNCTIONS))
    save_tokenizer(tmp_path)


def episode(
    *turns: list[int], reward: float = 1.0, error: str = "", messages: object = None, **parts: float
) -> PlayedEpisode:
    said = b"" if messages is None else json.dumps(messages).encode()
    return PlayedEpisode([len(turn) for turn in turns], said, reward, parts, error)


@pytest.fixture
def score(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Score]]:
    """Scores two episodes in this process as a worker does."""
    monkeypatch.setattr(reward_worker, "become_helper", lambda parent: None)

    def run(rewards: Any, *, chat: bool = False, error: str = "") -> list[Score]:
        start_worker(0, make_config(rewards), ".", None)
        first = episode(*TURNS, reward=0.5, calls=2.0, messages=MESSAGES if chat else None)
        second = episode(tokens("7"), error=error, messages=MESSAGES[:1] if chat else None)
        group = CompletedGroup(
            prompt="",
            completions=[],
            completion_ids=[SAID, tokens("7")],
            ground_truth="19",
            data_source="sums",
            chat=CHAT if chat else None,
            statuses=["completed", "truncated"],
            episodes=[first, second],
            prompt_tokens=prompt().tokens.tobytes(),
        )
        _, (scores,) = score_groups([group])
        return scores

    return run


def test_it_is_weighted_and_added_to_what_functions_say_of_the_policys_words(score: Callable[..., list[Score]]) -> None:
    parts = {"environment": 0.5, "environment/calls": 2.0, "f.py:said": 10.0, "f.py:said/lines": 2.0}
    last = {"environment": 1.0, "f.py:said": 10.0, "f.py:said/lines": 1.0}
    assert score({"environment": 2.0, "f.py:said": 0.1}) == [(2.0, parts, ""), (3.0, last, "")]
    assert score("environment") == [(0.5, {"calls": 2.0}, ""), (1.0, {}, "")]
    assert [one[0] for one in score({"sums": {"f.py:said": 1.0}, "default": "environment"})] == [10.0, 10.0]


@pytest.mark.parametrize(("chat", "rewards"), [(False, [1.0, 2.0]), (True, [1.0, 0.0])])
def test_the_form_of_trl_gets_messages_of_a_chat_and_otherwise_the_policys_words(
    score: Callable[..., list[Score]], chat: bool, rewards: list[float]
) -> None:
    assert score("f.py:seen", chat=chat) == [(reward, {}, "") for reward in rewards]


def test_built_in_functions_read_the_policys_words(score: Callable[..., list[Score]]) -> None:
    for chat in (False, True):
        assert [one[0] for one in score("number", chat=chat)] == [1.0, 0.0]
        assert [one[0] for one in score({"format": 1.0, "truncated": 0.5}, chat=chat)] == [0.0, -0.5]


def test_a_failed_function_and_a_failed_environment_leave_their_episode_without_a_reward(
    score: Callable[..., list[Score]],
) -> None:
    both = {"environment": 1.0, "f.py:fails": 1.0}
    good = (1.5, {"environment": 0.5, "environment/calls": 2.0, "f.py:fails": 1.0}, "")
    assert score(both) == [good, (0.0, {}, "reward f.py:fails on data source 'sums': raised ValueError: no")]
    assert score(both, error="it broke") == [good, (0.0, {}, "it broke")], "functions do not see failed episodes"


@pytest.mark.timeout(200)
def test_the_pool_says_how_much_the_environment_counts(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "def late(solution_str):\n"
        "    if solution_str.endswith('7'):\n"
        "        time.sleep(60)\n"
        "    return 1.0\n"
    )
    config = make_config({"sums": {"environment": 0.5, "slow.py:late": 1.0}, "default": "environment"}, 3.0)
    pool = RewardPool(config, tokenizer_path=str(tmp_path))
    completions, statuses = [SAID, tokens("7")], ["completed"] * 2
    episodes = [episode(*TURNS, reward=3.0), episode(tokens("7"))]
    try:
        for key in ("sums", "other"):
            pool.submit(key, completions, prompt(key), statuses, episodes=episodes)
        scored = gather(pool, 2)
    finally:
        pool.close()
    text = "reward environment + slow.py:late on data source 'sums': took longer than generator.reward_timeout_s = 3 s"
    parts = {"environment": 3.0, "slow.py:late": 1.0}
    assert scored["sums"] == Scored("sums", [2.5, 0.0], [parts, {}], ["", text], 0.5)
    assert scored["other"] == Scored("other", [3.0, 1.0], [{}, {}], ["", ""], 1.0)


def test_its_weight_is_that_of_the_data_source() -> None:
    table = {"a": "environment", "b": {"environment": 0.5, "exact": 1.0}, "c": "exact"}
    assert [environment_weight(table, source) for source in "abcd"] == [1.0, 0.5, 0.0, 0.0]
    assert environment_weight("environment", "a") == 1.0


def config_for(folder: Path, **settings: Any) -> Config:
    rows = [{"data_source": source, "prompt": "1+1=", "reward_model": {"ground_truth": "2"}} for source in ("a", "b")]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return load_config(None, {"model.path": "m", "data.train": str(folder / "rows.parquet"), **settings})


def checked(config: Config) -> tuple[Config, str]:
    console = Console(file=io.StringIO(), width=200)
    config, _ = check_data_and_rewards(config, console)
    return config, console.file.getvalue()  # type: ignore[attr-defined]


def test_it_is_the_default_with_an_environment(tmp_path: Path) -> None:
    guess = {"environment.name": "guess"}
    config, printed = checked(config_for(tmp_path, **guess))
    assert (config.rewards, config.has_reward_functions, printed) == ("environment", False, "")
    assert not config_for(tmp_path, **guess).has_reward_functions and config_for(tmp_path).has_reward_functions
    config, printed = checked(config_for(tmp_path, **guess, rewards={"environment": 1.0, "number": 0.5}))
    assert config.has_reward_functions and printed == ""
    config, printed = checked(config_for(tmp_path, **guess, **{"eval.rewards": "exact"}))
    assert (config.rewards, config.eval.rewards, config.has_reward_functions) == ("environment", "exact", True)
    warning = "rewards: the reward of the environment does not count; environment: 1.0 adds it\n"
    assert printed == f"warning: eval.{warning}"
    assert checked(config_for(tmp_path, **guess, rewards={"a": "exact", "b": "number"}))[1] == f"warning: {warning}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rewards": "environment"}, r"^rewards = 'environment': .*there is none; set environment\.name"),
        ({"rewards": {"a": "exact", "b": {"environment": 1.0}}}, r"^rewards = .*set environment\.name"),
        ({"eval.rewards": {"environment": 1.0}, "data.eval": "rows.parquet"}, r"^eval\.rewards = {'environment': 1\.0"),
        ({"rewards": {"enviroment": 1.0}, "environment.name": "guess"}, "did you mean environment"),
        ({"rewards": {"environment": 1.0, "overlong": 1.0}, "environment.name": "guess"}, "is the limit of a turn"),
        (
            {"rewards": {"a": {"environment": 1.0}}, "environment.name": "guess"},
            r"^rewards: no reward for data source 'b'",
        ),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(config_for(tmp_path, **settings))
