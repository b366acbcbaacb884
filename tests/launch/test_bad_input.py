"""The command refuses invalid input with exit code 2, before a run folder exists."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.cli import asyncrl
from tests.helpers.inputs import make_inputs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with data and a model that pass the checks; these tests never load weights."""
    _, rows = make_inputs(tmp_path)
    pq.write_table(pa.table({"question": ["1+1="]}), tmp_path / "other.parquet")
    empty = [rows[0] | {"reward_model": {"style": "rule", "ground_truth": truth}} for truth in ("2", None)]
    pq.write_table(pa.Table.from_pylist(empty), tmp_path / "empty.parquet")
    (tmp_path / "text.parquet").write_text("not parquet")
    config = "model: {path: model}\ndata: {train: data.parquet}\nrewards: exact\ngenerator: {max_new_tokens: 8}\n"
    (tmp_path / "run.yaml").write_text(config)
    return tmp_path


def launch(folder: Path, *arguments: str) -> tuple[int, str]:
    return asyncrl("launch", "--config", "run.yaml", *arguments, cwd=folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["learner.lrr=1"], "learner.lrr = 1: unknown key; did you mean learner.lr?"),
        (["learner.lr=-1"], "learner.lr = -1: input should be greater than 0"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml: no such file"),
        (["--generators", "0"], "launch.generators = 0: input should be greater than or equal to 1"),
        (["--learners", "3"], "launch.learners = 3 does not divide replay.groups_per_step = 32"),
        (["model.path=missing"], "model.path = 'missing': no such folder"),
        (["data.train=missing.parquet"], "missing.parquet"),
        (["data.train=text.parquet"], "text.parquet"),
        (["data.train=other.parquet"], "prompt"),
        (["data.train=empty.parquet"], "empty.parquet, row 1: 'reward_model.ground_truth' is empty"),
        (["data.eval=text.parquet"], "data.eval: text.parquet is not a Parquet file"),
        (["data.string_prompts=user"], "the model's tokenizer has no chat template (model.path = 'model')"),
        (
            ["generator.max_new_tokens=32"],
            "generator.max_new_tokens = 32: leaves no room for a prompt in a window of 32",
        ),
        (["rewards=exakt"], "did you mean exact?"),
        (["rewards=nowhere.py:score"], "nowhere.py"),
        (
            ["observe.trackers=[wandbb]"],
            "not one of jsonl, console, tensorboard, wandb, mlflow, swanlab; did you mean wandb?",
        ),
        (["launch.cluster=kubernetes"], "launch.cluster = 'kubernetes': not one of local, "),
        (["algorithm.loss=ppo_clipp"], "did you mean ppo_clip?"),
        (["algorithm.loss_options={clip_lo: 0.1}"], "clip_lo"),
        (["rewards={b: exact}"], "rewards: no reward for data source 'a'"),
        (["algorithm.advantage=gae", "algorithm.loss=nothing"], "algorithm.loss = 'nothing': not one of"),
        (["critic.lr=1e-4"], "critic.lr = 0.0001: algorithm.advantage = 'grpo' has no critic"),
        (["generator.group_size=1"], "generator.group_size = 1: algorithm.advantage = 'grpo' compares"),
        (["generator.top_p=0.9"], "generator.top_p = 0.9: unknown key; did you mean eval.sampling.top_p?"),
        (["rewards=reward_model"], "reward_options.reward_model.path: required when rewards uses reward_model"),
        (["reward_options={exact: {casee: 1}}"], "reward_options.exact.casee"),
        (["weights.transport=carrier"], "weights.transport = 'carrier': not one of gloo, nccl"),
    ],
)
def test_bad_input(folder: Path, arguments: list[str], message: str) -> None:
    code, output = launch(folder, *arguments)
    assert code == 2, output
    assert re.fullmatch(r"(importing \S+ \.\.\.\n)*error: .*", output, re.DOTALL), output
    assert message in output
    assert not (folder / "runs").exists()


def test_an_interface_that_a_cluster_profile_names_is_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    code, output = launch(folder)
    assert code == 2 and output.startswith("error: GLOO_SOCKET_IFNAME = 'eth77' in the environment: this machine has")
    assert not (folder / "runs").exists()


def test_more_generators_than_the_system_has_files_for(folder: Path) -> None:
    command = [sys.executable, "-m", "asyncrl.cli", "launch", "--config", "run.yaml"]
    for arguments, files in ([], 259), (["launch.generators=100"], 600):
        done = subprocess.run(
            ["prlimit", f"--nofile=128:{files}", *command, *arguments],
            cwd=folder, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        generators = 100 if arguments else 1
        needed = 256 + 4 * (generators + 1) + 1
        assert done.stderr.replace("\n", " ").startswith(
            f"error: launch.generators = {generators}: the run needs up to {needed} open files in a process"
        ), done.stderr


def test_the_command_of_the_shell(folder: Path) -> None:
    command = [sys.executable, "-m", "asyncrl.cli", "launch", "--config", "run.yaml", "learner.lrr=1"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and "did you mean learner.lr?" in done.stderr


def test_taken_port(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.launch.run_dir.is_loopback", lambda host: False)  # loopback addresses have no ports
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        code, output = launch(folder, f"launch.address=127.0.0.1:{port}")
    assert code == 2
    assert f"port {port} is taken" in output


def test_unknown_flag_is_bad_configuration(folder: Path) -> None:
    code, output = launch(folder, "--generatorz", "2")
    assert code == 2
    assert "--generators" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "data.eval: required, but not set; give Parquet files as data.eval=FILE"),
        (["data.eval=missing.parquet"], "missing.parquet does not exist"),
        (["data.eval=text.parquet"], "text.parquet is not a Parquet file"),
        (["data.eval=data.parquet", "--model", "nowhere"], "--model nowhere: no such folder"),
        (["data.eval=data.parquet", "model.path=nowhere"], "model.path = 'nowhere': no such folder"),
        (["data.eval=data.parquet", "--model", "."], "model.path = '.': config.json is missing"),
        (["data.eval=data.parquet", "rewards=exakt"], "did you mean exact?"),
        (["data.eval=data.parquet", "eval.samples=0"], "eval.samples = 0: input should be greater than or equal to 1"),
    ],
)
def test_bad_input_of_eval(folder: Path, arguments: list[str], message: str) -> None:
    code, output = asyncrl("eval", "--config", "run.yaml", *arguments, cwd=folder)
    assert code == 2, output
    assert output.startswith("error: "), output
    assert message in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "."], "data.eval: required, but not set; give Parquet files as data.eval=FILE"),
        (["--model", "nowhere", "data.eval=data.parquet"], "--model nowhere: no such folder"),
        (["--model", ".", "data.eval=data.parquet"], "model.path = '.': config.json is missing"),
    ],
)
def test_bad_input_of_eval_without_a_config(folder: Path, arguments: list[str], message: str) -> None:
    code, output = asyncrl("eval", *arguments, cwd=folder)
    assert (code, output.startswith("error: ")) == (2, True), output
    assert message in output
