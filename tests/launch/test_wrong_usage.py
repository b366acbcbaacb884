"""Unusable files, and commands on files of somebody else: an error of one line, exit code 2, and no lost data."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from asyncrl.config import load_config
from asyncrl.data import tiny_model
from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.errors import ConfigError
from asyncrl.launch import checks as preflight
from asyncrl.launch.checks import run_recipes
from asyncrl.launch.commands.evaluate import check_out
from asyncrl.util import user_code
from tests.helpers.cli import asyncrl
from tests.helpers.inputs import make_inputs

pytestmark = pytest.mark.timeout(240)

NOT_UTF8 = b"\xff\xfe is no text"
ONE_LINE = re.compile(r"(importing [^\n]+ \.\.\.\n)*error: [^\n]+\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with data and a model that pass the checks of `asyncrl launch --config run.yaml`."""
    model, _ = make_inputs(tmp_path)
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {model}}}\ndata: {{train: {tmp_path / 'data.parquet'}}}\nrewards: exact\n"
        "generator: {max_new_tokens: 8}\n"
    )
    return tmp_path


def refused(folder: Path, *arguments: str) -> str:
    """Runs a command that must end with exit code 2; returns the single line that it prints."""
    code, output = asyncrl(*arguments, cwd=folder)
    assert code == 2, output
    assert ONE_LINE.fullmatch(output), output
    return output


def refused_launch(folder: Path, *arguments: str) -> str:
    return refused(folder, "launch", "--config", str(folder / "run.yaml"), *arguments)


@pytest.mark.parametrize(
    ("file", "content", "arguments", "message"),
    [
        ("run.yaml", NOT_UTF8, [], "run.yaml: cannot be read: 'utf-8' codec"),
        ("model/config.json", b"", [], "model.path: {folder}/model/config.json: not JSON"),
        ("model/config.json", b"[1]", [], "model.path: {folder}/model/config.json: expected a JSON object, found list"),
        ("model/config.json", NOT_UTF8, [], "model.path: {folder}/model/config.json: not JSON: 'utf-8' codec"),
        (
            "model/config.json",
            b'{"max_position_embeddings": "many"}',
            [],
            "max_position_embeddings = 'many'; must be a number of tokens",
        ),
        (
            "model/tokenizer_config.json",
            b"{",
            ["data.string_prompts=user"],
            "model.path: {folder}/model/tokenizer_config.json: not JSON",
        ),
        ("rows.jsonl", NOT_UTF8, ["data.train=rows.jsonl"], "data.train: rows.jsonl: not text in UTF-8"),
        ("runs", b"", [], "run = 'run': {folder}/runs cannot hold the run's folder: "),
    ],
)
def test_files_that_cannot_be_used(folder: Path, file: str, content: bytes, arguments: list[str], message: str) -> None:
    (folder / file).write_bytes(content)
    assert message.format(folder=folder) in refused_launch(folder, *arguments)


def test_reward_model_with_a_broken_config(folder: Path) -> None:
    model = folder / "rm"
    model.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (model / name).write_text("{")
    output = refused_launch(folder, "rewards=reward_model", "reward_options={reward_model: {path: rm}}")
    assert "reward_options.reward_model.path: rm/config.json: not JSON" in output


def test_folder_that_is_not_writable(folder: Path) -> None:
    code, output = asyncrl("launch", "--config", str(folder / "run.yaml"), cwd=Path("/proc"))
    assert code == 2 and ONE_LINE.fullmatch(output), output
    assert "run = 'run': /proc/runs cannot hold the run's folder: " in output
    assert "launch from a folder in which you may write, or set runs_dir" in output


def test_an_error_of_the_system_names_its_file(folder: Path) -> None:
    arguments = ["--config", str(folder / "run.yaml"), "--max-staleness", "0"]
    assert "error: sweeps" in refused(Path("/proc"), "sweep", *arguments)


def test_model_of_the_hub(folder: Path) -> None:
    code, output = asyncrl("launch", "--config", "run.yaml", "model.path=Qwen/Qwen2.5-0.5B", cwd=folder)
    first, second = output.splitlines()
    assert (code, first) == (2, "model.path = Qwen/Qwen2.5-0.5B: downloading it from the hub ...")
    assert second.startswith("error: model.path = 'Qwen/Qwen2.5-0.5B': there is no such file or folder here, and it ca")
    assert "check the name, HF_TOKEN and HF_HUB_OFFLINE" in second
    assert "OWNER/NAME of the hub" in refused_launch(folder, "model.path=qwen")


def test_a_taken_port(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.launch.run_dir.is_loopback", lambda host: False)  # loopback addresses have no ports
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        output = refused_launch(folder, f"launch.address={address}")
    assert f"launch.address = '{address}': port " in output and "or leave it out for a free one" in output, output


@pytest.mark.parametrize("arguments", [["--generators", "100000"], ["launch.generators=1025"]])
def test_generators_have_an_upper_bound(folder: Path, arguments: list[str]) -> None:
    (_, output) = asyncrl("launch", "--config", "run.yaml", *arguments, cwd=folder)
    assert re.search(r"launch\.generators = 10\d+: at most 1024: each is a process of this machine", output), output


def test_scale_has_the_same_bound(folder: Path) -> None:
    assert "--generators 1025: at most 1024" in refused(folder, "scale", "--run", "one", "--generators", "1025")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit(3)", "it ends the process (SystemExit: 3); put what is for the command line under"),
        (
            "import argparse; argparse.ArgumentParser().parse_args(['--unknown'])",
            "it ends the process (SystemExit: 2)",
        ),
        ("import nowhere_to_be_found", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
    ],
)
@pytest.mark.parametrize("key", ["rewards=mine.py:score", "rewards=mine:score", "algorithm.loss=mine:score"])
def test_module_that_ends_the_process(
    folder: Path, code: str, message: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "mine.py").write_text(f"{code}\n")
    monkeypatch.syspath_prepend(folder)
    _, output = asyncrl("launch", "--config", "run.yaml", key, cwd=folder)
    where = key.partition("=")[2].rpartition(":")[0]
    assert output.startswith(f"importing {where} ...\n")
    assert f"cannot import {folder if where.endswith('.py') else ''}" in output and message in output


def test_module_that_hangs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "IMPORT_S", 0.2)
    code = "import time\nfor _ in range(99):\n    try:\n        time.sleep(60)\n    except Exception:\n        pass\n"
    (folder / "mine.py").write_text(code)
    former = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]
    output = refused_launch(folder, "rewards=mine.py:score")
    assert f"cannot import {folder / 'mine.py'}: it is not done after 0.2 s" in output
    left_s = signal.getitimer(signal.ITIMER_REAL)[0]
    assert signal.getsignal(signal.SIGALRM) == former[0]
    assert (left_s > 0) == (former[1] > 0) and left_s <= former[1], "an earlier alarm is not changed"


@pytest.mark.parametrize("out", ["/proc/nowhere/results.json", "model", "notes.json", "data.parquet"])
def test_results_that_cannot_be_written_are_refused_before_the_evaluation(folder: Path, out: str) -> None:
    (folder / "notes.json").write_text('{"model": 1}')
    output = refused(folder, "eval", "--config", "run.yaml", "data.eval=data.parquet", "--out", out)
    assert f"--out {out}: " in output
    assert (folder / "notes.json").read_text() == '{"model": 1}'
    assert sorted(path.name for path in folder.glob(".*")) == []


def test_earlier_results_are_replaced(tmp_path: Path) -> None:
    out = tmp_path / "new" / "results.json"
    check_out(out)
    out.write_text('{"model": "m", "data": [], "settings": {}, "metrics": {}, "prompts": []}')
    check_out(out)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--sigma=-1", "--sigma -1: must be at least 0, at most 10"),
        ("--sigma=nan", "--sigma nan: must be at least 0"),
        ("--mean-tokens=0", "--mean-tokens 0: must be at least 1, at most 134,217,728"),
        ("--max-tokens=0", "--max-tokens 0: must be at least 1"),
        ("--reward-s=-1", "--reward-s -1: must be at least 0"),
        ("--refunded-fraction=1.5", "--refunded-fraction 1.5: must be at least 0, at most 1"),
        ("--group-size=0", "group_size = 0, must be at least 1"),
    ],
)
def test_simulated_workloads_have_ranges(tmp_path: Path, option: str, message: str) -> None:
    made_up = ["--mean-tokens=20", "--engine-base-ms=3", "--learner-token-us=100"]
    assert message in refused(tmp_path, "simulate", *made_up, option)


@pytest.mark.parametrize("command", [["simulate"], ["data", "arithmetic", "a.parquet"], ["data", "tiny-model", "m"]])
def test_seeds_are_not_negative(tmp_path: Path, command: list[str]) -> None:
    code, output = asyncrl(*command, "--seed=-1", cwd=tmp_path)
    assert code == 2 and "--seed" in output and "greater than or equal to 0" in output, output


def test_a_recipe_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "RECIPE_S", 0.3)
    values = {"data.train": __file__, "recipe": "demo", "model.path": str(tmp_path / "model")}
    with pytest.raises(ConfigError, match=r"making tiny-model in .* took longer than 0\.3 s; make it with `asyncrl da"):
        run_recipes(load_config(None, values), Console(quiet=True))
    assert list(tmp_path.iterdir()) == []


def foreign(folder: Path) -> Path:
    """A folder with somebody else's files."""
    (folder / "theirs").mkdir()
    (folder / "theirs" / "thesis.txt").write_text("years of work")
    pq.write_table(pa.table({"x": [1]}), folder / "theirs" / "rows.parquet")
    return folder / "theirs"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["data", "tiny-model", "theirs"], "theirs: exists; give another path, or delete it yourself"),
        (["data", "tiny-model", "theirs/thesis.txt"], "thesis.txt: exists; give another path"),
        (["data", "arithmetic", "theirs"], "theirs: is a folder; give the name of a file"),
        (["data", "arithmetic", "theirs/thesis.txt"], "thesis.txt: exists and was not written by this command"),
        (["data", "arithmetic", "theirs/rows.parquet"], "rows.parquet: exists and was not written by this command"),
        (["data", "gsm8k", "--from", ".", "--out", "theirs"], "theirs: is a folder"),
        (["data", "math", "--from", ".", "--out", "theirs/rows.parquet"], "exists and was not written by this command"),
        (["data", "arithmetic", "/proc/nowhere/rows.parquet"], "/proc/nowhere/rows.parquet: cannot be written: "),
    ],
)
def test_no_command_replaces_what_it_did_not_make(tmp_path: Path, command: list[str], message: str) -> None:
    theirs = foreign(tmp_path)
    before = {path: path.read_bytes() for path in theirs.iterdir()}
    assert message in refused(tmp_path, *command)
    assert {path: path.read_bytes() for path in theirs.iterdir()} == before
    assert list(tmp_path.iterdir()) == [theirs], "no files remain"


def test_a_command_may_replace_its_own_files(tmp_path: Path) -> None:
    for rows in ("9", "3"):
        assert asyncrl("data", "arithmetic", "new/rows.parquet", "--rows", rows, cwd=tmp_path) == (0, "")
    assert pq.read_metadata(tmp_path / "new/rows.parquet").num_rows == 3
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rows.parquet"]


@pytest.mark.slow
def test_a_model_that_could_not_be_created_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    make_tiny_model(tmp_path / "empty", steps=0)
    assert (tmp_path / "empty" / "config.json").is_file()

    def interrupt(*_: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_model, "disable_progress_bar", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_tiny_model(tmp_path / "other", steps=0)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
