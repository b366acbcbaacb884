"""A tiny model with random weights, and the engine's results recomputed by the model's own forward pass."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from generator_fakes import FakeClient, FakeReceiver, FakeRewards
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.generator.engine import Completion, Engine
from asyncrl.generator.loop import GeneratorLoop
from asyncrl.generator.vllm_backend.engine import VllmEngine

EOS = (1, 2)
"""Both end a completion; the second only through the generation config."""
SPECIAL = ["<pad>", "<eos>", "<end>"]
ALPHABET = [chr(code) for code in range(33, 33 + 61)]


def save_tiny_model(folder: Path, *, tied: bool = True) -> None:
    """2 layers of width 64, 64 tokens; ships sampling defaults that training must not use."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    vocabulary = {token: index for index, token in enumerate(SPECIAL + ALPHABET)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(vocabulary),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            initializer_range=0.2,
            tie_word_embeddings=tied,
            eos_token_id=EOS[0],
            pad_token_id=0,
            bos_token_id=None,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=list(EOS), do_sample=True, temperature=0.5, top_k=5)
    model.save_pretrained(folder)


def weights_of(policy: Qwen2ForCausalLM) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.data) for name, parameter in policy.named_parameters()]


def small_config(model_path: str, **overrides: object) -> Config:
    values: dict[str, object] = {
        "model.path": model_path,
        "data.train": "unused.parquet",
        "generator.group_size": 2,
        "generator.max_running_groups": 4,
        "generator.max_new_tokens": 24,
        "generator.kv_cache_bytes": 16 << 20,
    }
    return load_config(None, values | {name.replace("__", "."): value for name, value in overrides.items()})


def make_loop(
    engine: Any,
    model_path: str,
    answer: Any,
    policies: Sequence[Qwen2ForCausalLM] = (),
    *,
    rewards: Any = None,
    environments: Any = None,
    index: int = 3,
    should_stop: Callable[[], bool] = lambda: False,
    **overrides: Any,
) -> tuple[GeneratorLoop, FakeClient, FakeReceiver]:
    """A loop whose receiver has the given policies as versions 0, 1, ..., and whose client answers asks with `answer`,
    or is it. By default a completion has its length as its reward."""
    client = answer if isinstance(answer, FakeClient) else FakeClient(answer)
    receiver: Any = FakeReceiver()
    receiver.versions.extend((version, weights_of(policy)) for version, policy in enumerate(policies))
    rewards = FakeRewards() if rewards is None and environments is None else rewards
    config, any_client = small_config(model_path, **overrides), client
    loop = GeneratorLoop(
        config, index=index, engine=engine, rewards=rewards, environments=environments, receiver=receiver,
        client=any_client, should_stop=should_stop,  # type: ignore[arg-type]
    )  # fmt: skip
    return loop, client, receiver


@contextmanager
def async_scheduling() -> Iterator[None]:
    """Engines that are built meanwhile keep a batch in flight, as on a GPU; vLLM turns that off on CPUs."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_turn_on(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_and_turn_on))
        yield


def close_all(engines: Iterable[Engine]) -> None:
    """Closes them, and collects garbage once: vLLM does so twice for each, which takes a second."""
    with patch.object(gc, "collect", return_value=0):
        for engine in engines:
            engine.close()
    gc.collect()


def run_all(engine: Engine) -> dict[str, Completion]:
    """Steps until nothing runs."""
    done: dict[str, Completion] = {}
    while engine.num_running:
        done |= {completion.key: completion for completion in engine.step()}
    return done


def reference_logprobs(
    policy: Qwen2ForCausalLM, prompt: list[int], tokens: list[int], temperature: float
) -> np.ndarray:
    """[tokens], from one forward pass over everything."""
    logits = policy(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs[torch.arange(len(tokens)), torch.tensor(tokens)].numpy()


def kept_cache_logprobs(
    policies: list[Qwen2ForCausalLM], prompt: list[int], completion: Completion, temperature: float
) -> np.ndarray:
    """[tokens]. Each version continues on the cache of the one before, from the last token sampled by that one."""
    inputs = prompt + completion.tokens[:-1]
    logits: list[torch.Tensor] = []
    cache, start = None, 0
    for version in np.unique(completion.versions):
        last = len(prompt) + int(np.flatnonzero(completion.versions == version)[-1])
        output = policies[version](torch.tensor([inputs[start:last]]), past_key_values=cache, use_cache=True)
        logits.append(output.logits[0])
        cache, start = output.past_key_values, last
    logprobs = (torch.cat(logits)[len(prompt) - 1 :] / temperature).log_softmax(-1)
    return logprobs[torch.arange(len(completion.tokens)), torch.tensor(completion.tokens)].numpy()


def versions_of_experts(folder: Path) -> list[Any]:
    """Three versions of a policy with experts, which differ in their routers."""
    from transformers import AutoModelForCausalLM

    first = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval().requires_grad_(False)
    versions = [first, copy.deepcopy(first), copy.deepcopy(first)]
    noise = torch.Generator().manual_seed(5)
    for policy in versions[1:]:
        for name, parameter in policy.named_parameters():
            if name.endswith("gate.weight"):
                parameter.copy_(parameter.std() * torch.randn(parameter.shape, generator=noise))
    return versions


def check_experts(
    policies: Sequence[Any], prompt: list[int], completion: Completion, *, recomputes: bool = False, tie: float = 1e-4
) -> None:
    """Fails unless the experts of each token but the last have the highest logits, up to ties, in the routers of the
    version that sampled the token after it, by the cache that it had; those of the prompt are of the last version where
    swaps recompute."""
    found = completion.routing
    assert found is not None and found.dtype == np.uint8 and len(found) == len(prompt) + len(completion.tokens)
    assert not found[-1].any() and (found[:-1, :, 0] != found[:-1, :, 1]).all()
    logits = _router_logits(policies, prompt, completion, recomputes).numpy()
    assert logits.shape[:2] == found[:-1].shape[:2]
    chosen = np.sort(np.take_along_axis(logits, found[:-1].astype(int), axis=-1))
    np.testing.assert_allclose(chosen, np.sort(logits)[..., -found.shape[-1] :], atol=tie)


@torch.no_grad()
def _router_logits(
    policies: Sequence[Any], prompt: list[int], completion: Completion, recomputes: bool
) -> torch.Tensor:
    """Returns [tokens, layers, experts], of all tokens but the last."""
    inputs = torch.tensor([prompt + completion.tokens[:-1]])
    versions = np.concatenate([np.full(len(prompt) - 1, completion.versions[0]), completion.versions])
    parts: list[torch.Tensor] = []
    if recomputes:
        versions[: len(prompt) - 1] = completion.versions[-1]
        whole = [torch.stack(policy(inputs, output_router_logits=True).router_logits, dim=1) for policy in policies]
        return torch.stack([whole[version][place] for place, version in enumerate(versions)])
    cache = None
    for version in np.unique(versions):
        own = inputs[:, torch.from_numpy(versions == version)]
        output = policies[version](own, past_key_values=cache, use_cache=True, output_router_logits=True)
        parts.append(torch.stack(output.router_logits, dim=1))
        cache = output.past_key_values
    return torch.cat(parts)


@contextmanager
def deterministic_engine(model_path: str) -> Iterator[VllmEngine]:
    """An engine with the model's own weights as version 0."""
    set_num_threads = torch.set_num_threads
    engine = VllmEngine(small_config(model_path, deterministic=True, replay__max_staleness=0), seed=1)
    engine.use_own_weights(0)
    try:
        yield engine
    finally:
        close_all([engine])
        torch.set_num_threads = set_num_threads  # the engine replaced it


def swap_in_flight(
    engine: Engine,
    policies: Sequence[Qwen2ForCausalLM],
    requests: dict[str, list[int]],
    dropped: int = 0,
    weights: Sequence[list[tuple[str, torch.Tensor]]] | None = None,
) -> dict[str, Completion]:
    """Version 0 for 5 tokens, version 1 for 6, version 2 for the rest. `dropped` tokens less where a swap drops those
    that are in flight. `weights` are what is sent, by default all of the policies'."""
    weights = weights or [weights_of(policy) for policy in policies]
    engine.swap(0, weights[0])
    for key, prompt in requests.items():
        engine.add(key, prompt)
    done: dict[str, Completion] = {}
    for step in range(1, 100):
        done |= {completion.key: completion for completion in engine.step()}
        if step in (5, 11):
            version = engine.version + 1
            assert engine.swap(version, weights[version]) > 0
        if not engine.num_running:
            break
    for completion in done.values():
        expected = np.repeat([0, 1, 2], [5 - dropped, 6 - dropped, 100])[: len(completion.tokens)]
        assert np.array_equal(completion.versions, expected)
    assert max(len(completion.tokens) for completion in done.values()) > 12
    return done
