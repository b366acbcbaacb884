"""Reward functions: the built-in ones, both forms of custom ones, and their error texts."""

from __future__ import annotations

import json
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config.config import Config
from asyncrl.data.rows import PromptTable
from asyncrl.errors import ConfigError
from asyncrl.rewards.calling import CompletedGroup
from asyncrl.rewards.math_reward import math_answer
from asyncrl.rewards.table import REWARDS, RewardTable, check_rewards, load_reward
from asyncrl.util import text as redaction


def group(*completions: str, truth: str = "19", source: str = "sums", **extra: object) -> CompletedGroup:
    return CompletedGroup("12+07=", list(completions), [[1]] * len(completions), truth, source, extra)


def rewards(spec: str, *completions: str, truth: str = "19") -> list[float]:
    scores = load_reward(spec)(group(*completions, truth=truth))
    assert [error for _, _, error in scores if error] == []
    return [reward for reward, _, _ in scores]


def make_config(rewards: str, options: dict[str, dict[str, str]]) -> Config:
    values = {"model": {"path": "m"}, "data": {"train": "d"}, "rewards": rewards, "reward_options": options}
    return Config.model_validate(values)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def write(source: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(source))
        return f"{name}:score"

    return write


def test_exact_ignores_only_outer_spaces() -> None:
    assert rewards("exact", "19", " 19\n", "019", "1 9", "") == [1, 1, 0, 0, 0]


def test_an_answer_that_cannot_be_compared_in_time_is_wrong() -> None:
    began_s = time.monotonic()
    assert math_answer(r"so \boxed{9^{9^{9^9}}}", "5", timeout_s=1) == 0.0
    assert math_answer(r"so \boxed{5}", "5", timeout_s=1) == 1.0
    assert time.monotonic() - began_s < 20


def test_a_ground_truth_the_reward_cannot_read_is_an_error_not_a_zero() -> None:
    for spec, truth, cause in (
        ("number", "!?", "the ground truth '!?' is not a number"),
        ("math", "", "not a mathematical expression"),
        ("math", "???", "not a mathematical expression"),
        ("gsm8k", "many", "the ground truth 'many' is not a number"),
        ("choice", "7", "the ground truth '7' is not one of 4 choices, numbered from 0"),
        ("code", "no", "the ground truth 'no' is not JSON; test cases are"),
    ):
        ((reward, _, error),) = load_reward(spec)(group("19", truth=truth))
        assert reward == 0
        assert cause in error and spec in error and "'sums'" in error


def test_sample_form_gives_the_arguments_by_name_and_reads_dicts(write) -> None:
    spec = write("""
        def score(solution_str, extra_info, *, bonus=0.5):
            return {"score": len(solution_str) + bonus, "long": True, "weight": extra_info["w"], "pred": solution_str}
    """)
    assert load_reward(spec)(group("ab", "abc", w=2)) == [
        (2.5, {"long": 1.0, "weight": 2.0}, ""),
        (3.5, {"long": 1.0, "weight": 2.0}, ""),
    ]


def test_verl_signature_with_keyword_catch_all(write) -> None:
    spec = write("""
        def score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
            assert not kwargs
            return data_source == "sums" and solution_str == ground_truth
    """)
    assert load_reward(spec)(group("19", "18")) == [(1.0, {}, ""), (0.0, {}, "")]


def test_group_form_gets_columns_as_lists(write) -> None:
    spec = write("""
        def score(completions, answer, level, **columns):
            assert sorted(columns) == ["completion_ids", "completion_texts", "data_source", "ground_truth",
                                       "log_extra", "log_metric", "max_new_tokens", "prompts", "statuses",
                                       "time_left_s"]
            assert columns["prompts"] == ["12+07="] * 2 and columns["completion_ids"] == [[1], [1]]
            return [(text == right) * size for text, right, size in zip(completions, answer, level)]
    """)
    given = CompletedGroup("12+07=", ["19", "x"], [[1], [1]], "19", "sums", {"level": 3}, "answer")
    assert load_reward(spec)(given) == [(3.0, {}, ""), (0.0, {}, "")]


def from_row(tmp_path: Path, row: dict[str, Any], truth: str, *completions: str) -> CompletedGroup:
    """The completions of a row of JSON lines."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    data = {"train": str(tmp_path / "rows.jsonl"), "columns": {"ground_truth": truth}}
    config = Config.model_validate({"model": {"path": "m"}, "data": data})
    values, name = PromptTable(config)[0], config.data.columns.ground_truth_name
    fields = {"ground_truth_name": name, "columns": values["columns"]}
    texts = list(completions)
    return CompletedGroup(values["prompt"], texts, [[1]] * len(texts), values["ground_truth"], "s", **fields)


def test_columns_keep_their_types_and_the_ground_truth_is_text_under_its_own_name_only(write, tmp_path: Path) -> None:
    number = write("""
        def score(completions, answer, ground_truth, **columns):
            assert ground_truth == [str(truth) for truth in answer]
            return [float(int(t) == truth) if t.strip().isdigit() else 0.0 for t, truth in zip(completions, answer)]
    """)
    given = from_row(tmp_path, {"prompt": "1+1=", "answer": 2}, "answer", "2", "3")
    assert load_reward(number)(given) == [(1.0, {}, ""), (0.0, {}, "")]
    member = write(
        """
        def score(completions, answer, ground_truth):
            assert ground_truth[0] == '["2", "two"]'
            return [float(text in truth) for text, truth in zip(completions, answer)]
    """,
        "lists.py",
    )
    given = from_row(tmp_path, {"prompt": "1+1=", "answer": ["2", "two"]}, "answer", "2", "wo", ", ")
    assert [score for score, _, _ in load_reward(member)(given)] == [1.0, 0.0, 0.0]


def test_a_struct_as_ground_truth_arrives_as_in_verl(write, tmp_path: Path) -> None:
    spec = write("""
        def score(data_source, solution_str, ground_truth, extra_info):
            return float(solution_str in ground_truth["target"])
    """)
    row = {"prompt": "1+1=", "reward_model": {"style": "rule", "ground_truth": {"target": ["2", "two"]}}}
    given = from_row(tmp_path, row, "reward_model.ground_truth", "two", "wo")
    assert load_reward(spec)(given) == [(1.0, {}, ""), (0.0, {}, "")]
    assert load_reward("exact")(given) == [(0.0, {}, ""), (0.0, {}, "")], "which compares with text"
    spec = write("def score(solution_str, ground_truth): return float(solution_str == ground_truth)", "number.py")
    assert load_reward(spec)(from_row(tmp_path, {"prompt": "1=", "a": 2}, "a", "2"))[0] == (1.0, {}, "")


def test_async_functions_are_awaited_those_of_a_prompt_together(write) -> None:
    sample = write("""
        import asyncio
        arrived = []
        async def score(solution_str, ground_truth):
            arrived.append(solution_str)
            while len(arrived) < 3:
                await asyncio.sleep(0.001)
            if solution_str == "x":
                raise ValueError("no verdict")
            return None if solution_str == "-" else {"score": float(solution_str == ground_truth), "loop": 1}
    """)
    assert load_reward(sample)(group("19", "-", "x")) == [
        (1.0, {"loop": 1.0}, ""),
        (None, {}, ""),
        (0.0, {}, f"reward {sample} on data source 'sums': raised ValueError: no verdict"),
    ]
    groups = write(
        """
        import asyncio
        lock = asyncio.Lock()
        class Judge:
            async def __call__(self, completions, **columns):
                async with lock:
                    await asyncio.sleep(0)
                return [float(len(text)) for text in completions]
        score = Judge()
    """,
        "judge.py",
    )
    for _ in range(2):
        assert load_reward(groups)(group("1", "22")) == [(1.0, {}, ""), (2.0, {}, "")], "in one event loop"


def test_what_trl_lets_functions_log_becomes_parts(write) -> None:
    spec = write("""
        def score(completions, log_extra=None, log_metric=None, **columns):
            log_extra("length", [len(text) for text in completions])
            log_extra("text", completions)
            log_metric("mean_length", sum(map(len, completions)) / len(completions))
            return [1.0, {"score": 0.0, "own": 2}, None, "no"]
    """)
    scores = load_reward(spec)(group("1", "22", "333", "4444"))
    assert scores[:3] == [
        (1.0, {"length": 1.0, "mean_length": 2.5}, ""),
        (0.0, {"length": 2.0, "mean_length": 2.5, "own": 2.0}, ""),
        (None, {"length": 3.0, "mean_length": 2.5}, ""),
    ]
    assert "returned 'no' (str), not a finite number" in scores[3][2]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("def score(solution_str):\n    yield 1.0", "is a generator, which yields its rewards; return them instead"),
        ("async def score(completions):\n    yield 1.0", "is a generator, which yields its rewards"),
        (
            "class score:\n    def __call__(self, completions, **columns): return [1.0]",
            r"is a class; make an instance in its file, score = score\(\), and name that",
        ),
    ],
)
def test_what_every_group_would_fail_by_is_refused(write, body: str, text: str) -> None:
    spec = write(body)
    with pytest.raises(ConfigError, match=rf"rewards: mine\.py:score {text}"):
        check_rewards(make_config(spec, {}))


def test_group_form_without_catch_all_gets_what_it_names(write) -> None:
    spec = write(
        "def score(completions, ground_truth): return [float(c == g) for c, g in zip(completions, ground_truth)]"
    )
    assert [s[0] for s in load_reward(spec)(group("19", "1"))] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("1 / 0", "raised ZeroDivisionError: division by zero"),
        ("float('nan')", "returned nan (float), not a finite number"),
        ("float('inf')", "returned inf (float), not a finite number"),
        ("'19'", "returned '19' (str), not a finite number"),
        ("{'reward': 1}", 'returned a dict without "score" (keys: reward)'),
    ],
)
def test_a_bad_sample_reward_fails_its_trajectory_with_name_source_and_cause(write, body: str, cause: str) -> None:
    spec = write(f"def score(solution_str): return {body} if solution_str == 'bad' else 1")
    good, bad = load_reward(spec)(group("good", "bad"))
    assert good == (1.0, {}, "")
    assert bad == (0.0, {}, f"reward mine.py:score on data source 'sums': {cause}")


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("[1.0]", "returned 1 values for 2 completions"),
        ("1.0", "returned 1.0 (float), not a list of 2 numbers"),
        ("{'score': 1}", "returned {'score': 1} (dict), not a list of 2 numbers"),
        ("undefined", "raised NameError: name 'undefined' is not defined"),
    ],
)
def test_a_bad_group_reward_fails_the_group(write, body: str, cause: str) -> None:
    spec = write(f"def score(completions, **columns): return {body}")
    assert load_reward(spec)(group("a", "b")) == [(0.0, {}, f"reward {spec} on data source 'sums': {cause}")] * 2


def test_one_bad_value_of_a_group_reward_fails_one_trajectory(write) -> None:
    spec = write("def score(completions, **columns): return [1, float('nan')]")
    assert [bool(error) for _, _, error in load_reward(spec)(group("a", "b"))] == [False, True]


def test_numbers_of_other_libraries_are_numbers(write) -> None:
    spec = write("import numpy\ndef score(solution_str): return numpy.float32(0.5)")
    assert load_reward(spec)(group("a"))[0][0] == np.float32(0.5)


def test_module_spec_is_found_in_the_working_directory(write) -> None:
    write("def score(solution_str): return 2", name="reward_module_here.py")
    assert rewards("reward_module_here:score", "x") == [2.0]


def test_file_may_import_its_neighbor(write, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write("VALUE = 3", name="sub/reward_neighbor_here.py")
    write("from reward_neighbor_here import VALUE\ndef score(solution_str): return VALUE", name="sub/uses.py")
    assert rewards("sub/uses.py:score", "x") == [3.0]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("exat", "did you mean exact?; one of your own is"),
        ("mine.py:scores", "mine.py has no 'scores'; did you mean score?"),
        ("min.py:score", "no file {folder}/min.py; did you mean mine.py?"),
        ("no_such_package.x:f", "cannot import no_such_package.x: ModuleNotFoundError: No module named"),
        ("mine.py:LIMIT", "mine.py:LIMIT': is a int, not a function"),
        ("mine.py:other", "mine.py:other has the arguments (text, truth): a reward is compute_score("),
        ("mine.py:greedy", "mine.py:greedy needs tokenizer, which a reward does not receive"),
        ("broken.py:score", "broken.py: RuntimeError: no license"),
    ],
)
def test_what_is_missing_is_named(write, tmp_path: Path, spec: str, text: str) -> None:
    write("""
        LIMIT = 3
        def score(solution_str): return 1
        def other(text, truth): return 1
        def greedy(solution_str, tokenizer): return 1
    """)
    write("raise RuntimeError('no license')", name="broken.py")
    with pytest.raises(ConfigError) as raised:
        load_reward(spec)
    assert str(raised.value).startswith("rewards")
    assert text.format(folder=tmp_path) in str(raised.value)


def test_a_missing_column_names_what_there_is(write) -> None:
    spec = write("def score(completions, solution, **columns): return [1]")
    ((_, _, error),) = load_reward(spec)(group("a", level=3))
    assert error == (
        f"reward {spec} on data source 'sums': needs solution, which the data does not have (completion_ids, "
        "completion_texts, completions, data_source, ground_truth, level, max_new_tokens, prompts, statuses, "
        "time_left_s)"
    )


def test_every_built_in_reward_loads_and_is_described() -> None:
    for name in REWARDS:
        assert (load_reward(name).function.__doc__ or "")[:10].strip()


def test_table_picks_by_data_source(write) -> None:
    spec = write("def score(solution_str): return 7")
    table = RewardTable({"sums": "exact", "default": spec})
    assert table(group("19")) == [(1.0, {}, "")]
    assert table(group("19", source="other")) == [(7.0, {}, "")]


def test_table_without_the_data_source_fails_the_trajectories() -> None:
    scores = RewardTable({"sums": "exact", "words": "exact"})(group("a", "b", source="gsm8k"))
    text = "no reward for data source 'gsm8k': rewards has sums, words; add it, or \"default\""
    assert scores == [(0.0, {}, text)] * 2


def test_options_get_the_values_of_environment_variables(write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_registered", set[str]())
    monkeypatch.setenv("JUDGE", "Rumpelstiltskin")
    where = write(
        """
        def score(solution_str, *, header: str = "", retries: int = 0):
            if solution_str == "raises":
                raise RuntimeError(header)
            return float(header == solution_str)
        """
    )
    config = make_config(where, {where: {"header": "Bearer ${JUDGE}, $1"}})
    table = RewardTable(config.rewards, config.reward_options)
    (right, _, _), (wrong, _, _), (_, _, error) = table(group("Bearer Rumpelstiltskin, $1", "${JUDGE}", "raises"))
    assert (right, wrong) == (1.0, 0.0)
    assert error.endswith("RuntimeError: Bearer ***, $1")
    assert "Rumpelstiltskin" not in config.to_yaml() and "Bearer ${JUDGE}, $1" in config.to_yaml()
    with pytest.raises(ConfigError, match=r"mine.py:score.retries = '\*\*\*': input should be a valid integer"):
        load_reward(where, {"retries": "${JUDGE}"})
    monkeypatch.delenv("JUDGE")
    with pytest.raises(ConfigError, match=r"header = 'Bearer \$\{JUDGE\}, \$1': the environment has no JUDGE; export"):
        check_rewards(config)
    assert load_reward("format", {"pattern": "${JUDGE}"}).options == {"pattern": "${JUDGE}"}, "a built-in reward"


def test_no_error_text_has_a_secret(write, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "0123456789abcdef" * 4
    monkeypatch.setenv("JUDGE_API_KEY", key)
    where = write(
        """
        import os
        key = os.environ["JUDGE_API_KEY"]
        def score(solution_str):
            match solution_str:
                case "raises": raise RuntimeError("401 for key " + key)
                case "cut": raise RuntimeError("x" * 270 + key)
                case "text": return "no " + "x" * 50 + key
                case _: return {key: 1}
        """
    )
    errors = [error for _, _, error in load_reward(where)(group("raises", "cut", "text", "keys"))]
    assert "raised RuntimeError: 401 for key ***" in errors[0]
    assert "xxx***" in errors[1] and "xxx***" in errors[2] and "(keys: ***)" in errors[3]
    assert not any(key[:6] in error for error in errors)
