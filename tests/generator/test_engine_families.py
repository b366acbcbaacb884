"""Engines over tiny models of several families against the learner: log-probs of the same weights, which go from the
learner into the running engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from generator_model import small_config, weights_of
from transformers import AutoModelForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.generator.vllm_backend.engine import VllmEngine
from asyncrl.generator.vllm_backend.weights import SentWeights
from benchmarks.families import (
    compare,
    sample_apart,
    save_family,
)

OFTEN = ["gemma3_text", "mixtral"]
SELDOM = ["phi3", "qwen2_moe", "opt"]


@pytest.mark.parametrize("name", OFTEN)
def test_engine_and_learner_agree_at_the_start_and_after_a_swap(name: str, tmp_path: Path) -> None:
    found = compare(save_family(name, tmp_path), "float32")
    assert found.start < 1e-4 and found.swapped < 1e-4


@pytest.mark.slow
@pytest.mark.bfloat16
@pytest.mark.parametrize("name", SELDOM)
def test_they_agree_in_bfloat16_within_the_rounding_of_the_format(name: str, tmp_path: Path) -> None:
    """Log-probs of some 4 nats, at 2^-8 an operation; the weights are far larger than those of trained models."""
    folder = save_family(name, tmp_path)
    single = compare(folder, "float32")
    assert single.start < 1e-4 and single.swapped < 1e-4
    assert compare(folder, "bfloat16").mean < 0.1


@pytest.mark.slow
def test_families_that_the_engine_runs_by_classes_of_transformers_agree(tmp_path: Path) -> None:
    found = compare(save_family("phi", tmp_path), "float32", sample_apart)
    assert found.start < 1e-4 and found.swapped < 1e-4


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_neox", "llama"])
def test_weights_go_to_the_engine_by_the_names_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    stored = load_file(save_family(name, tmp_path) / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    sent = SentWeights(small_config(str(tmp_path)))
    weights = weights_of(model)
    assert {name: tuple(weight.shape) for name, weight in weights} == sent.shapes
    given = dict(sent.to_checkpoint(weights))
    assert given.keys() == stored.keys()
    assert all(torch.equal(given[name], stored[name]) for name in stored)


def test_a_model_whose_weights_the_engine_does_not_take_is_refused_at_the_first_swap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_family("llama", tmp_path))
    engine = VllmEngine(small_config(str(tmp_path)), seed=1)
    weights = weights_of(model)
    others = [(name, weight) for name, weight in weights if name != "model.norm.weight"]
    faults = {
        "no module or parameter named 'other'": [*others, ("other.weight", model.model.norm.weight.detach())],
        "nothing was loaded into model.norm.weight": others,
    }
    try:
        for message, given in faults.items():
            with monkeypatch.context() as patch, pytest.raises(ConfigError) as caught:
                patch.setattr(SentWeights, "to_checkpoint", lambda *_, given=given: iter(given))
                engine.swap(0, weights)
            assert "the engine cannot load new weights of a model of type llama (ValueError: " in str(caught.value)
            assert message in str(caught.value) and "docs/models.md" in str(caught.value)
        engine.swap(0, weights)
        engine.swap(1, weights)
    finally:
        engine.close()


def test_a_model_that_is_reloaded_layer_by_layer_is_refused_with_buckets(tmp_path: Path) -> None:
    save_family("mixtral", tmp_path)
    with pytest.raises(
        ConfigError, match=r"weights\.staging = 'buckets': .* type mixtral layer by layer, .*staging=whole"
    ):
        VllmEngine(small_config(str(tmp_path), weights__staging="buckets"), seed=1)
