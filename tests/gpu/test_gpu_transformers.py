"""The engine on transformers on a GPU: log-probs against the model on the CPU, the kernel, tokens per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generator_model import kept_cache_logprobs, reference_logprobs, run_all, save_tiny_model, small_config, weights_of
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.config import load_config
from asyncrl.generator.transformers_backend.attention import padded_attention
from asyncrl.generator.transformers_backend.engine import TransformersEngine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

Figure = Callable[[str, float], None]
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Means, in nats, of tokens of some 4 nats."""


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_logprobs_are_those_of_the_version_that_sampled_a_token(
    dtype: str, kv_cache: str, tmp_path: Path, gpu: torch.device, figure: Figure
) -> None:
    save_tiny_model(tmp_path)
    policies: list[Qwen2ForCausalLM] = []
    for version in range(3):
        policy = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(version)
        for parameter in policy.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(0.3 * version * noise * parameter.data.std())
            parameter.data = parameter.data.to(getattr(torch, dtype)).float()
        policies.append(policy)
    config = small_config(str(tmp_path), model__dtype=dtype, weights__kv_cache=kv_cache, generator__max_new_tokens=100)
    engine = TransformersEngine(config, seed=1)
    prompts = {str(index): [3 + (7 * index + 5 * place) % 60 for place in range(4 + 40 * index)] for index in range(8)}
    try:
        assert (engine._decoder._kernel is padded_attention) == (dtype == "float32"), "see the log for the reason"
        engine.swap(0, [(name, tensor.to(gpu)) for name, tensor in weights_of(policies[0])])
        for key, prompt in prompts.items():
            engine.add(key, prompt)
        done = {one.key: one for _ in range(5) for one in engine.step()}
        engine.swap(1, [(name, tensor.to(gpu)) for name, tensor in weights_of(policies[1])])
        done |= {one.key: one for _ in range(6) for one in engine.step()}
        engine.swap(2, weights_of(policies[2]))  # from host memory
        done |= run_all(engine)
    finally:
        engine.close()
    assert {0, 1, 2} == {int(version) for one in done.values() for version in one.versions}
    differences: list[np.ndarray] = []
    for key, one in done.items():
        if kv_cache == "keep":
            expected = kept_cache_logprobs(policies, prompts[key], one, 1.0)
        else:
            of_each = [reference_logprobs(policy, prompts[key], one.tokens, 1.0) for policy in policies]
            expected = np.choose(one.versions, of_each)
        differences.append(np.abs(one.logprobs - expected))
    mean = float(np.concatenate(differences).mean())
    figure("mean_difference_nats", mean)
    assert mean < TOLERANCE[dtype]


def test_tokens_per_second_of_a_model_of_half_a_billion(tmp_path: Path, gpu: torch.device, figure: Figure) -> None:
    save_tiny_model(tmp_path)
    shape = Qwen2Config(
        vocab_size=32768, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=2048, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model: Any = Qwen2ForCausalLM(shape)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    config = load_config(
        None,
        {"model.path": str(tmp_path), "data.train": "unused.parquet", "model.dtype": "bfloat16",
         "generator.engine": "transformers", "generator.group_size": 8, "generator.max_running_groups": 32,
         "generator.max_new_tokens": 128, "generator.min_new_tokens": 128},
    )  # fmt: skip
    engine = TransformersEngine(config, seed=1)
    try:
        engine.use_own_weights(0)
        for count in (32, 256):
            for timed in (False, True):
                started = time.monotonic()
                for index in range(count):
                    engine.add(f"{index}", [3 + (index + place) % 1000 for place in range(256)])
                tokens = sum(len(one.tokens) for one in run_all(engine).values())
                assert tokens == 128 * count
                if timed:
                    figure(f"tokens_per_s_{count}", tokens / (time.monotonic() - started))
        figure("cache_tokens", engine._decoder.cache.num_free * engine._decoder.cache.page_tokens)
    finally:
        engine.close()
