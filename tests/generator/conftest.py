"""The tiny model on disk, three versions of its weights, and engines over it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from generator_model import async_scheduling, close_all, save_tiny_model, small_config
from transformers import Qwen2ForCausalLM

from asyncrl.generator.vllm_backend.engine import VllmEngine


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny-model")
    save_tiny_model(folder)
    return str(folder)


@pytest.fixture(scope="session")
def policies(model_path: str) -> list[Qwen2ForCausalLM]:
    """Three versions of the policy, clearly different from one another."""
    original = Qwen2ForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    versions: list[Qwen2ForCausalLM] = []
    for version in range(3):
        policy = copy.deepcopy(original)
        generator = torch.Generator().manual_seed(version)
        for parameter in policy.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(0.3 * noise * parameter.data.std().clamp(min=0.05))
        versions.append(policy.eval().requires_grad_(False))
    return versions


@pytest.fixture(scope="module")
def make_engine(model_path: str) -> Iterator[Callable[..., VllmEngine]]:
    """Engines of a module, by overrides of the config; each is built once. With `ahead` vLLM schedules one batch ahead,
    as on a GPU; on a CPU it would not."""
    engines: dict[str, VllmEngine] = {}
    set_num_threads = torch.set_num_threads

    def make(*, ahead: bool = False, **overrides: object) -> VllmEngine:
        key = repr((ahead, sorted(overrides.items())))
        if key not in engines:
            with async_scheduling() if ahead else nullcontext():
                engines[key] = VllmEngine(small_config(model_path, **overrides), seed=1)
        return engines[key]

    yield make
    close_all(engines.values())
    torch.set_num_threads = set_num_threads  # the engine replaced it
