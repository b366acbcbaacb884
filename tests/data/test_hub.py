"""Names of the hub are files of its cache, which offline mode respects."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects
from rich.console import Console

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.data import hub
from asyncrl.data.hub import fetch
from asyncrl.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with the model `some/model` and one file of the dataset `some/data`."""
    for kind, name, file in (("models", "model", "config.json"), ("datasets", "data", "main/train.parquet")):
        folder = tmp_path / "cache" / f"{kind}--some--{name}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(COMMIT)
        path = folder / "snapshots" / COMMIT / file
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def config_with(**overrides: str) -> Config:
    settings = {"model.path": "some/model", "data.train": "train.parquet"}
    return load_config(None, settings | {name.replace("__", "."): value for name, value in overrides.items()})


def test_a_model_in_the_cache_is_its_folder(cache: Path) -> None:
    output = io.StringIO()
    config = fetch(config_with(), Console(file=output))
    assert Path(config.model.path) == cache / "models--some--model" / "snapshots" / COMMIT
    assert output.getvalue() == ""


def test_all_files_of_a_model_are_downloaded_but_weights_in_other_formats(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "config.json": True, "model-00001-of-00002.safetensors": True, "qwen.tiktoken": True, "spiece.model": True,
        "additional_chat_templates/tool_use.jinja": True, "vocab.txt": True, "pytorch_model.bin": False,
        "model.gguf": False, "onnx/model.onnx_data": False, "original/params.json": False, ".gitattributes": False,
        "modeling_own.py": False,
    }  # fmt: skip
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: asked.append(options) or "folder")
    for trusted in (False, True):
        fetch(config_with(model__trust_remote_code=str(trusted).lower()), Console())
        patterns = asked[-1]["ignore_patterns"]
        expected = {name for name, wanted in files.items() if wanted} | ({"modeling_own.py"} if trusted else set())
        assert set(filter_repo_objects(files, ignore_patterns=patterns)) == expected


def test_a_file_of_a_dataset_in_the_cache_is_its_path(cache: Path) -> None:
    names = "hf://datasets/some/data/main/train.parquet"
    config = fetch(
        config_with(data__train=names, data__eval=f"{names.replace('data/main', 'data@main/main')}"), Console()
    )
    expected = str(cache / "datasets--some--data" / "snapshots" / COMMIT / "main" / "train.parquet")
    assert (config.data.train_files, config.data.eval_files) == ([expected], [expected])


def test_what_is_here_is_not_looked_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_download", lambda *_: pytest.fail("asks the hub"))
    Path("some/model").mkdir(parents=True)
    for config in (config_with(), config_with(model__path="/a/b/c"), config_with(model__path="model")):
        assert fetch(config, Console()) is config
    made = load_config(None, {"model.path": "demo/absent", "data.train": "demo/sums.parquet", "recipe": "demo"})
    assert fetch(made, Console()) is made


def test_what_cannot_be_had_is_refused(cache: Path) -> None:
    for overrides, name in (
        ({"model__path": "some/other"}, "model.path = 'some/other'"),
        ({"data__train": "hf://datasets/some/data/other.csv"}, "data.train = 'hf://datasets/some/data/other.csv'"),
        ({"model__path": "some/-bad-"}, "model.path = 'some/-bad-': not a name of the hub"),
    ):
        with pytest.raises(ConfigError) as caught:
            fetch(config_with(**overrides), Console(file=io.StringIO()))
        assert str(caught.value).startswith(name)
