"""The engine against the model's own forward pass: log-probs, versions across swaps, caches, ends of completions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from generator_model import EOS, kept_cache_logprobs, reference_logprobs, run_all, swap_in_flight, weights_of
from transformers import Qwen2ForCausalLM

from asyncrl.errors import ConfigError, InvariantError, RunError
from asyncrl.generator.engine import Completion
from asyncrl.generator.vllm_backend import plugin
from asyncrl.generator.vllm_backend.engine import VllmEngine

TOLERANCE = 1e-4
DIFFERENT = 1e-2

EngineMaker = Callable[..., VllmEngine]
Policies = list[Qwen2ForCausalLM]


IN_FLIGHT = pytest.mark.parametrize("ahead", [False, True], ids=["one at a time", "a batch in flight"])


def recomputing(make_engine: EngineMaker, ahead: bool = False) -> VllmEngine:
    options = {"max_num_batched_tokens": 256}
    return make_engine(ahead=ahead, weights__kv_cache="recompute", generator__engine_options=options)


def keeping(make_engine: EngineMaker, ahead: bool = False) -> VllmEngine:
    options = {"enable_prefix_caching": True}
    return make_engine(ahead=ahead, generator__temperature=0.7, generator__engine_options=options)


def prompts(count: int, first: int = 0) -> dict[str, list[int]]:
    return {str(first + i): [3 + (7 * i + 5 * j) % 60 for j in range(4 + i)] for i in range(count)}


def complete(engine: VllmEngine, requests: dict[str, list[int]]) -> dict[str, Completion]:
    for key, prompt in requests.items():
        engine.add(key, prompt)
    return run_all(engine)


def max_difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


@pytest.mark.parametrize(("mode", "temperature"), [(recomputing, 1.0), (keeping, 0.7)])
def test_logprobs_are_those_of_the_model_at_the_temperature(
    make_engine: EngineMaker, policies: Policies, mode: Any, temperature: float
) -> None:
    engine = mode(make_engine)
    engine.swap(0, weights_of(policies[0]))
    requests = prompts(8)
    done = complete(engine, requests)
    assert done.keys() == requests.keys()
    for key, completion in done.items():
        expected = reference_logprobs(policies[0], requests[key], completion.tokens, temperature)
        assert max_difference(completion.logprobs, expected) < TOLERANCE
        assert completion.logprobs.dtype == np.float32
        assert completion.versions.dtype == np.int32
        assert np.all(completion.versions == 0)


@pytest.mark.parametrize("kept", [True, False])
def test_layers_are_made_anew_only_where_the_engine_gave_up_their_weights(
    make_engine: EngineMaker, policies: Policies, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers import utils

    from asyncrl.generator.vllm_backend import weight_transfer as transfer

    assert policies[0].config.tie_word_embeddings  # the head is not among the weights that are sent
    reloads: list[torch.nn.Module] = []
    reload = transfer.initialize_layerwise_reload
    monkeypatch.setattr(transfer, "initialize_layerwise_reload", lambda model: (reloads.append(model), reload(model)))
    if not kept:
        monkeypatch.setattr(plugin, "_keep_weights_beside_packed", lambda: None)
        monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", inspect.unwrap(utils.dispatch_cpu_unquantized_gemm))
    engine = make_engine(generator__max_running_groups=2 if kept else 3)  # engines of no other test
    for version, policy in enumerate(policies):
        engine.swap(version, weights_of(policy))
        (completion,) = complete(engine, {"a": [5, 6, 7]}).values()
        assert max_difference(completion.logprobs, reference_logprobs(policy, [5, 6, 7], completion.tokens, 1.0)) < (
            TOLERANCE
        )
    assert len(reloads) == (0 if kept else len(policies))


@IN_FLIGHT
def test_recompute_makes_every_token_exactly_one_version(
    make_engine: EngineMaker, policies: Policies, ahead: bool
) -> None:
    requests = prompts(8)
    engine = recomputing(make_engine, ahead)
    for key, completion in swap_in_flight(engine, policies, requests, dropped=int(ahead)).items():
        for version in np.unique(completion.versions):
            here = completion.versions == version
            own, other = (
                reference_logprobs(policies[v], requests[key], completion.tokens, 1.0)[here]
                for v in (version, (version + 1) % 3)
            )
            assert max_difference(completion.logprobs[here], own) < TOLERANCE
            assert max_difference(completion.logprobs[here], other) > DIFFERENT


@IN_FLIGHT
def test_keep_continues_on_the_keys_and_values_there_are(
    make_engine: EngineMaker, policies: Policies, ahead: bool
) -> None:
    requests = prompts(8)
    for key, completion in swap_in_flight(keeping(make_engine, ahead), policies, requests).items():
        expected = kept_cache_logprobs(policies, requests[key], completion, 0.7)
        assert max_difference(completion.logprobs, expected) < TOLERANCE
        early = replace(completion, versions=np.append(completion.versions[1:], completion.versions[-1]))
        otherwise = early.versions != completion.versions  # the last token before each swap
        expected = kept_cache_logprobs(policies, requests[key], early, 0.7)
        assert not otherwise.any() or max_difference(completion.logprobs[otherwise], expected[otherwise]) > DIFFERENT


@IN_FLIGHT
def test_a_cached_prompt_is_never_used_under_other_weights(
    make_engine: EngineMaker, policies: Policies, ahead: bool
) -> None:
    engine = keeping(make_engine, ahead)
    cached: dict[str, Any] = {}
    vllm: Any = engine._engine
    step = vllm.step

    def spying_step() -> Any:
        outputs = step()
        cached.update({output.request_id: output.num_cached_tokens for output in outputs})
        return outputs

    vllm.step = spying_step
    prompt = [3 + i % 60 for i in range(300)]
    try:
        engine.swap(0, weights_of(policies[0]))
        complete(engine, {"first": prompt})
        (again,) = complete(engine, {"again": prompt}).values()
        for i in range(10):  # 8 run at once, 2 wait
            engine.add(f"old {i}", prompt)
        early = {completion.key for _ in range(1 + ahead) for completion in engine.step()}
        assert {engine.num_generated(f"old {i}") for i in (8, 9)} == {0}
        engine.swap(1, weights_of(policies[1]))
        engine.add("new", prompt)
        done = run_all(engine)
    finally:
        vllm.step = step
    assert cached["old 0"] >= 256 or "old 0" in early  # within a version the prompt is shared
    assert cached["again"] >= 256
    expected = reference_logprobs(policies[0], prompt, again.tokens, 0.7)
    assert max_difference(again.logprobs, expected) < TOLERANCE
    for key in ("old 8", "old 9", "new"):
        assert np.all(done[key].versions == 1)
        expected = reference_logprobs(policies[1], prompt, done[key].tokens, 0.7)
        assert max_difference(done[key].logprobs, expected) < TOLERANCE


def test_the_end_token_is_the_last_and_a_cut_completion_is_truncated(
    make_engine: EngineMaker, policies: Policies
) -> None:
    engine = recomputing(make_engine)
    engine.swap(0, weights_of(policies[0]))
    done = [completion for _ in range(6) for completion in complete(engine, prompts(40)).values()]
    ended = [completion for completion in done if completion.status == "completed"]
    cut = [completion for completion in done if completion.status == "truncated"]
    assert ended and cut
    assert {completion.tokens[-1] for completion in ended} == set(EOS)
    assert all(len(completion.tokens) == 24 for completion in cut)
    assert not any(set(EOS) & set(completion.tokens[:-1]) for completion in done)
    assert all(len(completion.tokens) == len(completion.logprobs) == len(completion.versions) for completion in done)


@IN_FLIGHT
def test_requests_can_be_dropped_and_counted(make_engine: EngineMaker, policies: Policies, ahead: bool) -> None:
    engine = recomputing(make_engine, ahead)
    engine.swap(0, weights_of(policies[0]))
    for key, prompt in prompts(8).items():
        engine.add(key, prompt)
    finished = [completion for _ in range(3) for completion in engine.step()]
    running = sorted(set(prompts(8)) - {completion.key for completion in finished})
    assert engine.num_running == len(running) >= 2
    assert {engine.num_generated(key) for key in running} == {3 - ahead}  # not the one in flight
    engine.abort(running[:-1])
    assert engine.num_running == 1
    assert set(run_all(engine)) == {running[-1]}
    core: Any = engine._engine.engine_core
    assert core.engine_core.scheduler.get_num_unfinished_requests() == 0


def test_what_cannot_be_started_is_refused(make_engine: EngineMaker, policies: Policies, model_path: str) -> None:
    engine = recomputing(make_engine)
    engine.swap(0, weights_of(policies[0]))
    engine.add("a", [5, 6])
    with pytest.raises(InvariantError, match="the key is in use"):
        engine.add("a", [5, 6])
    for length in (0, 512, 600):
        with pytest.raises(RunError, match=f"request b: a prompt of {length} tokens does not fit the window of 512"):
            engine.add("b", [5] * length)
    assert engine.num_running == 1
    run_all(engine)


def test_nothing_runs_before_the_first_version(make_engine: EngineMaker) -> None:
    engine = make_engine(generator__max_new_tokens=4)
    with pytest.raises(InvariantError, match="no version yet"):
        engine.add("a", [5, 6])


def test_registering_the_plugin_twice_is_fine() -> None:
    plugin.register()
    plugin.register()


def test_engine_options_reach_the_engine(make_engine: EngineMaker) -> None:
    assert recomputing(make_engine)._engine.vllm_config.scheduler_config.max_num_batched_tokens == 256
    with pytest.raises(ConfigError, match=r"generator.engine_options = \{'block_size': -1\}: vLLM refuses: "):
        make_engine(generator__engine_options={"block_size": -1})
