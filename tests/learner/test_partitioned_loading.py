"""With ZeRO stage 3 each rank reads its part of a model; the loaded and the saved weights are those of the library."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from worlds import make_config, make_model, spawn

from asyncrl.errors import ConfigError
from asyncrl.launch.checks import check_weights
from asyncrl.learner.model.loading import load_policy_model, load_value_model
from asyncrl.learner.model.policy import Policy
from asyncrl.weights.model_tensors import meta_model
from benchmarks.families import save_family

FAMILIES = ("llama", "qwen3_moe", "mixtral")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> list[dict[str, Any]]:
    models, out = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("out")
    make_model(models / "qwen2")
    for name in FAMILIES:
        save_family(name, models / name)
    spawn("loading_ranks.py", models, out, free_port(), ranks=2, timeout_s=200)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["qwen2", *FAMILIES])
def test_loaded_and_saved_weights_are_those_of_the_folder(name: str, compared: list[dict[str, Any]]) -> None:
    """Tied ones (qwen2), experts that the library fuses, and a critic with a new head."""
    for found in compared:
        for dtype in ("float32", "bfloat16"):
            expected = {"policy": "", "critic": ""} if name == "qwen2" else {"policy": ""}
            assert found[f"{name}-{dtype}"] == expected
        assert found[f"{name}-saved"] == ""


def test_weights_in_host_memory_are_loaded_there(compared: list[dict[str, Any]]) -> None:
    assert [found["devices"] for found in compared] == [["cpu"], ["cpu"]]


def test_ranks_whose_tokens_visit_other_experts_do_not_wait_for_each_other(compared: list[dict[str, Any]]) -> None:
    for found in compared:
        complete, first, second = found["losses"]
        assert first == pytest.approx(complete, rel=1e-5) and second < first


def change_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 0.01
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def add_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def untie(folder: Path) -> None:
    change_settings(folder, tie_word_embeddings=False)


def untie_changed_head(folder: Path) -> None:
    change_head(folder)
    untie(folder)


def change_settings(folder: Path, **changes: Any) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | changes))


def drop_layer(folder: Path) -> None:
    change_settings(folder, num_hidden_layers=1, layer_types=["full_attention"])


def set_nan(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (change_head, "config.json says that lm_head.weight is tied to model.embed_tokens.weight"),
        (untie, "the folder has no weights for lm_head.weight"),
        (drop_layer, r"the model of config.json has no model.layers.1.input_layernorm.weight \(12 tensors"),
        (add_head, None),
        (untie_changed_head, None),
    ],
)
def test_all_stages_load_the_parameters_of_the_folder_or_refuse_it(
    change: Callable[[Path], None], fault: str | None, stage: int, one_rank: object, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    change(folder)
    config = make_config(folder, learner={"zero_stage": stage})
    if fault is None:
        model = load_policy_model(config, str(folder))
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        assert (head is embedding) == (change is add_head)
        assert {name for name, _ in model.named_parameters()} == {
            name for name, _ in meta_model(str(folder), trust_remote_code=False).named_parameters()
        }, "engines have the same parameters"
        check_weights(config)
    else:
        with pytest.raises(ConfigError, match=fault):
            load_policy_model(config, str(folder))
        if change is not untie:
            with pytest.raises(ConfigError, match=fault):
                check_weights(config)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_critic_has_the_body_of_its_folder(stage: int, one_rank: object, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    untie_changed_head(folder)
    config = make_config(folder, learner={"zero_stage": stage})
    load_value_model(config, str(folder), "critic.path")  # its own head is not missed
    drop_layer(folder)
    with pytest.raises(ConfigError, match=r"critic.path = .* has no model.layers.1"):
        load_value_model(config, str(folder), "critic.path")


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_that_are_not_numbers_are_named(stage: int, one_rank: Any, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    set_nan(folder)
    with pytest.raises(ConfigError, match=r"bad weights: model.norm.weight has values that are not finite"):
        Policy(make_config(folder, learner={"zero_stage": stage}), one_rank)
