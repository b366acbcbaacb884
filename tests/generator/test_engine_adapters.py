"""Engines that get the adapters of a policy alone: against the model's own forward pass with merged weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from generator_model import (
    async_scheduling,
    close_all,
    kept_cache_logprobs,
    reference_logprobs,
    run_all,
    small_config,
    swap_in_flight,
)
from torch import Tensor
from transformers import Qwen2ForCausalLM
from vllm.config.lora import MaxLoRARanks

from asyncrl.config.config import Config
from asyncrl.config.training import Lora
from asyncrl.errors import ConfigError, RunError
from asyncrl.generator import engine as engine_module
from asyncrl.generator.engine import Completion, Engine, make_engine, make_own_engine
from asyncrl.generator.vllm_backend import shared_weights
from asyncrl.generator.vllm_backend.setup import LORA_RANKS, check_adapters, check_cpu
from asyncrl.generator.vllm_backend.weights import SentWeights, make_loader
from asyncrl.weights.layout import WeightPart
from asyncrl.weights.model_tensors import adapter_shapes
from benchmarks.families import save_family

LORA = Lora(rank=3, alpha=4.5)
TOLERANCE = 5e-5
DIFFERENT = 1e-2
PROMPTS = {str(i): [3 + (7 * i + 5 * j) % 60 for j in range(4 + i)] for i in range(8)}
CASES = [(engine, load) for engine in ("transformers", "vllm") for load in ("adapter", "merged")]

Sent = list[tuple[str, Tensor]]


@pytest.fixture(scope="module")
def base(model_path: str) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def sent(base: Qwen2ForCausalLM) -> list[Sent]:
    """Three versions of the adapters."""
    versions: list[Sent] = []
    for version in range(3):
        generator = torch.Generator().manual_seed(version)
        shapes = adapter_shapes(base, LORA).items()
        versions.append([(name, 0.15 * torch.randn(shape, generator=generator)) for name, shape in shapes])
    return versions


@pytest.fixture(scope="module")
def merged_policies(base: Qwen2ForCausalLM, sent: list[Sent]) -> list[Qwen2ForCausalLM]:
    policies: list[Qwen2ForCausalLM] = []
    for tensors in sent:
        policy = copy.deepcopy(base)
        matrices = dict(tensors)
        for name, parameter in policy.named_parameters():
            module = name.removesuffix(".weight")
            if f"{module}.lora_A.weight" in matrices:
                change = matrices[f"{module}.lora_B.weight"] @ matrices[f"{module}.lora_A.weight"]
                parameter.data += 1.5 * change
        policies.append(policy)
    return policies


@pytest.fixture(scope="module")
def maker(model_path: str) -> Iterator[Callable[..., Engine]]:
    engines: dict[str, Engine] = {}
    set_num_threads = torch.set_num_threads

    def make(engine: str, load: str, **overrides: object) -> Engine:
        key = repr((engine, load, sorted(overrides.items())))
        if key not in engines:
            lora = LORA.model_dump() | {"load": load}
            config = small_config(model_path, generator__engine=engine, learner__lora=lora, **overrides)
            engines[key] = make_engine(config, seed=1)
        return engines[key]

    yield make
    close_all(engines.values())
    torch.set_num_threads = set_num_threads  # vLLM replaced it


def complete(engine: Engine, kind: str = "training") -> dict[str, Completion]:
    for key, prompt in PROMPTS.items():
        engine.add(key, prompt, kind=kind)  # type: ignore[arg-type]
    return run_all(engine)


def worst(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


@pytest.mark.parametrize(("name", "load"), CASES)
def test_logprobs_are_those_of_the_adapted_model_after_several_swaps(
    name: str,
    load: str,
    maker: Callable[..., Engine],
    sent: list[Sent],
    merged_policies: list[Qwen2ForCausalLM],
    base: Qwen2ForCausalLM,
) -> None:
    engine = maker(name, load)
    before = [[(key, tensor.clone()) for key, tensor in version] for version in sent]
    for _ in range(3):
        for version, policy in zip(sent, merged_policies, strict=True):
            engine.swap(engine.version + 1, version)
            for key, one in complete(engine).items():
                own = reference_logprobs(policy, PROMPTS[key], one.tokens, 1.0)
                assert worst(one.logprobs, own) < TOLERANCE
                assert worst(one.logprobs, reference_logprobs(base, PROMPTS[key], one.tokens, 1.0)) > DIFFERENT
                assert np.all(one.versions == engine.version)
    greedy = complete(engine, "greedy")
    for key, one in greedy.items():
        logits = merged_policies[-1](torch.tensor([PROMPTS[key] + one.tokens])).logits[0, len(PROMPTS[key]) - 1 : -1]
        assert one.tokens == logits.argmax(-1).tolist()
    for version, tensors in zip(before, sent, strict=True):
        assert all(torch.equal(a[1], b[1]) for a, b in zip(version, tensors, strict=True)), "staging did not change"


@pytest.mark.parametrize(("name", "load"), CASES)
def test_spans_are_exact_when_adapters_are_swapped_in_flight(
    name: str, load: str, maker: Callable[..., Engine], sent: list[Sent], merged_policies: list[Qwen2ForCausalLM]
) -> None:
    if (name, load) == ("vllm", "adapter"):
        with async_scheduling():  # a batch is in flight meanwhile
            engine = maker(name, load, generator__max_running_groups=5)
    else:
        engine = maker(name, load)
    for key, one in swap_in_flight(engine, merged_policies, PROMPTS, weights=sent).items():
        assert worst(one.logprobs, kept_cache_logprobs(merged_policies, PROMPTS[key], one, 1.0)) < TOLERANCE


@pytest.mark.parametrize(("name", "load"), CASES)
def test_what_does_not_fit_changes_nothing(
    name: str, load: str, maker: Callable[..., Engine], sent: list[Sent], merged_policies: list[Qwen2ForCausalLM]
) -> None:
    engine = maker(name, load)
    engine.swap(engine.version + 1, sent[1])
    (key, tensor), *rest = sent[2]
    complete_weights = list(merged_policies[2].named_parameters())
    for wrong, message in (
        (rest, f"{key} is missing"),
        ([(key, tensor[:2]), *rest], rf"{key} has shape \(2, 64\), the model \(3, 64\)"),
        (complete_weights, "is unknown"),
    ):
        with pytest.raises(RunError, match=message):
            engine.swap(engine.version + 1, wrong)
    for key, one in complete(engine).items():
        assert worst(one.logprobs, reference_logprobs(merged_policies[1], PROMPTS[key], one.tokens, 1.0)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("load", ["adapter", "merged"])
def test_two_workers_take_their_parts_of_an_adapter_in_flight(
    load: str,
    maker: Callable[..., Engine],
    sent: list[Sent],
    merged_policies: list[Qwen2ForCausalLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    largest = max(tensor.nbytes for _, tensor in sent[0])
    monkeypatch.setattr(shared_weights, "BUCKET_BYTES", 4 * largest)
    engine = maker("vllm", load, generator__tensor_parallel=2)
    for key, one in swap_in_flight(engine, merged_policies, PROMPTS, weights=sent).items():
        assert worst(one.logprobs, kept_cache_logprobs(merged_policies, PROMPTS[key], one, 1.0)) < TOLERANCE
    for version, policy in zip(sent, merged_policies, strict=True):
        engine.swap(engine.version + 1, version)
        for key, one in complete(engine).items():
            assert worst(one.logprobs, reference_logprobs(policy, PROMPTS[key], one.tokens, 1.0)) < TOLERANCE


@pytest.mark.parametrize("name", ["transformers", "vllm"])
def test_completions_with_an_adapter_are_reproducible(
    name: str, maker: Callable[..., Engine], sent: list[Sent]
) -> None:
    engine = maker(name, "adapter", deterministic=True, replay__max_staleness=0)
    engine.swap(engine.version + 1, sent[0])
    runs: list[dict[str, Completion]] = []
    for keys in (list(PROMPTS), list(PROMPTS)[::-1]):
        for key in keys:
            engine.add(key, PROMPTS[key], seed=int(key))
        runs.append(run_all(engine))
    for key, one in runs[0].items():
        assert one.tokens == runs[1][key].tokens and np.array_equal(one.logprobs, runs[1][key].logprobs)


def test_a_model_of_its_own_weights_has_no_adapter(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Config] = []
    engine = MagicMock()
    monkeypatch.setattr(engine_module, "make_engine", lambda config, seed: made.append(config) or engine)
    assert make_own_engine(small_config(model_path, learner__lora=LORA.model_dump())) is engine
    assert made == [small_config(model_path)]
    engine.use_own_weights.assert_called_once_with(0)


def test_ranks_that_vllm_has_no_room_for_are_refused(model_path: str) -> None:
    assert get_args(MaxLoRARanks) == LORA_RANKS
    for rank, load in ((512, "adapter"), (513, "merged")):
        check_adapters(small_config(model_path, learner__lora={"rank": rank, "load": load}))
    with pytest.raises(ConfigError, match=r"rank = 513: vLLM takes adapters of at most 512; use .*load=merged"):
        check_adapters(small_config(model_path, learner__lora={"rank": 513}))


@pytest.mark.parametrize("error", [NotImplementedError("no adapters here"), RuntimeError("sizes differ")])
def test_an_adapter_that_vllm_cannot_load_is_refused_with_the_way_out(
    model_path: str, sent: list[Sent], error: Exception
) -> None:
    config = small_config(model_path, learner__lora=LORA.model_dump())
    workers = MagicMock(__bool__=lambda _: False)
    loader = make_loader(config, SentWeights(config), workers, lambda _: None)
    loader.begin(0, {name: tuple(tensor.shape) for name, tensor in sent[0]})
    loader.load([WeightPart(name, tensor) for name, tensor in sent[0]])
    workers.rpc.side_effect = error
    with pytest.raises(ConfigError, match=f"cannot load the adapter .*{error}.*use learner.lora.load=merged"):
        loader.commit(0)
    workers.rpc.side_effect = torch.OutOfMemoryError("too little")
    with pytest.raises(torch.OutOfMemoryError):
        loader.commit(0)


def test_experts_with_adapters_are_refused_on_a_cpu(tmp_path: Path) -> None:
    folder = str(save_family("mixtral", tmp_path))
    check_cpu(small_config(folder, learner__lora={"rank": 8, "load": "merged"}))
    with pytest.raises(ConfigError, match=r"a mixture of experts with adapters on GPUs only, .*load=merged"):
        check_cpu(small_config(folder, learner__lora={"rank": 8}))
