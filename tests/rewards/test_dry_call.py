"""Custom reward functions are called before the start: certain faults are errors, possible ones warnings."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from asyncrl.config.config import Config
from asyncrl.data.tiny_model import make_tokenizer
from asyncrl.errors import ConfigError
from asyncrl.rewards.calling import CompletedGroup
from asyncrl.rewards.dry_call import dry_call, is_bug, made_up
from asyncrl.rewards.table import RewardTable
from asyncrl.types import Prompt

PROMPT = Prompt(0, np.array([3, 4], np.int32), "19", "sums", {"level": 3}, columns={"label": 4}, text="12+07=")
NAME = "mine.py:score"
TEXT = made_up(PROMPT)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    monkeypatch.chdir(tmp_path)
    return lambda source: (tmp_path / "mine.py").write_text(textwrap.dedent(source)) and None


@pytest.fixture
def error_of(write: Callable[[str], None]) -> Callable[[str], str]:
    """Returns the error text that the made-up completion gets from a function."""

    def error_of(source: str) -> str:
        write(source)
        group = CompletedGroup(PROMPT.text, [TEXT], [[1]], "19", "sums", PROMPT.extra_info, columns=PROMPT.columns)
        ((_, _, error),) = RewardTable({NAME: 1.0})(group)
        assert error
        return error

    return error_of


def make_config(rewards: object, timeout_s: float = 10.0, environment: str | None = None) -> Config:
    values = {"model": {"path": "."}, "data": {"train": "d"}, "rewards": rewards, "environment": {"name": environment}}
    return Config.model_validate({**values, "generator": {"reward_timeout_s": timeout_s}})


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("def score(completions, solutoin): return [1.0]", "needs solutoin, which the data does not have"),
        ("def score(solution_str, extra_info): return extra_info['levle']", "raised KeyError: 'levle'"),
        ("def score(solution_str): return math.sqrt(4)", "raised NameError: name 'math' is not defined"),
        ("def score(solution_str): import nothing", "raised ModuleNotFoundError"),
        ("def score(solution_str): return solution_str.lenght", "raised AttributeError: 'str' object has no attribute"),
        (
            "def score(completions, **columns): return [c[0]['content'] for c in completions]",
            "raised TypeError: string",
        ),
        ("def score(solution_str): return 'good'", "returned 'good' (str), not a finite number"),
        ("def score(completions): return 1.0", "returned 1.0 (float), not a list of 1 numbers"),
        ("def score(completions): return []", "returned 0 values for 1 completions"),
        ("def score(solution_str): return {'acc': 1}", 'returned a dict without "score"'),
        ("async def score(solution_str): return ground_truth", "raised NameError"),
    ],
)
def test_what_is_wrong_with_function_or_columns_is_an_error(
    error_of: Callable[[str], str], source: str, cause: str
) -> None:
    error = error_of(source)
    assert error.startswith(f"reward mine.py:score on data source 'sums': {cause}") and is_bug(error, TEXT)
    assert is_bug(f"reward other.py:f on data source 'sums': raised ValueError: no; {error}", TEXT), "in a sum"


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import re\ndef score(solution_str): return re.search('x=(.)', solution_str).group(1)", "AttributeError"),
        ("import re\ndef score(solution_str): return re.search('x=(.)', solution_str)[1]", "TypeError"),
        ("import json\ndef score(solution_str): return json.loads(solution_str)['score']", "JSONDecodeError"),
        ("def score(solution_str): return float({'A': 1}[solution_str.split()[0]])", "KeyError"),
        ("def score(solution_str): return float(solution_str.split('####')[1])", "IndexError"),
        ("def score(solution_str): raise ConnectionError('no judge')", "ConnectionError: no judge"),
        ("def score(solution_str): return None", "all returned None (does not apply)"),
    ],
)
def test_what_a_completion_may_be_the_cause_of_is_a_warning(
    error_of: Callable[[str], str], source: str, cause: str
) -> None:
    error = error_of(source)
    assert cause in error and not is_bug(error, TEXT)


def test_functions_are_called_by_a_worker_with_the_time_limit_of_the_run(
    write: Callable[[str], None], tmp_path: Path
) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    write("""
        import os, time
        open(f"pid-{os.getpid()}", "w").close()
        def score(prompts, completions, label, level, data_source, statuses, **columns):
            if data_source[0] == "slow":
                time.sleep(60)
            if data_source[0] == "gone":
                os._exit(3)
            assert (prompts, label, level, statuses) == (["12+07="] * 2, [4] * 2, [3] * 2, ["completed"] * 2)
            return [0.25, 0.25]
    """)
    config = make_config({"sums": {NAME: 1.0, "exact": 1.0}, "slow": NAME, "gone": NAME, "other": "exact"}, 0.5)
    prompts = [structs.replace(PROMPT, data_source=source) for source in ("other", "slow", "sums")]
    given, warnings = dry_call(config, prompts, make_tokenizer())
    assert given == [f"{NAME} gives 0.25 for {TEXT!r}"]
    assert len(warnings) == 1 and "'slow': took longer than generator.reward_timeout_s = 0.5 s" in warnings[0]
    assert list(tmp_path.glob("pid-*")) and not (tmp_path / f"pid-{os.getpid()}").exists()
    with pytest.raises(
        ConfigError, match=r"^rewards: a made-up completion, .* ended its worker process \(exit code 3\)$"
    ):
        dry_call(config, [structs.replace(PROMPT, data_source="gone")], make_tokenizer())


def test_of_an_episode_there_are_only_warnings_and_built_in_rewards_are_not_called(
    write: Callable[[str], None], tmp_path: Path
) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    write("def score(completions, environment_rewards): return [one['calls'] for one in environment_rewards]")
    _, warnings = dry_call(
        make_config({"environment": 1.0, NAME: 1.0}, environment="guess"), [PROMPT], make_tokenizer()
    )
    assert len(warnings) == 1 and warnings[0].endswith("raised KeyError: 'calls'")
    for config in (make_config("reward_model"), make_config("environment", environment="guess")):
        assert dry_call(config, [PROMPT], make_tokenizer()) == ([], [])
