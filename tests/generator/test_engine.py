"""The engine against the model's own forward pass: log-probs, versions across swaps, caches, ends of completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from generator_model import kept_cache_logprobs, reference_logprobs, run_all, swap_in_flight, weights_of
from transformers import Qwen2ForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.generator.engine import Completion
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


def test_recompute_with_a_batch_in_flight_makes_every_token_exactly_one_version(
    make_engine: EngineMaker, policies: Policies
) -> None:
    requests = prompts(8)
    engine = recomputing(make_engine, ahead=True)
    for key, completion in swap_in_flight(engine, policies, requests, dropped=1).items():
        for version in np.unique(completion.versions):
            here = completion.versions == version
            own, other = (
                reference_logprobs(policies[v], requests[key], completion.tokens, 1.0)[here]
                for v in (version, (version + 1) % 3)
            )
            assert max_difference(completion.logprobs[here], own) < TOLERANCE
            assert max_difference(completion.logprobs[here], other) > DIFFERENT


def test_keep_with_a_batch_in_flight_continues_on_the_keys_and_values_there_are(
    make_engine: EngineMaker, policies: Policies
) -> None:
    requests = prompts(8)
    for key, completion in swap_in_flight(keeping(make_engine, ahead=True), policies, requests).items():
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


def test_requests_can_be_dropped_with_a_batch_in_flight(make_engine: EngineMaker, policies: Policies) -> None:
    engine = recomputing(make_engine, ahead=True)
    engine.swap(0, weights_of(policies[0]))
    for key, prompt in prompts(8).items():
        engine.add(key, prompt)
    finished = [completion for _ in range(3) for completion in engine.step()]
    running = sorted(set(prompts(8)) - {completion.key for completion in finished})
    assert engine.num_running == len(running) >= 2
    assert {engine.num_generated(key) for key in running} == {2}  # not the one in flight
    engine.abort(running[:-1])
    assert engine.num_running == 1
    assert set(run_all(engine)) == {running[-1]}
    core: Any = engine._engine.engine_core
    assert core.engine_core.scheduler.get_num_unfinished_requests() == 0


def test_engine_options_reach_the_engine(make_engine: EngineMaker) -> None:
    assert recomputing(make_engine)._engine.vllm_config.scheduler_config.max_num_batched_tokens == 256
    with pytest.raises(ConfigError, match=r"generator.engine_options = \{'block_size': -1\}: vLLM refuses: "):
        make_engine(generator__engine_options={"block_size": -1})
