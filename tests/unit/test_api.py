"""The Python API without a run: its public names, how configs are merged, and the names of functions."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import asyncrl
from asyncrl.api import Run, _start, make_config
from asyncrl.errors import ConfigError
from asyncrl.util.user_code import name_of, resolve


def score(prompt: str, completion: str) -> float:
    return 1.0


class Scorer:
    def score(self) -> float:
        return 1.0


def test_the_public_names_are_there_and_cost_nothing_until_they_are_used() -> None:
    assert all(getattr(asyncrl, name) is not None for name in asyncrl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        asyncrl.trian  # noqa: B018
    code = "import sys, asyncrl; print([name for name in sys.modules if name.startswith('asyncrl.')])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "[]\n"


def test_the_documentation_names_what_is_public() -> None:
    text = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
    assert [name for name in asyncrl.__all__ if f"`{name}" not in text and f"asyncrl.{name}" not in text] == []


BASE = {"model": {"path": "m"}, "data": {"train": "d.parquet"}}


def test_a_config_is_a_dict_a_file_or_an_object_with_overrides_in_either_form(tmp_path: Path) -> None:
    one = make_config(BASE, {"steps": 7, "learner": {"lr": 1e-4}, "replay.max_staleness": 3})
    assert (one.model.path, one.steps, one.learner.lr, one.replay.max_staleness) == ("m", 7, 1e-4, 3)
    assert make_config(one, {}) == one
    assert make_config(one, {"run": "x"}).run == "x"
    file = tmp_path / "mine.yaml"
    file.write_text(one.to_yaml())
    assert make_config(file, {"steps": 8}).steps == 8
    assert make_config("demo", {}).recipe == make_config(None, {}).recipe == "demo"
    assert make_config({**BASE, "data": {"train": tmp_path / "d.parquet"}}, {}).data.train == str(
        tmp_path / "d.parquet"
    )
    with pytest.raises(ConfigError, match=r"learner\.lrr = 1: unknown key"):
        make_config(BASE, {"learner": {"lrr": 1}})


def test_output_is_plain_where_the_environment_claims_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.setenv(name, "1")
    output = tmp_path / "out"
    assert _start(["config", "--config", "demo"], output).wait(60) == 0
    assert "learner.lr = " in output.read_text() and "\x1b" not in output.read_text()


def test_functions_are_passed_by_name() -> None:
    name = f"{__name__}:score"
    assert name_of("rewards", score) == name
    assert resolve("rewards", name, {}) is score
    assert make_config(BASE, {"rewards": score}).rewards == name
    assert make_config(BASE, {"rewards": {"sums": score, "others": "exact"}}).rewards == {
        "sums": name,
        "others": "exact",
    }

    def inner() -> None: ...

    for function in (lambda: None, inner, Scorer().score):
        with pytest.raises(ConfigError, match=r"rewards = .*: other processes cannot import it; define it at the top"):
            make_config(BASE, {"rewards": function})


SCRIPT = """
    import asyncrl

    def score(prompt, completion):
        return 1.0

    print(asyncrl.api.name_of("rewards", score))
    asyncrl.train({"model": {"path": "m"}, "data": {"train": "d.parquet"}}, rewards=score)
"""


def test_a_script_that_is_imported_for_its_reward_does_not_train_again(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(SCRIPT).replace("asyncrl.api.name_of", "id or str"))
    with pytest.raises(ConfigError, match=r"asyncrl.train was called while .*mine.py is imported for its functions"):
        resolve("rewards", f"{tmp_path / 'mine.py'}:score", {})


def test_a_function_of_a_script_is_named_by_its_file_and_one_without_a_file_is_refused(tmp_path: Path) -> None:
    code = "from asyncrl.util.user_code import name_of\ndef score(): ...\nprint(name_of('rewards', score))\n"
    file = tmp_path / "mine.py"
    file.write_text(code)
    assert subprocess.check_output([sys.executable, str(file)], text=True, timeout=60) == f"{file}:score\n"
    done = subprocess.run([sys.executable, "-c", code], text=True, timeout=60, capture_output=True, check=False)
    assert "%%writefile" in done.stderr


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the folder of a run"):
        Run.open(tmp_path)


def test_a_config_that_cannot_work_is_raised_by_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = asyncrl.train({"model": {"path": "missing"}, "data": {"train": "d.parquet"}, "rewards": "exact"})
    with pytest.raises(ConfigError, match=r"model\.path = 'missing': no such folder"):
        run.wait(60.0, show=False)
    assert run.status == "failed"
