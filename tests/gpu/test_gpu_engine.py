"""The engines on a GPU: log-probs against the model's own forward pass on the CPU, before and after swaps.

Each engine is tested in a separate process, since vLLM changes classes of transformers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from generator_model import (
    check_experts,
    kept_cache_logprobs,
    reference_logprobs,
    run_all,
    save_tiny_model,
    small_config,
    versions_of_experts,
    weights_of,
)
from transformers import Qwen2ForCausalLM

from asyncrl.generator.engine import ENGINES, Engine, make_engine
from asyncrl.generator.transformers_backend.attention import padded_attention
from benchmarks.families import save_family

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

TOLERANCE = {"float32": 0.01, "bfloat16": 0.1}


@pytest.fixture(scope="module", params=ENGINES)
def name(request: pytest.FixtureRequest) -> str:
    """Name of an engine."""
    if request.param == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    return request.param


@pytest.fixture(scope="module", params=TOLERANCE)
def engine_and_model(
    gpu: torch.device, name: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Path, str]]:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    engine = make_engine(small_config(str(folder), model__dtype=request.param, generator__engine=name), seed=1)
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


def test_logprobs_are_those_of_the_weights_that_were_swapped_in(
    engine_and_model: tuple, name: str, gpu: torch.device, figure: Callable[[str, float], None]
) -> None:
    engine, folder, dtype_name = engine_and_model
    dtype = getattr(torch, dtype_name)
    prompts = {str(index): [3 + (7 * index + 5 * place) % 60 for place in range(4 + 30 * index)] for index in range(8)}
    for version in range(3):
        policy = make_policy(folder, version, dtype)
        staged = [(key, tensor.to(gpu, dtype)) for key, tensor in weights_of(policy)]
        engine.swap(version, staged)
        for key, prompt in prompts.items():
            engine.add(key, prompt)
        done = run_all(engine)
        differences = [
            np.abs(completion.logprobs - reference_logprobs(policy, prompts[key], completion.tokens, 1.0))
            for key, completion in done.items()
        ]
        mean = float(np.concatenate(differences).mean())
        figure(f"{name}, {dtype_name}, version {version}: mean difference of log-probs, nats", mean)
        assert mean < TOLERANCE[dtype_name]
        assert all(np.all(completion.versions == version) for completion in done.values())


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
def test_every_token_carries_its_version_with_a_batch_in_flight(
    tmp_path: Path, gpu: torch.device, name: str, kv_cache: str
) -> None:
    """Swaps after 5 and 11 steps, without a wait for the batch that vLLM has in flight."""
    save_tiny_model(tmp_path)
    policies = [make_policy(tmp_path, version, torch.float32) for version in range(3)]
    staged = [[(key, tensor.to(gpu)) for key, tensor in weights_of(policy)] for policy in policies]
    prompts = {str(index): [3 + (7 * index + 5 * place) % 60 for place in range(4 + 30 * index)] for index in range(8)}
    engine = make_engine(small_config(str(tmp_path), weights__kv_cache=kv_cache, generator__engine=name), seed=1)
    try:
        if name == "vllm":
            assert engine._engine.vllm_config.scheduler_config.async_scheduling  # type: ignore[attr-defined]
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


def test_the_kernel_for_sequences_of_all_lengths_is_used(engine_and_model: tuple[Engine, Path, str], name: str) -> None:
    engine, _, dtype_name = engine_and_model
    if name == "transformers":
        assert (engine._decoder._kernel is padded_attention) == (dtype_name == "float32")  # type: ignore[attr-defined]


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
def test_a_token_has_the_experts_of_the_weights_that_sampled_the_next(
    tmp_path: Path, gpu: torch.device, name: str, kv_cache: str
) -> None:
    """The experts are written down in CUDA graphs, and copied while the next batch is computed."""
    versions = versions_of_experts(save_family("qwen3_moe", tmp_path))
    prompts = {str(index): [3 + (7 * index + 5 * place) % 60 for place in range(4 + 30 * index)] for index in range(8)}
    overrides = {"weights__kv_cache": kv_cache, "generator__engine": name, "algorithm__routing_replay": "engine"}
    engine = make_engine(small_config(str(tmp_path), **overrides), seed=1)
    try:
        for version, steps in enumerate((5, 6, 1000)):
            engine.swap(version, [(key, tensor.to(gpu)) for key, tensor in weights_of(versions[version])])
            for key, prompt in prompts.items() if version == 0 else ():
                engine.add(key, prompt)
                engine.add(f"{key} again", prompt)
            for _ in range(steps):
                for one in engine.step() if engine.num_running else ():
                    prompt = prompts[one.key.partition(" ")[0]]
                    check_experts(versions, prompt, one, recomputes=kv_cache == "recompute", tie=0.05)
    finally:
        engine.close()
