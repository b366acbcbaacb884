"""`deterministic`: a completion depends on weights, prompt, config.seed, ticket and member alone, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from generator_fakes import lease, lease_reply
from generator_model import close_all, make_loop, run_all, small_config, weights_of
from transformers import Qwen2ForCausalLM

from asyncrl.generator.engine import Completion
from asyncrl.generator.vllm_backend.engine import VllmEngine
from asyncrl.types import NO_VERSION, Group, Lease
from asyncrl.wire.messages import Leases

Policies = list[Qwen2ForCausalLM]
PROMPTS = {str(i): [3 + (7 * i + 5 * j) % 60 for j in range(4 + 40 * i)] for i in range(6)}
OPTIONS = {"deterministic": True, "replay.max_staleness": 0}


@pytest.fixture(scope="module")
def engines(model_path: str) -> Iterator[list[VllmEngine]]:
    """Two engines of two generators."""
    both = [VllmEngine(small_config(model_path, **OPTIONS), seed=seed) for seed in (1, 2)]
    yield both
    close_all(both)


def complete(engine: VllmEngine, keys: list[str], company: int = 0) -> dict[str, tuple[list[int], bytes]]:
    for key in keys:
        engine.add(key, PROMPTS[key], seed=100 + int(key))
        for other in range(company):
            engine.add(f"{key} beside {other}", [9, 8, 7 + other], seed=other)
    done = run_all(engine)
    return {key: bits(done[key]) for key in keys}


def bits(completion: Completion) -> tuple[list[int], bytes]:
    return completion.tokens, completion.logprobs.tobytes()


def test_company_order_and_engine_do_not_matter(engines: list[VllmEngine], policies: Policies) -> None:
    keys = list(PROMPTS)
    for engine in engines:
        engine.swap(0, weights_of(policies[0]))
    expected = complete(engines[0], keys)
    assert len({tuple(tokens[:3]) for tokens, _ in expected.values()}) > 3
    assert complete(engines[0], keys[::-1], company=2) == expected
    assert complete(engines[1], keys[3:] + keys[:3], company=1) == expected
    for version in (1, 0):
        engines[0].swap(2 + version, weights_of(policies[version]))
    assert complete(engines[0], keys[:2]) == {key: expected[key] for key in keys[:2]}


def test_the_seed_of_a_request_matters(engines: list[VllmEngine], policies: Policies) -> None:
    engines[0].swap(9, weights_of(policies[0]))
    for seed in range(4):
        engines[0].add(str(seed), PROMPTS["1"], seed=seed)
    assert len({tuple(completion.tokens) for completion in run_all(engines[0]).values()}) > 1
    for seed in range(2):
        engines[0].add(str(seed), PROMPTS["1"], kind="greedy", seed=seed)
    assert len({tuple(completion.tokens) for completion in run_all(engines[0]).values()}) == 1


def run_loop(engine: VllmEngine, model_path: str, policies: Policies, leases: list[Lease], index: int) -> list[Group]:
    """The groups of these leases."""
    engine.version = NO_VERSION
    left = iter(leases)

    def answer(version: int, num_groups: int) -> Leases:
        return lease_reply(list(itertools.islice(left, num_groups)), len(client.groups) == len(leases), "")

    loop, client, _ = make_loop(engine, model_path, answer, policies[:1], index=index, **OPTIONS)
    loop.run()
    return client.groups


def test_a_group_is_the_same_in_every_attempt_and_generator(
    engines: list[VllmEngine], model_path: str, policies: Policies
) -> None:
    first = run_loop(engines[0], model_path, policies, [lease(ticket) for ticket in range(4)], 0)
    again = run_loop(engines[1], model_path, policies, [lease(t, attempt=1) for t in (3, 1, 2, 0)], 5)
    by_ticket: Callable[[Group], int] = lambda group: group.ticket  # noqa: E731
    texts: set[tuple[int, ...]] = set()
    for one, other in zip(sorted(first, key=by_ticket), sorted(again, key=by_ticket), strict=True):
        assert (one.attempt, other.attempt) == (0, 1)
        for a, b in zip(one.trajectories, other.trajectories, strict=True):
            assert a.tokens.tobytes() == b.tokens.tobytes()
            assert a.behavior_logprobs.tobytes() == b.behavior_logprobs.tobytes()
            texts.add(tuple(a.tokens.tolist()))
    assert len(texts) == 8  # the same prompt, but other tickets and members


def test_completions_are_of_one_version(engines: list[VllmEngine], model_path: str, policies: Policies) -> None:
    engine = engines[0]
    engine.version = NO_VERSION
    left = iter([lease(0), lease(1)])
    answer = lambda _, number: lease_reply(list(itertools.islice(left, number)), False, "")  # noqa: E731
    loop, client, receiver = make_loop(engine, model_path, answer, policies[:1], **OPTIONS)
    loop._swap_staged()
    while not loop.groups.running:
        loop.tick()
    receiver.versions.append((1, weights_of(policies[1])))
    while len(client.groups) < 2:
        loop.tick()
    assert all((group.start_version, group.end_version) == (0, 0) for group in client.groups)
    loop.tick()
    assert receiver.acknowledged == [0, 1]
