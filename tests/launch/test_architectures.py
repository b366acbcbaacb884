"""Models that the learner cannot train are refused before a process starts, if their folder shows it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.checks import check_architecture, check_model, check_positions
from asyncrl.util.files import tensor_files
from tests.helpers.inputs import SETTINGS, make_inputs


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


@pytest.mark.parametrize(("change", "fault"), FOLDERS)
@pytest.mark.parametrize("key", ["model.path", "algorithm.reference", "critic.path"])
def test_folders_that_cannot_be_loaded_are_refused(
    change: Callable[[Path], None], fault: str, key: str, tmp_path: Path
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
