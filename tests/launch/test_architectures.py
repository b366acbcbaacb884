"""Models that the learner cannot train are refused before a process starts, if their config.json shows it."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.launch.preflight import check_architecture


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
