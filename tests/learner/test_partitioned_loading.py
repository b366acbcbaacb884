"""With ZeRO stage 3 each rank reads its part of a model, never a complete one; the weights are those of the library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from worlds import endpoints, make_config, make_model, spawn

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
def test_weights_and_buffers_are_those_that_the_library_loads(name: str, compared: list[dict[str, Any]]) -> None:
    """Tied ones (qwen2), experts that the library fuses, and a critic with a new head."""
    for found in compared:
        for dtype in ("float32", "bfloat16"):
            expected = {"policy": "", "critic": ""} if name == "qwen2" else {"policy": ""}
            assert found[f"{name}-{dtype}"] == expected


def test_weights_in_host_memory_are_loaded_there(compared: list[dict[str, Any]]) -> None:
    assert [found["devices"] for found in compared] == [["cpu"], ["cpu"]]


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


def measure(models: Path, out: Path, port: int) -> None:
    """Runs two ranks whose allocator returns freed memory, which must be set before a process starts."""
    script = Path(__file__).with_name("loading_ranks.py")
    endpoints(port)  # names the folder of sockets in the environment, which the ranks inherit
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment["PYTHONPATH"] = str(script.parents[2])
    with ExitStack() as stack:
        ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(2):
            command = [sys.executable, str(script), str(rank), str(port), str(models), str(out)]
            ranks.append(subprocess.Popen(command, cwd=script.parents[2], env=environment))
            stack.callback(ranks[-1].kill)
        assert [rank.wait(100) for rank in ranks] == [0, 0]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_no_rank_holds_a_complete_model(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """The reference is the half of 100 million float32 parameters, and for a moment the largest of them complete."""
    config = LlamaConfig(
        vocab_size=8192, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=12, tie_word_embeddings=False,
    )  # fmt: skip
    large = LlamaForCausalLM(config)
    num_bytes = 4 * sum(parameter.numel() for parameter in large.parameters())
    large.save_pretrained(tmp_path / "models" / "large")
    del large
    make_model(tmp_path / "models" / "warm")
    peaks: dict[str, dict[str, int]] = {}
    for way in ("partitioned", "complete"):
        (tmp_path / "models" / "way").write_text(way)
        out = tmp_path / way
        out.mkdir()
        measure(tmp_path / "models", out, free_port())
        found = [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]
        peaks[way] = {name: max(one[name] for one in found) for name in found[0]}
    table = {way: {name: f"{peak / (1 << 20):.0f} MiB" for name, peak in own.items()} for way, own in peaks.items()}
    print(f"model {num_bytes / (1 << 20):.0f} MiB, peaks of a rank: {table}")
    assert peaks["partitioned"]["reference"] < 0.75 * num_bytes, table
    assert peaks["complete"]["reference"] > num_bytes, table
