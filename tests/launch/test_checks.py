"""Invalid input and unusable files are refused with exit code 2 and one line, before a run folder exists."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from asyncrl.cli.evaluate import check_out
from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.data import tiny_model
from asyncrl.data.demo import make_demo_rows
from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.errors import ConfigError
from asyncrl.launch import checks
from asyncrl.launch.checks import EVAL_ROWS, check_architecture, check_model, check_positions, run_recipes
from asyncrl.util import user_code
from asyncrl.util.files import tensor_files
from tests.helpers.cli import asyncrl
from tests.helpers.inputs import SETTINGS, make_inputs


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
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
            "not one of jsonl, tensorboard, wandb, mlflow, swanlab; did you mean wandb?",
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
def test_bad_input(inputs: Path, arguments: list[str], message: str) -> None:
    code, output = launch(inputs, *arguments)
    assert code == 2, output
    assert re.fullmatch(r"(importing \S+ \.\.\.\n)*error: .*", output, re.DOTALL), output
    assert message in output
    assert not (inputs / "runs").exists()


def test_more_generators_than_the_system_has_files_for(inputs: Path) -> None:
    command = [sys.executable, "-m", "asyncrl.cli", "launch", "--config", "run.yaml"]
    for arguments, files in ([], 259), (["launch.generators=100"], 600):
        done = subprocess.run(
            ["prlimit", f"--nofile=128:{files}", *command, *arguments],
            cwd=inputs, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        generators = 100 if arguments else 1
        needed = 256 + 4 * (generators + 1) + 1
        assert done.stderr.replace("\n", " ").startswith(
            f"error: launch.generators = {generators}: the run needs up to {needed} open files in a process"
        ), done.stderr


def test_unknown_flag_is_bad_configuration(inputs: Path) -> None:
    code, output = launch(inputs, "--generatorz", "2")
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
def test_bad_input_of_eval(inputs: Path, arguments: list[str], message: str) -> None:
    code, output = asyncrl("eval", "--config", "run.yaml", *arguments, cwd=inputs)
    assert code == 2, output
    assert output.startswith("error: "), output
    assert message in output


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


def test_generators_have_an_upper_bound(folder: Path) -> None:
    (_, output) = asyncrl("launch", "--config", "run.yaml", "--generators", "1025", cwd=folder)
    assert "launch.generators = 1025: at most 1024: each is a process of this machine" in output


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
@pytest.mark.parametrize("key", ["rewards=mine.py:score", "algorithm.loss=mine:score"])
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
        ("sigma=-1", "Expected `float` >= 0.0 - at `$.sigma`"),
        ("sigma=nan", "at `$.sigma`"),
        ("mean_tokens", "Expected `float`, got `str` - at `$.mean_tokens`"),
        ("refunded_fraction=1.5", "Expected `float` <= 1.0 - at `$.refunded_fraction`"),
        ("--group-size=0", "group_size = 0, must be at least 1"),
    ],
)
def test_simulated_workloads_have_ranges(tmp_path: Path, option: str, message: str) -> None:
    made_up = ["mean_tokens=20", "engine_base_ms=3", "learner_token_us=100"]
    assert message in refused(tmp_path, "simulate", *made_up, option)


def test_a_recipe_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "RECIPE_S", 0.3)
    values = {"data.train": __file__, "recipe": "demo", "model.path": str(tmp_path / "model")}
    with pytest.raises(ConfigError, match=r"making the model of demo in .* took longer than 0\.3 s"):
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
        (["data", "gsm8k", "--from", ".", "--out", "theirs"], "theirs: is a folder"),
        (["data", "math", "--from", ".", "--out", "theirs/rows.parquet"], "exists and was not written by this command"),
        (["data", "gsm8k", "--from", ".", "--out", "theirs/thesis.txt"], "thesis.txt: exists and was not written by"),
        (["data", "gsm8k", "--from", ".", "--out", "/proc/nowhere/rows"], "/proc/nowhere/rows: cannot be written: "),
    ],
)
def test_no_command_replaces_what_it_did_not_make(tmp_path: Path, command: list[str], message: str) -> None:
    theirs = foreign(tmp_path)
    before = {path: path.read_bytes() for path in theirs.iterdir()}
    assert message in refused(tmp_path, *command)
    assert {path: path.read_bytes() for path in theirs.iterdir()} == before
    assert list(tmp_path.iterdir()) == [theirs], "no files remain"


def test_rows_of_a_demo_replace_their_own_file(tmp_path: Path) -> None:
    for rows in (9, 3):
        make_demo_rows("demo", tmp_path / "new/rows.parquet", rows=rows)
    assert pq.read_metadata(tmp_path / "new/rows.parquet").num_rows == 3
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rows.parquet"]


def test_a_model_replaces_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"theirs: exists; give another path, or delete it yourself"):
        make_tiny_model(foreign(tmp_path))


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


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "qwen2", "layer_types": ["full_attention"] * 2, "sliding_window": None},
        {"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]},
        {"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32768},
        {"model_type": "granite", "logits_scaling": 1.0, "final_logit_softcapping": None},
    ],
)
def test_models_of_attention_layers_are_accepted(settings: dict[str, Any]) -> None:
    check_architecture(settings, "folder")


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types in config.json has 'linear_attention'"),
        ({"text_config": {"layer_types": ["conv"]}}, "layer_types in config.json has 'conv'; only full_attention and"),
        ({"layer_types": ["full_attention", "mamba"]}, "has 'mamba'"),
        ({"layer_types": ["chunked_attention"]}, "has 'chunked_attention'"),
        ({"final_logit_softcapping": 30.0}, "config.json has final_logit_softcapping = 30.0; models with it cannot"),
        ({"logit_scale": 0.0625}, "config.json has logit_scale = 0.0625"),
    ],
)
def test_other_models_are_refused(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_architecture(settings, "folder")
    assert str(caught.value).startswith("model.path = 'folder': ")
    assert fault in str(caught.value) and "docs/models.md" in str(caught.value)


ROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("settings", "window", "is_fit"),
    [
        ({"rope_scaling": ROPE}, 4096, True),
        ({"rope_scaling": ROPE}, 4097, False),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096}, 8192, False),
        ({"rope_parameters": {"full_attention": ROPE, "sliding_attention": {"rope_type": "default"}}}, 8192, False),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 4096}, 4096, True),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 4096}}, 8192, True),
        ({"rope_scaling": None}, 8192, True),
    ],
)
def test_positions_that_depend_on_the_longest_sequence_are_refused(
    settings: dict[str, Any], window: int, is_fit: bool
) -> None:
    if is_fit:
        check_positions(settings, "folder", window)
    else:
        with pytest.raises(ConfigError, match=r"set generator\.engine_options\.max_model_len=4096"):
            check_positions(settings, "folder", window)


def cut_file(folder: Path) -> None:
    save_file({"weight": torch.ones(100)}, folder / "model.safetensors")
    os.truncate(folder / "model.safetensors", 200)


def point_to_storage(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9")


def write_shards(folder: Path, *, missing: bool, misplaced: bool = False) -> None:
    (folder / "model.safetensors").unlink()
    names = {"one": "model-00001-of-00002.safetensors", "two": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for name, file in list(names.items())[: 1 if missing else 2]:
        save_file({"other" if misplaced else name: torch.ones(1)}, folder / file)


def write_both(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')


def quantize(folder: Path) -> None:
    settings = SETTINGS | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps(settings))


def add_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


FOLDERS: list[tuple[Callable[[Path], None], str]] = [
    (cut_file, "model.safetensors: not a complete safetensors file (ValueError: 200 of"),
    (point_to_storage, "model.safetensors: not a complete safetensors file"),
    (partial(write_shards, missing=True), "model-00002-of-00002.safetensors: is missing, although"),
    (partial(write_shards, missing=False, misplaced=True), "model-00001-of-00002.safetensors: has no one, although"),
    (write_both, "has model.safetensors and model.safetensors.index.json"),
    (lambda folder: (folder / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    (quantize, "config.json has quantization_config (gptq); quantized weights cannot be trained"),
    (add_adapter, "has adapter_config.json; merge the adapter"),
]


@pytest.mark.parametrize(
    ("key", "change", "fault"),
    [
        *(("model.path", change, fault) for change, fault in FOLDERS),
        *((key, *FOLDERS[0]) for key in ("algorithm.reference", "critic.path")),
    ],
)
def test_folders_that_cannot_be_loaded_are_refused(
    key: str, change: Callable[[Path], None], fault: str, tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "changed").mkdir()
    whole, _ = make_inputs(tmp_path / "whole")
    changed, _ = make_inputs(tmp_path / "changed")
    config = {"model": {"path": str(whole)}, "data": {"train": "none"}, "generator": {"max_new_tokens": 8}}
    section, name = key.split(".")
    check_model(Config.model_validate(config | {section: {name: str(changed)}}))
    change(changed)
    with pytest.raises(ConfigError) as caught:
        check_model(Config.model_validate(config | {section: {name: str(changed)}}))
    assert str(caught.value).startswith(f"{key} = '{changed}': ") and fault in str(caught.value)


def test_shards_that_are_complete_are_accepted(tmp_path: Path) -> None:
    model, _ = make_inputs(tmp_path)
    write_shards(model, missing=False)
    assert tensor_files(model).keys() == {"one", "two"}


def test_training_and_evaluation_files_are_made(tmp_path: Path) -> None:
    train, held = tmp_path / "train.parquet", tmp_path / "eval.parquet"
    values = {"model.path": str(tmp_path), "recipe": "demo", "data.train": str(train)}
    run_recipes(load_config(None, values), Console(quiet=True))
    assert pq.read_metadata(train).num_rows == 400
    made = train.stat().st_mtime_ns
    run_recipes(load_config(None, values | {"data.eval": str(held)}), Console(quiet=True))
    assert pq.read_metadata(held).num_rows == EVAL_ROWS
    assert train.stat().st_mtime_ns == made


def test_a_recipe_makes_one_file(tmp_path: Path) -> None:
    files = [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")]
    with pytest.raises(ConfigError, match=r"recipe = 'demo': makes one file, data.train names several"):
        run_recipes(
            load_config(None, {"model.path": str(tmp_path), "recipe": "demo", "data.train": files}),
            Console(quiet=True),
        )
