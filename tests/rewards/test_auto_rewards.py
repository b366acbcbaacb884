"""`rewards: auto` chooses by data source."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError, DataError
from asyncrl.launch import checks as preflight
from asyncrl.launch.checks import check_data_and_rewards
from asyncrl.rewards.table import BY_SOURCE, REWARDS, choose_rewards, describe_choice, known_reward


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


def write_truths(folder: Path, source: str, truths: list[Any], **settings: Any) -> Config:
    rows = [{"data_source": source, "prompt": "?", "reward_model": {"ground_truth": truth}} for truth in truths]
    pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
    return load_config(None, {"model.path": "m", "data.train": str(folder / "data.parquet"), **settings})


CASES = json.dumps({"inputs": ["1"], "outputs": ["1"]})


@pytest.mark.parametrize(
    ("source", "readable", "unreadable", "cause"),
    [
        (
            "openai/gsm8k",
            ["7", "1,234", "3+4=7\n#### 7"],
            "42 apples",
            "gsm8k: the ground truth '42 apples' is not a num",
        ),
        (
            "HuggingFaceH4/MATH-500",
            ["7", r"\frac{1}{2}", r"0.\overline{3}"],
            "???",
            "math: the ground truth '???' is not",
        ),
        ("cais/mmlu", ["0", "3", "D"], "E", "choice: the ground truth 'E' is not one of 4 choices"),
        (
            "allenai/ai2_arc",
            ["1", "4", "A", "E"],
            "0",
            "choice: the ground truth '0' is not one of 5 choices, numbered f",
        ),
        ("TIGER-Lab/MMLU-Pro", list("ABCDEFGHIJ"), "K", "choice: the ground truth 'K' is not one of 10 choices"),
        ("apps", [CASES], "print", "code: the ground truth 'print' is not JSON"),
    ],
)
def test_every_ground_truth_is_read_before_the_start(
    tmp_path: Path, source: str, readable: list[str], unreadable: str, cause: str
) -> None:
    checked(write_truths(tmp_path, source, readable * 2))
    with pytest.raises(DataError) as caught:
        checked(write_truths(tmp_path, source, [*readable, unreadable, *readable]))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/data.parquet, row {len(readable)}: 'reward_model.ground_truth': rewards: ")
    assert cause in message and "another reward for data source" in message and "\n" not in message


def test_rows_of_evaluations_are_read_by_their_own_rewards(tmp_path: Path) -> None:
    settings = {"rewards": "exact", "data.eval": str(tmp_path / "data.parquet")}
    checked(write_truths(tmp_path, "mine", ["7", "many"], **settings))
    with pytest.raises(DataError, match=r"row 1: .*rewards: number: the ground truth 'many' is not a number"):
        checked(write_truths(tmp_path, "mine", ["7", "many"], **settings, **{"eval.rewards": "number"}))


def test_a_row_that_the_filter_drops_may_have_any_ground_truth(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def keep(row):\n    return row['reward_model']['ground_truth'] != 'many'\n")
    filtered = {"rewards": "number", "data.custom.filter": f"{tmp_path}/mine.py:keep"}
    checked(write_truths(tmp_path, "mine", ["7", "many", "8"], **filtered))
    with pytest.raises(DataError, match=r"row 2: .*'much' is not a number"):
        checked(write_truths(tmp_path, "mine", ["7", "many", "much"], **filtered))


def test_options_decide_what_can_be_read(tmp_path: Path) -> None:
    options = {"rewards": {"choice": 1.0, "truncated": 0.1}, "reward_options": {"choice": {"choices": 7}}}
    checked(write_truths(tmp_path, "mine", list("ABCDEFG"), **options))
    with pytest.raises(DataError, match=r"'H' is not one of 7 choices.*reward_options.choice.choices"):
        checked(write_truths(tmp_path, "mine", list("ABCDEFGH"), **options))


def test_ground_truths_that_take_too_long_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "TRUTHS_S", 0)
    _, printed = checked(write_truths(tmp_path, "mine", ["many"], rewards="number"))
    assert printed.startswith("warning: ground truths from ") and "row 0 on are parsed when they are used" in printed


@pytest.mark.parametrize("reward", ["exact", "number", "math", "code"])
def test_a_reward_that_compares_needs_ground_truths(tmp_path: Path, reward: str) -> None:
    config = config_for(tmp_path, ["mine"], **{"data.columns.ground_truth": None, "rewards": reward})
    with pytest.raises(
        ConfigError, match=f"{reward} compares with a ground truth, and data.columns.ground_truth is null"
    ):
        checked(config)


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
