"""Mini-batches other than those of the packed batch: drawn at random in every epoch, or as many as the critic has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import copy_weights, make_config, make_groups, make_trainer, pack_groups

from asyncrl.learner.batch import Batch, MicroBatch, Name, repack
from asyncrl.learner.critic import Critic
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.step import Minibatch, plan_updates, sync_microbatches
from asyncrl.types import Group


def contents(batch: Batch, parts: list[list[MicroBatch]]) -> dict[Name, list[list[float]]]:
    """Returns for every trajectory its tokens, and of its action tokens the columns and their places in `batch`."""
    found: dict[Name, list[list[float]]] = {}
    places = torch.arange(batch.num_tokens)
    for micro in (micro for part in parts for micro in part):
        sequence = torch.cumsum(micro.position_ids == 0, dim=0) - 1
        for number, name in enumerate(micro.names):
            chosen = micro.seq == number
            columns = (micro.targets, micro.behavior_logprobs, micro.versions, places[micro.span])
            found[name] = [micro.input_ids[sequence == number].tolist(), *(c[chosen].tolist() for c in columns)]
            found[name].append([float(number in micro.ended.tolist())])
    return found


@pytest.mark.parametrize("rng", [None, 7])
def test_every_trajectory_stays_as_it_was_in_groups_that_stay_together(rng: int | None, tiny_model: Path) -> None:
    config = make_config(tiny_model, algorithm={"truncated": "bootstrap", "advantage": "gae"})
    groups = make_groups()
    groups[1].trajectories[2].status = groups[4].trajectories[0].status = "truncated"
    batch = pack_groups(config, groups)
    generator = None if rng is None else np.random.default_rng(rng)
    parts, num_members = repack(batch, 3, tokens_per_microbatch=40, rng=generator)
    assert num_members == [8, 8, 8] and batch.num_members == [24]
    assert contents(batch, parts) == contents(batch, batch.minibatches)
    tickets = [sorted({ticket for micro in part for ticket, _ in micro.names}) for part in parts]
    assert sorted(ticket for part in tickets for ticket in part) == list(range(10, 16))
    assert [len(part) for part in tickets] == [2, 2, 2]
    assert (tickets == [[10, 13], [11, 14], [12, 15]]) == (rng is None)
    assert all(len(micro.input_ids) <= 40 or len(micro.names) == 1 for part in parts for micro in part)


def planned(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """Returns a list that receives the tickets of every update of each step of a policy."""
    seen: list[list[list[int]]] = []

    def plan(*args: Any, **options: Any) -> list[Minibatch]:
        minibatches = plan_updates(*args, **options)
        seen.append([sorted({n[0] for m in one.micro_batches for n in m.names}) for one in minibatches])
        return minibatches

    monkeypatch.setattr("asyncrl.learner.step.plan_updates", plan)
    return seen


def train(model: Path, ranks: Ranks, groups: list[Group], steps: tuple[int, ...], seed: int = 0) -> dict[str, Tensor]:
    config = make_config(model, learner={"shuffle": True, "minibatches": 3, "epochs": 2}, seed=seed)
    trainer = make_trainer(config, ranks)
    for step in steps:
        trainer.train(pack_groups(config, groups), step=step)
    return copy_weights(trainer.policy)


def test_shuffled_minibatches_are_those_of_seed_step_and_epoch(
    one_rank: Ranks, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = planned(monkeypatch)
    groups = make_groups()
    first, again, other = (train(tiny_model, one_rank, groups, (1, 2), seed) for seed in (0, 0, 1))
    (one, two), repeated, others = seen[:2], seen[2:4], seen[4:]
    assert repeated == [one, two] and all(torch.equal(first[name], again[name]) for name in first)
    for step in (one, two, *others):
        for epoch in (step[:3], step[3:]):
            assert sorted(ticket for part in epoch for ticket in part) == list(range(10, 16))
    assert len({repr(epoch) for step in (one, two, *others) for epoch in (step[:3], step[3:])}) >= 6
    assert any(not torch.equal(first[name], other[name]) for name in first)
    train(tiny_model, one_rank, groups, (2,))
    assert seen[-1] == two, "a step that is trained again after a restart is the same"


def test_without_shuffling_all_epochs_have_the_packed_minibatches(
    one_rank: Ranks, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = planned(monkeypatch)
    config = make_config(tiny_model, learner={"minibatches": 3, "epochs": 2})
    make_trainer(config, one_rank).train(pack_groups(config, make_groups()), step=1)
    assert seen == [[[10, 13], [11, 14], [12, 15]] * 2]


def test_a_rank_with_fewer_groups_than_minibatches_has_empty_ones(one_rank: Ranks, tiny_model: Path) -> None:
    config = make_config(tiny_model, learner={"shuffle": True, "minibatches": 3, "epochs": 2})
    batch = pack_groups(config, make_groups(2))
    parts = [len(part) for part in repack(batch, 3, tokens_per_microbatch=40, rng=np.random.default_rng(0))[0]]
    assert len(parts) == 3 and 0 in parts


@pytest.mark.parametrize(
    ("own", "shuffle", "updates"),
    [({}, False, 4), ({"epochs": 3}, True, 6), ({"epochs": 1, "minibatches": 3}, False, 3)],
)
def test_a_critic_may_have_epochs_and_minibatches_of_its_own(
    own: dict[str, int], shuffle: bool, updates: int, one_rank: Ranks, tiny_model: Path
) -> None:
    settings = {"epochs": 2, "minibatches": 2, "shuffle": shuffle}
    config = make_config(tiny_model, algorithm={"advantage": "gae"}, critic={"lr": 1e-3, **own}, learner=settings)
    critic = Critic(config, one_rank)
    steps: list[float] = []
    step = critic.model.step

    def count(**options: float) -> None:
        steps.append(options["grad_norm"])
        step(**options)

    critic.model.step = count  # pyright: ignore[reportAttributeAccessIssue]
    batch = pack_groups(config, make_groups())
    returns = torch.linspace(-1, 1, batch.num_tokens)
    errors = [float((critic.values(batch, 1)[: batch.num_tokens] - returns).square().mean())]
    for number in range(1, 4):
        critic.values(batch, number)
        critic.train(returns)
    errors.append(float((critic.values(batch, 4)[: batch.num_tokens] - returns).square().mean()))
    assert len(steps) == 3 * updates
    assert errors[1] < errors[0], "values and returns of a token stay together"
    assert critic.finish()["critic/skipped_updates"] == 0.0


def test_a_repacked_batch_has_the_same_gradient(one_rank: Ranks, tiny_model: Path) -> None:
    """One mini-batch of all groups, packed again in another order, is the same update."""
    config = make_config(tiny_model)
    packed, groups = make_config(tiny_model, learner={"minibatches": 2}), make_groups()
    norms: list[float] = []
    for batch in (pack_groups(config, groups), pack_groups(packed, groups)):
        scored = sync_microbatches(batch.minibatches, batch.num_members, one_rank, 1)
        (update,) = plan_updates(batch, scored, one_rank, 1, config, epochs=1, minibatches=1)
        assert update.num_tokens == batch.num_tokens
        norms.append(make_trainer(config, one_rank).train(batch, step=1)["learner/grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
