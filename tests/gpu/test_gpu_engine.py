"""The engine on a GPU: log-probs against the model's own forward pass on the CPU, before and after swaps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from generator_model import reference_logprobs, run_all, save_tiny_model, small_config, weights_of
from transformers import Qwen2ForCausalLM

from asyncrl.generator.vllm_backend.engine import Engine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

TOLERANCE = {"float32": 0.01, "bfloat16": 0.1}


@pytest.fixture(scope="module", params=TOLERANCE)
def engine_and_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    config = small_config(str(folder), model__dtype=request.param)
    engine = Engine(config, seed=1)
    yield engine, folder, request.param
    engine.close()


def test_logprobs_are_those_of_the_weights_that_were_swapped_in(engine_and_model: tuple, gpu: torch.device) -> None:
    engine, folder, name = engine_and_model
    dtype = getattr(torch, name)
    prompts = {str(index): [3 + (7 * index + 5 * place) % 60 for place in range(4 + index)] for index in range(8)}
    for version in range(3):
        policy = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(version)
        for parameter in policy.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(0.3 * version * noise * parameter.data.std())
            parameter.data = parameter.data.to(dtype).float()
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
