"""`rewards: auto` chooses by data source."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from asyncrl.config import Config, load_config
from asyncrl.errors import ConfigError
from asyncrl.launch.preflight import check_data_and_rewards
from asyncrl.rewards.auto import BY_SOURCE, choose_rewards, describe_choice, known_reward
from asyncrl.rewards.load import REWARDS


def config_for(folder: Path, sources: list[str], **settings: Any) -> Config:
    rows = [{"data_source": source, "prompt": "1+1=", "reward_model": {"ground_truth": "2"}} for source in sources]
    pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
    return load_config(None, {"model.path": "m", "data.train": str(folder / "data.parquet"), **settings})


def checked(config: Config) -> tuple[Any, str]:
    console = Console(file=io.StringIO(), width=80)
    config, _ = check_data_and_rewards(config, console)
    return config.rewards, console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("source", "reward"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("lighteval/MATH", "math"),
        ("lighteval/MATH-Hard", "math"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("math_dapo_reasoning", "math"),
        ("aime2025", "math"),
        ("numina_olympiads", "math"),
        ("codeforces", "code"),
        ("Rowan/hellaswag", "choice"),
        ("arithmetic", "exact"),
        ("my/gsm8k", None),
        ("", None),
    ],
)
def test_a_data_source_has_the_reward_that_is_known_for_it(source: str, reward: str | None) -> None:
    assert known_reward(source) == reward


def test_all_known_rewards_are_built_in() -> None:
    assert set(BY_SOURCE) <= set(REWARDS)


def test_one_reward_or_one_for_each_data_source(tmp_path: Path) -> None:
    config = config_for(tmp_path, ["openai/gsm8k"])
    assert choose_rewards(config, {"openai/gsm8k": 9}) == "gsm8k"
    assert choose_rewards(config, {"openai/gsm8k": 9, "gsm8k": 1}) == "gsm8k"
    chosen = choose_rewards(config, {"openai/gsm8k": 9, "mine": 1})
    assert chosen == {"mine": "exact", "openai/gsm8k": "gsm8k"}


def test_the_choice_is_printed_and_a_guess_is_a_warning(tmp_path: Path) -> None:
    rewards, printed = checked(config_for(tmp_path, ["openai/gsm8k"] * 3 + ["[mine]"] * 2))
    assert rewards == {"[mine]": "exact", "openai/gsm8k": "gsm8k"}
    known, guess = printed.splitlines()
    assert known == "rewards: gsm8k for 'openai/gsm8k' (3 rows), by data source"
    assert guess.startswith(
        "warning: rewards: exact (1 if the completion equals the ground truth, else 0) for the data"
    )
    assert "'[mine]' (2 rows)" in guess and "rewards=file.py:function" in guess
    assert len(describe_choice({"openai/gsm8k": 3})) == len(describe_choice({"mine": 3})) == 1


def test_rewards_that_are_named_stay_and_nothing_is_printed(tmp_path: Path) -> None:
    assert checked(config_for(tmp_path, ["openai/gsm8k"], rewards="number")) == ("number", "")


def test_data_without_ground_truths_needs_a_name(tmp_path: Path) -> None:
    config = config_for(tmp_path, ["mine"], **{"data.columns.ground_truth": None})
    with pytest.raises(ConfigError, match=r"rewards = 'auto': .* null; name a reward, such as rewards=reward_model"):
        checked(config)
