"""The learner computes what the engine computed, expert by expert, with `algorithm.routing_replay`."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from routing_parts import (
    CHOSEN,
    FAMILIES,
    LAYERS,
    PROMPTS,
    config_of,
    errors_of,
    groups_of,
    live,
    move_routers,
    run_all,
)
from torch import Tensor
from worlds import pack_groups

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError, InvariantError
from asyncrl.generator.transformers_backend.engine import TransformersEngine
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model.policy import Policy
from asyncrl.types import Group
from benchmarks.families import save_family


@pytest.fixture(params=FAMILIES)
def sampled(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Config, list[Group]]:
    torch.set_num_threads(1)
    config = config_of(save_family(request.param, tmp_path / "model"))
    engine = TransformersEngine(config, seed=1)
    engine.use_own_weights(0)
    groups = groups_of(config, engine)
    engine.close()
    return config, groups


def test_replay_at_equal_weights_changes_nothing_and_helps_when_routers_have_moved(
    sampled: tuple[Config, list[Group]], one_rank: Ranks
) -> None:
    config, groups = sampled
    micros = pack_groups(config, groups).micro_batches
    assert any(len(micro.layout.computed) < len(micro.input_ids) for micro in micros), "no prefix is shared"
    replaying, routing = Policy(config, one_rank), Policy(live(config), one_rank)
    for micro in micros:
        torch.testing.assert_close(replaying.logprobs(micro), routing.logprobs(micro), atol=1e-6, rtol=0)
    assert errors_of(replaying, micros).max() < 1e-4
    move_routers(replaying)
    move_routers(routing)
    with_replay, without = errors_of(replaying, micros).mean(), errors_of(routing, micros).mean()
    assert with_replay < 0.7 * without, (with_replay, without)


def test_the_routing_is_that_of_the_models_own_forward_pass(sampled: tuple[Config, list[Group]]) -> None:
    from transformers import AutoModelForCausalLM

    config, groups = sampled
    model = AutoModelForCausalLM.from_pretrained(config.model.path, attn_implementation="eager").eval()
    for trajectory in (one for group in groups for one in group.trajectories):
        assert trajectory.routing is not None
        with torch.no_grad():
            logits = model(torch.from_numpy(trajectory.tokens).long()[None], output_router_logits=True).router_logits
        expected = torch.stack([one.topk(CHOSEN, dim=-1).indices for one in logits], dim=1)
        assert trajectory.routing.shape == (len(trajectory.tokens), LAYERS, CHOSEN)
        assert np.array_equal(np.sort(trajectory.routing[:-1]), np.sort(expected.numpy()[:-1]))
        assert not trajectory.routing[-1].any()


def test_the_gradient_reaches_the_router_also_with_checkpointing(
    sampled: tuple[Config, list[Group]], one_rank: Ranks
) -> None:
    config, groups = sampled
    found: list[dict[str, Tensor]] = []
    for checkpointing in (False, True):
        own = config.model_copy(
            update={"learner": config.learner.model_copy(update={"gradient_checkpointing": checkpointing})}
        )
        policy = Policy(own, one_rank)
        move_routers(policy)
        micros = pack_groups(own, groups).micro_batches
        for number, micro in enumerate(micros, start=1):
            logprobs, _ = policy.forward(micro)
            policy.backward(logprobs, torch.ones_like(logprobs), last=number == len(micros))
        found.append({name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None})
    plain, checkpointed = found
    assert sum("gate.weight" in name and bool(grad.any()) for name, grad in plain.items()) == LAYERS
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-5, rtol=1e-5)


def test_a_token_that_is_computed_again_keeps_the_routing_that_sampled_its_successor(tmp_path: Path) -> None:
    """New weights arrive in the middle; keys and values are computed again under them."""
    torch.set_num_threads(1)
    config = config_of(save_family("qwen3_moe", tmp_path / "model"), weights={"kv_cache": "recompute"})
    engine = TransformersEngine(config, seed=1)
    own = [(name, parameter.clone()) for name, parameter in engine._decoder._model.named_parameters()]
    other = copy.deepcopy(own)
    for name, tensor in other:
        if name.endswith("gate.weight"):
            tensor.neg_()
    engine.swap(0, own)
    engine.add("a", PROMPTS[0], max_tokens=12)
    (done,) = run_all(engine, {6: other}).values()
    assert done.routing is not None and set(done.versions.tolist()) == {0, 1}
    kept = engine_routing(engine, own, PROMPTS[0] + done.tokens)
    renewed = engine_routing(engine, other, PROMPTS[0] + done.tokens)
    prompt = len(PROMPTS[0])
    sampled_before = int((done.versions == 0).sum())
    assert not np.array_equal(kept[:prompt], renewed[:prompt])
    assert np.array_equal(done.routing[: prompt - 1], renewed[: prompt - 1])
    assert np.array_equal(done.routing[prompt - 1 : prompt - 1 + sampled_before],
                          kept[prompt - 1 : prompt - 1 + sampled_before])  # fmt: skip
    assert np.array_equal(done.routing[prompt - 1 + sampled_before : -1], renewed[prompt - 1 + sampled_before : -1])


def engine_routing(engine: TransformersEngine, weights: list[tuple[str, Tensor]], tokens: list[int]) -> np.ndarray:
    """Returns the experts of the tokens, computed in one pass with these weights."""
    engine.swap(engine.version + 1, weights)
    engine.add("whole", tokens, max_tokens=1)
    (done,) = run_all(engine).values()
    assert done.routing is not None
    return done.routing[: len(tokens)]


def test_routings_of_another_model_are_refused(sampled: tuple[Config, list[Group]], one_rank: Ranks) -> None:
    config, groups = sampled
    replay = Policy(config, one_rank).replay
    assert replay is not None
    replay.check(groups)
    first = groups[0].trajectories[0]
    routing = first.routing
    assert routing is not None
    for wrong, text in (
        (None, r"ticket 0, trajectory 0: its routing is None, but algorithm.routing_replay needs \(\d+, 2, 2\) of 4"),
        (routing[:, :1], r"its routing is \(\d+, 1, 2\), but"),
        (routing[1:], r"its routing is \(\d+, 2, 2\), but"),
        (routing + np.uint8(4), "its routing is .* of 4 experts"),
        (routing * np.uint8(0), "a token was routed to one expert twice"),
    ):
        first.routing = wrong
        with pytest.raises(InvariantError, match=text):
            replay.check(groups)


def test_a_dense_model_and_what_cannot_replay_are_refused(tiny_model: Path, one_rank: Ranks) -> None:
    with pytest.raises(ConfigError, match=r"routing_replay = 'engine': the model of type qwen2 at .* has no experts"):
        Policy(config_of(tiny_model), one_rank)
    with pytest.raises(ConfigError, match=r"of type qwen2 .* has no experts"):
        TransformersEngine(config_of(tiny_model), seed=1)
    with pytest.raises(ValueError, match=r"single turns only, not with environment.name = 'e'"):
        config_of(tiny_model, environment={"name": "e"})
    with pytest.raises(ValueError, match=r"and learner.sequence_parallel = 2; use learner.sequence_parallel=1"):
        config_of(tiny_model, learner={"sequence_parallel": 2}, launch={"learners": 2})
