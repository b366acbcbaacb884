"""The engine on a GPU: log-probs against the model's own forward pass on the CPU, before and after swaps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from generator_model import (
    kept_cache_logprobs,
    reference_logprobs,
    run_all,
    save_tiny_model,
    small_config,
    weights_of,
)
from transformers import Qwen2ForCausalLM

from asyncrl.generator.vllm_backend.engine import VllmEngine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.usefixtures("vllm")]

TOLERANCE = {"float32": 0.01, "bfloat16": 0.1}


@pytest.fixture(scope="module", params=TOLERANCE)
def engine_and_model(
    gpu: torch.device, vllm: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple]:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    config = small_config(str(folder), model__dtype=request.param)
    engine = VllmEngine(config, seed=1)
    yield engine, folder, request.param
    engine.close()


def make_policy(folder: Path, version: int, dtype: torch.dtype) -> Qwen2ForCausalLM:
    """A version of the policy, clearly different from the others."""
    policy = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(version)
    for parameter in policy.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.add_(0.3 * version * noise * parameter.data.std())
        parameter.data = parameter.data.to(dtype).float()
    return policy


def test_logprobs_are_those_of_the_weights_that_were_swapped_in(engine_and_model: tuple, gpu: torch.device) -> None:
    engine, folder, name = engine_and_model
    dtype = getattr(torch, name)
    prompts = {str(index): [3 + (7 * index + 5 * place) % 60 for place in range(4 + index)] for index in range(8)}
    for version in range(3):
        policy = make_policy(folder, version, dtype)
        staged = [(name, tensor.to(gpu, dtype)) for name, tensor in weights_of(policy)]
        engine.swap(version, staged)
        for key, prompt in prompts.items():
            engine.add(key, prompt)
        done = run_all(engine)
        differences = [
            np.abs(completion.logprobs - reference_logprobs(policy, prompts[key], completion.tokens, 1.0))
            for key, completion in done.items()
        ]
        assert np.concatenate(differences).mean() < TOLERANCE[name]
        assert all(np.all(completion.versions == version) for completion in done.values())


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
def test_every_token_carries_its_version_with_a_batch_in_flight(
    tmp_path: Path, gpu: torch.device, kv_cache: str
) -> None:
    """Swaps after 5 and 11 steps, without a wait for the batch in flight."""
    save_tiny_model(tmp_path)
    policies = [make_policy(tmp_path, version, torch.float32) for version in range(3)]
    staged = [[(name, tensor.to(gpu)) for name, tensor in weights_of(policy)] for policy in policies]
    prompts = {str(index): [3 + (7 * index + 5 * place) % 60 for place in range(4 + index)] for index in range(8)}
    engine = VllmEngine(small_config(str(tmp_path), weights__kv_cache=kv_cache), seed=1)
    try:
        assert engine._engine.vllm_config.scheduler_config.async_scheduling
        engine.swap(0, staged[0])
        for key, prompt in prompts.items():
            engine.add(key, prompt)
        done = {completion.key: completion for _ in range(5) for completion in engine.step()}
        engine.swap(1, staged[1])
        done |= {completion.key: completion for _ in range(6) for completion in engine.step()}
        engine.swap(2, staged[2])
        done |= run_all(engine)
    finally:
        engine.close()
    own, shifted = [], []
    for key, completion in done.items():
        early = np.append(completion.versions[1:], completion.versions[-1])
        for versions, differences in ((completion.versions, own), (early, shifted)):
            labelled = replace(completion, versions=versions)
            if kv_cache == "keep":
                expected = kept_cache_logprobs(policies, prompts[key], labelled, 1.0)
            else:
                of_each = [reference_logprobs(policy, prompts[key], completion.tokens, 1.0) for policy in policies]
                expected = np.choose(versions, of_each)
            moved = early != completion.versions  # the last token before each swap
            differences.append(np.abs(completion.logprobs - expected)[moved if differences is shifted else slice(None)])
    assert {0, 1, 2} == {int(version) for completion in done.values() for version in completion.versions}
    assert np.concatenate(own).mean() < TOLERANCE["float32"]
    assert np.concatenate(shifted).mean() > 10 * TOLERANCE["float32"]
