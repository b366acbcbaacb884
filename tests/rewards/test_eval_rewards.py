"""A reward of evaluations that is not that of training."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from asyncrl.cli.evaluate import check_evaluation
from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.launch.checks import check_data_and_rewards
from asyncrl.rewards.pool import RewardPool
from asyncrl.rewards.reward_model import check_failed, model_options, uses_reward_model
from asyncrl.rewards.table import evaluation_config
from tests.helpers.reward_pool import gather, make_config, prompt, save_tokenizer, tokens

LENGTHS = "def score(completions, *, scale: float = 1.0):\n    return [scale * len(one) for one in completions]\n"


def config_for(folder: Path, **settings: Any) -> Config:
    truths = {"train": "2", "eval": '["assert f() == 1"]'}
    for name, source in (("train", "openai/gsm8k"), ("eval", "codeforces")):
        rows = [{"data_source": source, "prompt": "1+1=", "reward_model": {"ground_truth": truths[name]}}]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    files = {"data.train": str(folder / "train.parquet"), "data.eval": str(folder / "eval.parquet")}
    return load_config(None, {"model.path": "m", **files, **settings})


def checked(config: Config) -> tuple[Config, list[str]]:
    console = Console(file=io.StringIO(), width=200)
    config, _ = check_data_and_rewards(config, console)
    return config, console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_by_default_it_is_that_of_training(tmp_path: Path) -> None:
    config = config_for(tmp_path, rewards="number", reward_options={"number": {}})
    assert evaluation_config(config) is config
    config, _ = checked(config_for(tmp_path))
    assert config.rewards == {"codeforces": "code", "openai/gsm8k": "gsm8k"} and config.eval.rewards is None


def test_each_is_chosen_and_checked_for_its_own_data(tmp_path: Path) -> None:
    config, printed = checked(config_for(tmp_path, **{"eval.rewards": "auto"}))
    assert (config.rewards, config.eval.rewards) == ("gsm8k", "code")
    assert printed == [
        "rewards: gsm8k for 'openai/gsm8k' (1 rows), by data source",
        "eval.rewards: code for 'codeforces' (1 rows), by data source",
    ]
    again = config_for(tmp_path, **{"eval.rewards": "auto"}).with_choices_of(config)
    assert (again.rewards, again.eval.rewards) == ("gsm8k", "code")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eval.rewards": "gsm9k"}, r"^eval\.rewards = 'gsm9k'"),
        ({"eval.rewards": {"openai/gsm8k": "gsm8k"}}, r"^eval\.rewards: no reward for data source 'codeforces'"),
        (
            {"eval.rewards": "number", "reward_options": {"exact": {}}},
            r"^reward_options\.exact: rewards does",
        ),
        (
            {"eval.rewards": "choice", "reward_options": {"choice": {"choices": 99}}},
            r"^eval\.reward_options\.choice",
        ),
        ({"rewards": {"codeforces": "code"}, "eval.rewards": "code"}, r"^rewards: no reward for data source 'openai/"),
    ],
)
def test_errors_name_the_key(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(config_for(tmp_path, **settings))


def test_functions_have_the_options_by_their_names() -> None:
    config = make_config("exact", options={"f.py:score": {"scale": 2.0}, "exact": {}})
    section = config.eval.model_copy(update={"rewards": {"f.py:score": 1.0}})
    evaluated = evaluation_config(config.model_copy(update={"eval": section}))
    assert evaluated.reward_options == {"f.py:score": {"scale": 2.0}} and evaluated.eval.rewards is None


@pytest.mark.timeout(200)
def test_the_workers_score_evaluations_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path)
    (tmp_path / "mine.py").write_text(LENGTHS)
    config = make_config("exact", options={"mine.py:score": {"scale": 10.0}})
    section = config.eval.model_copy(update={"rewards": {"default": "mine.py:score"}})
    pool = RewardPool(config.model_copy(update={"eval": section}), tokenizer_path=str(tmp_path))
    try:
        for key, evaluation in (("training", False), ("evaluation", True)):
            pool.submit(key, [tokens("19"), tokens("123")], prompt(), ["completed"] * 2, evaluation=evaluation)
        scored = gather(pool, 2)
    finally:
        pool.close()
    assert scored["training"].rewards == [1.0, 0.0]
    assert scored["evaluation"].rewards == [20.0, 30.0]


def test_one_reward_model_serves_both() -> None:
    config = make_config("exact")
    assert not uses_reward_model(config)
    for training in ("exact", "reward_model"):
        config = make_config(training, options={"reward_model": {"path": "a"}})
        both = config.model_copy(update={"eval": config.eval.model_copy(update={"rewards": "reward_model"})})
        assert uses_reward_model(both) and model_options(both) == {"path": "a"}


@pytest.mark.parametrize("rewards", ["reward_model", {"default": {"exact": 1.0, "reward_model": 0.5}}])
def test_a_completion_that_the_reward_model_cannot_score_has_no_reward_of_0(rewards: Any) -> None:
    for failed in ("exclude", "refund", "zero"):
        config = make_config(rewards)
        config = config.model_copy(update={"replay": config.replay.model_copy(update={"failed": failed})})
        if failed != "zero":
            check_failed(config)
            continue
        with pytest.raises(ConfigError, match=r"^replay.failed = 'zero': .* use exclude or refund"):
            check_failed(config)
        evaluated = config.eval.model_copy(update={"rewards": rewards})
        check_failed(config.model_copy(update={"rewards": "exact", "eval": evaluated}))


def test_the_command_evaluates_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.cli.evaluate.check_model", lambda config: 100)
    config = config_for(tmp_path, rewards={"openai/gsm8k": "gsm8k"}, **{"eval.rewards": "auto"})
    room, config = check_evaluation(config, Console(quiet=True))
    assert (room, config.rewards, config.eval.rewards) == (100, "code", None)
