"""The contract between an engine and the generator's loop, for each engine of the table."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from generator_model import EOS, close_all, kept_cache_logprobs, reference_logprobs, run_all, small_config, weights_of
from transformers import Qwen2ForCausalLM

from asyncrl.colocate import GeneratorTurn
from asyncrl.errors import InvariantError, RunError
from asyncrl.generator.engine import ENGINES, Completion, Engine, Sampling, WeightSwaps, make_engine
from asyncrl.types import NO_VERSION
from asyncrl.util.model_files import load_decoder
from asyncrl.weights.layout import WeightManifest, WeightPart, plan_buckets, shares_of_ranks
from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.sender import WeightSender
from tests.helpers.colocated import FakeCard, FakeLock
from tests.helpers.sockets import socket_address

TOLERANCE = 5e-5
"""Rounding: most tokens are within 5e-6, unlikely ones within 2.4e-5."""
DIFFERENT = 1e-2
TEMPERATURE = 0.7
BUCKET_BYTES = 6_000
"""Less than the embedding has."""

Policies = list[Qwen2ForCausalLM]
Maker = Callable[..., Engine]


@pytest.fixture(scope="module", params=sorted(ENGINES))
def maker(request: pytest.FixtureRequest, model_path: str) -> Iterator[Maker]:
    """Makes the engines of a table's entry, each once."""
    engines: dict[str, Engine] = {}
    set_num_threads = torch.set_num_threads

    def make(**overrides: object) -> Engine:
        key = repr(sorted(overrides.items()))
        if key not in engines:
            config = small_config(model_path, generator__engine=request.param, **overrides)
            engines[key] = make_engine(config, seed=1)
        return engines[key]

    yield make
    close_all(engines.values())
    torch.set_num_threads = set_num_threads  # vLLM replaced it


@pytest.fixture
def keeping(maker: Maker) -> Engine:
    sampling = {"temperature": 0.5, "top_k": 3}
    return maker(generator__temperature=TEMPERATURE, eval__sampling=sampling)


@pytest.fixture
def recomputing(maker: Maker) -> Engine:
    # Prompts are split over several steps.
    options = {"max_num_batched_tokens": 16, "max_model_len": 40}
    return maker(weights__kv_cache="recompute", generator__temperature=TEMPERATURE, generator__engine_options=options)


@pytest.fixture
def stopping(maker: Maker) -> Engine:
    return maker(generator__stop=["!", "#", "$", "%", "&"])


def prompts(count: int) -> dict[str, list[int]]:
    return {str(i): [3 + (7 * i + 5 * j) % 60 for j in range(4 + i)] for i in range(count)}


def swap(engine: Engine, policy: Qwen2ForCausalLM) -> None:
    engine.swap(engine.version + 1, weights_of(policy))


def complete(engine: Engine, requests: dict[str, list[int]], kind: Sampling = "training") -> dict[str, Completion]:
    for key, prompt in requests.items():
        engine.add(key, prompt, kind=kind)
    return run_all(engine)


def worst(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


def test_logprobs_are_those_of_the_model_at_the_temperature(keeping: Engine, policies: Policies) -> None:
    assert keeping.version == NO_VERSION or keeping.num_running == 0
    swap(keeping, policies[0])
    requests = prompts(12)  # more than run at the same time
    done = complete(keeping, requests)
    assert done.keys() == requests.keys() and keeping.num_running == 0
    for key, one in done.items():
        assert worst(one.logprobs, reference_logprobs(policies[0], requests[key], one.tokens, TEMPERATURE)) < TOLERANCE
        assert (one.logprobs.dtype, one.versions.dtype) == (np.float32, np.int32)
        assert np.all(one.versions == keeping.version)
        assert len(one.tokens) == len(one.logprobs) == len(one.versions)


@pytest.mark.parametrize("mode", ["keeping", "recomputing"])
def test_every_token_has_the_version_that_sampled_it(
    mode: str, keeping: Engine, recomputing: Engine, policies: Policies
) -> None:
    engine = keeping if mode == "keeping" else recomputing
    swap(engine, policies[0])
    first = engine.version
    requests = prompts(8)
    for key, prompt in requests.items():
        engine.add(key, prompt)
    done: dict[str, Completion] = {}
    for step in range(1, 100):
        done |= {one.key: one for one in engine.step()}
        if step in (6, 12):
            counts = {key: engine.num_generated(key) for key in requests.keys() - done.keys()}
            swap(engine, policies[engine.version + 1 - first])
            assert counts == {key: engine.num_generated(key) for key in counts}
        if not engine.num_running:
            break
    assert {int(version) - first for one in done.values() for version in one.versions} == {0, 1, 2}
    for key, one in done.items():
        one = Completion(key, one.tokens, one.logprobs, one.versions - first, one.status)
        assert np.all(np.diff(one.versions) >= 0)
        if mode == "keeping":
            assert worst(one.logprobs, kept_cache_logprobs(policies, requests[key], one, TEMPERATURE)) < TOLERANCE
            continue
        for version in np.unique(one.versions):
            here = one.versions == version
            own, other = (
                reference_logprobs(policies[v], requests[key], one.tokens, TEMPERATURE)[here]
                for v in (version, (version + 1) % 3)
            )
            assert worst(one.logprobs[here], own) < TOLERANCE
            assert worst(one.logprobs[here], other) > DIFFERENT


@pytest.mark.parametrize("mode", ["keeping", "recomputing"])
@pytest.mark.parametrize("level", [1, 2])
def test_no_token_is_lost_while_the_engine_sleeps(
    level: int, mode: str, keeping: Engine, recomputing: Engine, policies: Policies
) -> None:
    engine = keeping if mode == "keeping" else recomputing
    swap(engine, policies[0])
    first, requests = engine.version, prompts(8)
    for key, prompt in requests.items():
        engine.add(key, prompt)
    done = {one.key: one for _ in range(6) for one in engine.step()}
    counts = {key: engine.num_generated(key) for key in requests.keys() - done.keys()}
    assert len(counts) >= 3
    engine.sleep(level)
    requests["late"] = [9, 4, 17]
    engine.add("late", requests["late"])
    engine.add("dropped", [5, 6])
    engine.abort(["dropped"])
    engine.wake("weights")
    if level == 2:
        swap(engine, policies[1])
    engine.wake("cache")
    assert counts == {key: engine.num_generated(key) for key in counts} and engine.num_generated("late") == 0
    done |= run_all(engine)
    assert done.keys() == requests.keys()
    assert {int(version) - first for one in done.values() for version in one.versions} == set(range(level))
    for key, one in done.items():
        assert len(one.tokens) == len(one.versions) > counts.get(key, 0)
        for version in np.unique(one.versions):
            here = one.versions == version
            expected = reference_logprobs(policies[version - first], requests[key], one.tokens, TEMPERATURE)[here]
            assert worst(one.logprobs[here], expected) < TOLERANCE


@pytest.mark.parametrize("cause", ["swap", "sleep"])
@pytest.mark.parametrize("mode", ["keeping", "recomputing"])
def test_tokens_that_are_computed_again_are_counted(
    mode: str, cause: str, keeping: Engine, recomputing: Engine, policies: Policies
) -> None:
    engine = keeping if mode == "keeping" else recomputing
    swap(engine, policies[0])
    before, requests = engine.recomputed_tokens, prompts(4)
    for key, prompt in requests.items():
        engine.add(key, prompt)
    done = {one.key for _ in range(3) for one in engine.step()}
    computed = [len(requests[key]) + engine.num_generated(key) - 1 for key in requests.keys() - done]
    assert len(computed) >= 2 and engine.recomputed_tokens == before
    if cause == "swap":
        swap(engine, policies[1])
    else:
        engine.sleep(1)
        engine.wake("weights")
        engine.wake("cache")
    run_all(engine)
    assert engine.recomputed_tokens - before == (0 if (mode, cause) == ("keeping", "swap") else sum(computed))


def hand_over(engine: Engine, policy: Qwen2ForCausalLM, cleanup: Callable[[Callable[[], None]], object]) -> None:
    """Gives the sleeping engine a version from the memory of a learner in this process, while that has the card."""
    address = socket_address(f"handed-{uuid.uuid4().hex[:8]}")
    config = small_config("none", launch__colocate="on", weights__transport="ipc", weights__staging="buckets")
    fake = FakeCard()
    own, learner = FakeLock(fake, "generator"), FakeLock(fake, "learner")
    own.acquire(1.0)
    card = GeneratorTurn(config, engine, [own])  # type: ignore[list-item]
    learner.acquire(1.0)
    weights = weights_of(policy)
    manifest = WeightManifest.of((name, tensor.dtype, tensor.shape) for name, tensor in weights)
    sender = WeightSender(
        address, manifest, expected_generators=1, transport="ipc", bucket_bytes=BUCKET_BYTES, timeout_s=20.0,
        copies=False,
    )  # fmt: skip
    cleanup(sender.close)
    receiver = WeightReceiver(address, rank=1, transport="ipc", timeout_s=20.0, max_bytes=1 << 26)
    cleanup(receiver.close)
    receiver.start()
    receiver.engine_is_up(engine.loader)
    swaps = WeightSwaps(engine, receiver, turn=card, timeout_s=20.0, meanwhile=lambda: True)
    end_s, version = time.monotonic() + 30.0, engine.version + 1
    while not any(peer.up for peer in sender._membership.present()):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    sender.send(version, weights)
    while not (card.can_load(receiver) and swaps.swap() is not None):
        assert time.monotonic() < end_s
        time.sleep(0.001)
    sender.copied()
    card.woken()
    assert card.asleep and fake.visitor == "generator", "the learner has its weights on the card"
    learner.release()
    assert card.can_load(receiver) and not card.asleep and fake.holder == "generator" and not fake.visitor


def test_an_engine_takes_a_version_from_the_memory_of_the_learner(
    keeping: Engine, policies: Policies, request: pytest.FixtureRequest
) -> None:
    swap(keeping, policies[0])
    first, requests = keeping.version, prompts(8)
    for key, prompt in requests.items():
        keeping.add(key, prompt)
    done = {one.key: one for _ in range(6) for one in keeping.step()}
    hand_over(keeping, policies[1], request.addfinalizer)
    assert keeping.version == first + 1
    done |= run_all(keeping)
    assert {int(version) - first for one in done.values() for version in one.versions} == {0, 1}
    for key, one in done.items():
        for version in np.unique(one.versions):
            here = one.versions == version
            expected = reference_logprobs(policies[version - first], requests[key], one.tokens, TEMPERATURE)[here]
            assert worst(one.logprobs[here], expected) < TOLERANCE
    handed = complete(keeping, requests, "greedy")
    swap(keeping, policies[1])
    swapped = complete(keeping, requests, "greedy")
    assert all(np.array_equal(handed[key].logprobs, swapped[key].logprobs) for key in requests), "bit for bit"


def test_requests_can_be_dropped_and_counted(keeping: Engine, policies: Policies) -> None:
    swap(keeping, policies[0])
    for key, prompt in prompts(8).items():
        keeping.add(key, prompt)
    ended = {one.key for _ in range(3) for one in keeping.step()}
    running = sorted(prompts(8).keys() - ended)
    assert keeping.num_running == len(running) >= 2
    assert {keeping.num_generated(key) for key in running} == {3}
    keeping.abort(running[:-1])
    assert run_all(keeping).keys() == {running[-1]}


def test_completions_end_at_an_end_token_the_limit_or_the_window(
    keeping: Engine, recomputing: Engine, policies: Policies
) -> None:
    swap(keeping, policies[0])
    done = [one for _ in range(4) for one in complete(keeping, prompts(12)).values()]
    by_status = {status: [one for one in done if one.status == status] for status in ("completed", "truncated")}
    assert {one.tokens[-1] for one in by_status["completed"]} == set(EOS)
    assert {len(one.tokens) for one in by_status["truncated"]} == {24}
    assert not any(set(EOS) & set(one.tokens[:-1]) for one in done)
    keeping.add("short", [5, 6], max_tokens=1)
    assert len(run_all(keeping)["short"].tokens) == 1
    swap(recomputing, policies[0])
    assert recomputing.window_tokens == 40
    cut = complete(recomputing, {str(i): [5 + i] * 36 for i in range(8)}).values()
    assert {len(one.tokens) for one in cut if one.status == "truncated"} == {4}
    for length in (0, 40, 50):
        with pytest.raises(RunError, match=f"request b: a prompt of {length} tokens does not fit the window of 40"):
            recomputing.add("b", [5] * length)
    assert recomputing.num_running == 0


def test_texts_end_completions(stopping: Engine, policies: Policies, model_path: str) -> None:
    swap(stopping, policies[0])
    done = {f"{key} {repeat}": one for repeat in range(4) for key, one in complete(stopping, prompts(8)).items()}
    single = {3, 5, 6, 7, 8}
    """The tokens of the texts."""
    ends = {one.tokens[-1] for one in done.values() if one.status == "completed"}
    assert ends & single and ends & set(EOS) and ends <= single | set(EOS)
    for key, one in done.items():
        assert not (single | set(EOS)) & set(one.tokens[:-1])
        prompt = prompts(8)[key.split()[0]]
        logits = policies[0](torch.tensor([prompt + one.tokens])).logits[0, len(prompt) - 1 : -1].clone()
        own = logits.log_softmax(-1)[torch.arange(len(one.tokens)), torch.tensor(one.tokens)].numpy()
        assert worst(one.logprobs, own) < TOLERANCE
    decode = load_decoder(model_path)
    for repeat in range(20):
        stopping.add("own", [9, 10, 11], stop=["a b"])
        (one,) = run_all(stopping).values()
        text = decode([one.tokens], special_tokens=True)[0]
        assert "a b" not in text[:-3], repeat


def test_evaluation_and_greedy_have_their_own_sampling(keeping: Engine, policies: Policies) -> None:
    swap(keeping, policies[0])
    requests = prompts(8)
    for key, prompt in requests.items():  # all kinds in one batch
        for kind in ("training", "evaluation", "greedy"):
            keeping.add(f"{kind} {key}", prompt, kind=kind)
    ranks: dict[str, list[int]] = {"training": [], "evaluation": [], "greedy": []}
    for key, one in run_all(keeping).items():
        kind, _, number = key.partition(" ")
        prompt = requests[number]
        logits = policies[0](torch.tensor([prompt + one.tokens])).logits[0, len(prompt) - 1 : -1]
        own = logits.gather(1, torch.tensor(one.tokens)[:, None])
        ranks[kind] += (logits > own).sum(-1).tolist()
    assert max(ranks["training"]) > 2 and max(ranks["evaluation"]) == 2 and max(ranks["greedy"]) == 0


def test_weights_of_another_model_are_refused_and_change_nothing(keeping: Engine, policies: Policies) -> None:
    swap(keeping, policies[0])
    version, weights = keeping.version, weights_of(policies[1])
    name, tensor = weights[3]
    cases = [
        (weights[:3] + weights[4:], f"{name} is missing"),
        ([*weights, ("lm_head.bias", torch.zeros(1))], "lm_head.bias is unknown"),
        ([*weights[:3], (name, tensor[:-1]), *weights[4:]], rf"{name} has shape \(31, 64\), the model \(32, 64\)"),
    ]
    for given, message in cases:
        with pytest.raises(RunError, match=f"do not fit model.path = .*{message}"):
            keeping.swap(version + 1, given)
    assert keeping.version == version
    (one,) = complete(keeping, {"a": [5, 6, 7]}).values()
    assert worst(one.logprobs, reference_logprobs(policies[0], [5, 6, 7], one.tokens, TEMPERATURE)) < TOLERANCE


def test_versions_come_in_buckets_and_nothing_is_sampled_between_two(
    model_path: str, maker: Maker, policies: Policies
) -> None:
    """An update that is not finished is followed by another one; requests wait, and continue under the new version."""
    engine = maker(weights__staging="buckets", weights__kv_cache="recompute")
    swap(engine, policies[0])
    first, requests = engine.version, prompts(8)
    for key, prompt in requests.items():
        engine.add(key, prompt)
    done = {one.key: one for _ in range(5) for one in engine.step()}
    buckets = in_buckets(engine, policies[1])
    assert any(part.first_row for bucket in buckets for part in bucket), "some parameter is divided"
    load(engine, policies[2], buckets=in_buckets(engine, policies[2])[:-2])
    with pytest.raises(InvariantError, match="a step between two versions"):
        engine.step()
    with pytest.raises(RunError, match="is missing"):
        engine.loader.begin(first + 1, dict(list(shapes_of(policies[1]).items())[1:]))
    assert engine.loader.updating and engine.version == first and engine.num_running == len(requests) - len(done)
    load(engine, policies[1], buckets=buckets)
    engine.loader.commit(first + 1)
    done |= run_all(engine)
    assert not engine.loader.updating and done.keys() == requests.keys()
    assert {int(version) - first for one in done.values() for version in one.versions} == {0, 1}
    for key, one in done.items():
        for version in np.unique(one.versions):
            here = one.versions == version
            own = reference_logprobs(policies[version - first], requests[key], one.tokens, 1.0)
            assert worst(one.logprobs[here], own[here]) < TOLERANCE


def shapes_of(policy: Qwen2ForCausalLM) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights_of(policy)}


def in_buckets(engine: Engine, policy: Qwen2ForCausalLM) -> list[list[WeightPart]]:
    """The weights in small buckets, as a receiver would pass them on from two learner ranks."""
    weights = weights_of(policy)
    layout = WeightManifest.of((name, tensor.dtype, tensor.shape) for name, tensor in weights)
    whole = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for (_, view), (_, tensor) in zip(layout.views(whole), weights, strict=True):
        view.copy_(tensor)
    shares = shares_of_ranks(layout, 2, BUCKET_BYTES, by_parameter=True)
    found: list[list[WeightPart]] = []
    for bucket in plan_buckets(layout, shares, BUCKET_BYTES, engine.loader.takes_rows):
        memory = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        for piece in bucket.pieces:
            memory[piece.at : piece.at + piece.num_bytes] = whole[piece.start : piece.start + piece.num_bytes]
        found.append(bucket.parts(memory))
    return found


def load(engine: Engine, policy: Qwen2ForCausalLM, *, buckets: list[list[WeightPart]]) -> None:
    engine.loader.begin(engine.version + 1, shapes_of(policy))
    for parts in buckets:
        engine.loader.load(parts)


def test_what_cannot_be_started_is_refused(maker: Maker, keeping: Engine, policies: Policies) -> None:
    swap(keeping, policies[0])
    keeping.add("a", [5, 6])
    with pytest.raises(InvariantError, match="the key is in use"):
        keeping.add("a", [5, 6])
    with pytest.raises(InvariantError, match="works with `deterministic` only"):
        keeping.add("b", [5, 6], seed=1)
    keeping.abort(["a"])
    fresh = maker(generator__max_new_tokens=4)
    with pytest.raises(InvariantError, match="no version yet"):
        fresh.add("a", [5, 6])
    fresh.use_own_weights(3)
    assert {int(v) for one in complete(fresh, prompts(2)).values() for v in one.versions} == {3}
    with pytest.raises(InvariantError, match="version 3 is loaded already"):
        fresh.use_own_weights(4)
