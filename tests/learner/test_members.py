"""Members of several rows, and turns: what a batch, the advantages, the losses and the gradient make of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor
from worlds import VOCABULARY, gradients_before_step, make_config, make_trainer

from asyncrl.algorithms.advantages import dr_grpo, grpo
from asyncrl.errors import ConfigError, InvariantError
from asyncrl.learner.algorithm import check_algorithm, make_algorithm
from asyncrl.learner.batch import Batch, MicroBatch, make_batch, pack_groups
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model.attention import find_firsts, make_layout
from asyncrl.learner.step import Estimates, ModelScores, estimate, token_losses
from asyncrl.learner.update import sync_microbatches
from asyncrl.types import NO_VERSION, EpisodeOutcome, Group, Trajectory
from tests.helpers.examples import examples

ENVIRONMENT = {"name": "guess"}
MEMBERS: list[tuple[float, list[list[tuple[int, float]]]]] = [
    (1.0, [[(2, 0.25), (3, 0.0)], [(1, 0.5)]]),
    (0.0, [[(4, 0.0)]]),
    (2.5, [[(2, 0.5)], [(3, 1.0), (1, 0.0)], [(2, 0.25)]]),
    (0.5, [[(1, 0.0), (1, 0.0), (1, 0.5)]]),
]
"""The reward of each member, and the turns of each of its rows: their action tokens, and the environment's reward."""
NOTHING = EpisodeOutcome("done", [], 0, environment_s=0.0, tries=0, lost_tokens=0)


def make_row(rng: np.random.Generator, member: int, reward: float, turns: Sequence[tuple[int, float]]) -> Trajectory:
    """Three tokens of a prompt, two of the group and that of the member, and two of the environment between turns."""
    mask = np.array([False] * 3 + [True] * turns[0][0] + [b for n, _ in turns[1:] for b in [False] * 2 + [True] * n])
    tokens = rng.integers(0, VOCABULARY, len(mask)).astype(np.int32)
    tokens[:2], tokens[2] = 5, member
    return Trajectory(
        tokens=tokens,
        action_mask=mask,
        behavior_logprobs=np.where(mask, -rng.gamma(2.0, 1.5, len(mask)), 0.0).astype(np.float32),
        versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
        status="completed",
        reward=reward,
        episode=structs.replace(NOTHING, turn_rewards=[own for _, own in turns]),
        member=member,
    )


def make_groups(count: int = 2, *, members: Any = MEMBERS) -> list[Group]:
    """Groups of these members; in every other one they are in the reverse order."""
    rng = np.random.default_rng(0)
    made: list[Group] = []
    for ticket in range(count):
        ordered = members[:: -1 if ticket % 2 else 1]
        rows = [make_row(rng, n, reward, turns) for n, (reward, all_turns) in enumerate(ordered) for turns in all_turns]
        made.append(Group(10 + ticket, 0, 0, ticket, "test", 0, 0, rows))
    return made


def pack(groups: Sequence[Group], tokens: int = 14, **options: Any) -> Batch:
    return make_batch(groups, tokens_per_microbatch=tokens, **options)


def by_row(batch: Batch, column: Tensor) -> dict[tuple[int, int], list[float]]:
    """The column's values of every row, by ticket and place in the group."""
    return {
        name: column[micro.span][micro.seq == number].tolist()
        for micro in batch.micro_batches
        for number, name in enumerate(micro.names)
    }


def by_member(batch: Batch, groups: Sequence[Group], column: Tensor) -> list[list[float]]:
    """The column's values of every member, row after row, in the order of the groups."""
    rows, found = by_row(batch, column), list[list[float]]()
    for group in groups:
        parts: list[list[float]] = [[] for _ in range(len(group.firsts))]
        for place, member in enumerate(group.members):
            parts[member] += rows[group.ticket, place]
        found += parts
    return found


def test_rows_of_a_member_lie_in_different_micro_batches_and_are_one_member() -> None:
    groups = make_groups()
    batch = pack(groups)
    assert max(len(micro.input_ids) for micro in batch.micro_batches) <= 14
    assert (batch.num_sequences, batch.num_trained, len(batch.rewards)) == (14, 8, 8)
    homes = {name: number for number, micro in enumerate(batch.micro_batches) for name in micro.names}
    assert len({homes[10, row] for row in (3, 4, 5)}) > 1, "of the member with three rows"
    expected = {
        (group.ticket, place): (
            row.reward,
            sum(t.num_action_tokens for t in group.trajectories if t.member == row.member),
        )
        for group in groups
        for place, row in enumerate(group.trajectories)
    }
    for micro in batch.micro_batches:
        for name, member in zip(micro.names, micro.members.tolist(), strict=True):
            assert (batch.rewards[member], batch.lengths[member]) == expected[name]
            assert groups[batch.group[member]].ticket == name[0]
    assert (batch.prompt_tokens == 3).all()
    turns = [[k for k, (n, _) in enumerate(chain(*rows)) for _ in range(n)] for _, rows in MEMBERS]
    assert batch.turn is not None and batch.turn_rewards is not None
    assert by_member(batch, groups, batch.turn) == turns + turns[::-1]
    given_rewards = [[own for turns in rows for _, own in turns] for _, rows in MEMBERS]
    found = [row[~row.isnan()].tolist() for row in batch.turn_rewards]
    assert sorted(found) == sorted(given_rewards * 2) and batch.turn_rewards.shape == (8, 4)
    (minibatch,) = sync_microbatches(batch.minibatches, batch.num_members, FakeRanks(), 1)
    assert (minibatch.num_tokens, minibatch.num_sequences) == (2 * 21, 8)


class FakeRanks(Ranks):
    """One rank, without a process group."""

    def __init__(self) -> None: ...

    def gather(self, values: Tensor) -> Tensor:
        return values[None]

    def sum(self, values: Tensor) -> Tensor:
        return values


def estimates(batch: Batch, scores: ModelScores | None = None, **algorithm: Any) -> Estimates:
    config = make_config(Path("model"), algorithm=algorithm, environment=ENVIRONMENT)
    return estimate(make_algorithm(config), batch, scores or ModelScores(), FakeRanks())


def scores_of(batch: Batch) -> ModelScores:
    rng = torch.Generator().manual_seed(1)
    columns = (0.3 * torch.randn(batch.num_tokens, generator=rng) for _ in range(3))
    proximal, reference, values = columns
    behavior = batch.behavior_logprobs
    return ModelScores(behavior + proximal, behavior + reference, values, torch.full((len(batch.ended),), 0.5))


def test_members_are_compared_and_all_their_rows_get_the_advantage() -> None:
    groups = make_groups()
    rewards, owner = torch.tensor([m.reward for g in groups for m in g.firsts]).double(), torch.arange(8) // 4
    for name, function in (("grpo", grpo), ("dr_grpo", dr_grpo)):
        batch = pack(groups)
        found = by_member(batch, groups, estimates(batch, advantage=name).advantages)
        for own, expected in zip(found, function(rewards, owner).tolist(), strict=True):
            assert own == pytest.approx([expected] * len(own))
    lengths = torch.tensor([row.num_action_tokens for group in groups for row in group.trajectories])
    assert lengths.sum() == sum(map(len, found))


def plain_rewards(group: Group, member: int) -> list[float]:
    """The reward at each action token of a member: the environment's at the end of a turn, and the rest at the last."""
    found: list[float] = []
    rows = [row for row, number in zip(group.trajectories, group.members, strict=True) if number == member]
    for row in rows:
        assert row.episode is not None
        mask, given_rewards = [*row.action_mask.tolist(), False], iter(row.episode.turn_rewards)
        for place, action in enumerate(mask[:-1]):
            if action:
                found.append(0.0 if mask[place + 1] else next(given_rewards))
    found[-1] += rows[0].reward - sum(found)
    return found


def plain_gae(rewards: list[float], values: list[float], last: float, gamma: float, lam: float) -> list[float]:
    found: list[float] = []
    advantage, following = 0.0, last
    for reward, value in zip(rewards[::-1], values[::-1], strict=True):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        following = value
        found.insert(0, advantage)
    return found


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_gae_by_turn_runs_over_the_rows_of_a_member(kl_coef: float) -> None:
    groups = make_groups()
    for group in groups:
        for row in group.trajectories:
            row.status = "truncated" if row.member == 2 else "completed"
    batch = pack(groups, bootstrap_truncated=True)
    assert len(batch.ended) == 2, "only the last row of a member ends it"
    scores = scores_of(batch)
    options = {"gamma": 0.9, "lam": 0.8}
    got = estimates(batch, scores, advantage="gae", advantage_options=options, loss="ppo_clip",
                    truncated="bootstrap", kl_reward_coef=kl_coef)  # fmt: skip
    assert got.returns is not None and scores.values is not None
    assert scores.proximal_logprobs is not None and scores.ref_logprobs is not None
    values = by_member(batch, groups, scores.values)
    penalties = by_member(batch, groups, kl_coef * (scores.proximal_logprobs - scores.ref_logprobs))
    found, returns = (by_member(batch, groups, column) for column in (got.advantages, got.returns))
    places = [(group, member) for group in groups for member in range(4)]
    for at, (group, member) in enumerate(places):
        rewards = [r - p for r, p in zip(plain_rewards(group, member), penalties[at], strict=True)]
        expected = plain_gae(rewards, values[at], 0.5 if member == 2 else 0.0, 0.9, 0.8)
        assert found[at] == pytest.approx(expected, abs=1e-5)
        assert returns[at] == pytest.approx([a + v for a, v in zip(expected, values[at], strict=True)], abs=1e-5)


@pytest.mark.parametrize("tokens", [14, 1000])
@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_advantages_by_turn_are_on_the_tokens_of_the_turn(tokens: int, kl_coef: float) -> None:
    groups = make_groups()
    batch = pack(groups, tokens)
    scores = scores_of(batch) if kl_coef else ModelScores()
    got = estimates(batch, scores, advantage="turn_grpo", kl_reward_coef=kl_coef)
    found = by_member(batch, groups, got.advantages)
    penalties = [[0.0] * len(own) for own in found]
    if scores.proximal_logprobs is not None and scores.ref_logprobs is not None:
        penalties = by_member(batch, groups, kl_coef * (scores.proximal_logprobs - scores.ref_logprobs))
    assert batch.turn is not None
    turns = by_member(batch, groups, batch.turn)
    places = [(group, member) for group in groups for member in range(4)]
    returns: list[dict[int, float]] = []
    for at, (group, member) in enumerate(places):
        rewards = [r - p for r, p in zip(plain_rewards(group, member), penalties[at], strict=True)]
        pairs = list(zip(turns[at], rewards, strict=True))
        returns.append({int(k): sum(r for turn, r in pairs if turn >= k) for k in turns[at]})
    for at, own in enumerate(found):
        for turn, value in zip(turns[at], own, strict=True):
            others = [one[int(turn)] for one in returns[at // 4 * 4 : at // 4 * 4 + 4] if turn in one]
            expected = (
                (returns[at][int(turn)] - np.mean(others)) / (np.std(others, ddof=1) + 1e-6) if len(others) > 1 else 0.0
            )
            assert value == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "seq-mean-token-sum", "token-mean"])
def test_rows_of_a_member_weigh_as_one_sequence_wherever_they_lie(aggregation: str) -> None:
    groups = make_groups()
    config = make_config(
        Path("model"), algorithm={"aggregation": aggregation, "loss": "reinforce_is"}, environment=ENVIRONMENT
    )
    algorithm = make_algorithm(config)
    found: list[dict[tuple[int, int], list[float]]] = []
    for tokens in (14, 1000):
        batch = pack(groups, tokens)
        made = estimate(algorithm, batch, ModelScores(), FakeRanks())
        (minibatch,) = sync_microbatches(batch.minibatches, batch.num_members, FakeRanks(), 1)
        gradient = torch.empty(batch.num_tokens)
        for micro in batch.micro_batches:
            own, logprobs = made.of(micro, torch.device("cpu")), micro.behavior_logprobs
            losses = token_losses(algorithm, micro, own, logprobs, logprobs, counts=minibatch.counts, version=0)
            gradient[micro.span] = losses.gradient
        found.append(by_row(batch, gradient))
        weights = {"seq-mean-token-mean": 1 / (8 * batch.lengths), "seq-mean-token-sum": torch.full((8,), 1 / 8)}
        weight = weights.get(aggregation, torch.full((8,), 1 / batch.num_tokens))[batch.member_of_token]
        torch.testing.assert_close(gradient, -made.advantages * weight, rtol=1e-5, atol=1e-7)
    assert found[0].keys() == found[1].keys()
    for name, own in found[0].items():
        assert own == pytest.approx(found[1][name], rel=1e-5)


@pytest.mark.parametrize("tokens", [14, 40])
def test_the_gradient_does_not_depend_on_where_rows_lie(tokens: int, one_rank: Ranks, tiny_model: Path) -> None:
    """A step with sequence means and several mini-batches, against one packed row for each of these."""
    algorithm = {"advantage": "turn_grpo", "aggregation": "seq-mean-token-mean", "entropy_coef": 0.1}
    found: list[dict[str, Tensor]] = []
    for budget in (tokens, 1000):
        options = {"tokens_per_microbatch": budget, "minibatches": 2, "epochs": 2, "max_grad_norm": 1e9}
        config = make_config(tiny_model, algorithm=algorithm, learner=options, environment=ENVIRONMENT)
        trainer = make_trainer(config, one_rank)
        batch = make_batch(make_groups(4), tokens_per_microbatch=budget)
        with gradients_before_step(trainer.policy) as gradients:
            trainer.train(batch, step=1)
        found.append(gradients)
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-3, atol=1e-5)


def test_members_that_are_not_trained_keep_their_rewards_and_turns() -> None:
    groups = make_groups(1)
    for row in groups[0].trajectories:
        row.status = "truncated" if row.member == 2 else "completed"
    batch = pack(groups, skip_truncated=True)
    assert (batch.num_sequences, batch.num_trained, len(batch.rewards)) == (4, 3, 4)
    assert batch.rewards[3] == 2.5 and batch.turn_rewards is not None
    assert batch.turn_rewards[3].tolist() == [0.5, 1.0, 0.0, 0.25]
    found = by_row(batch, estimates(batch, advantage="turn_grpo").advantages)
    returns = [1.0, 0.0, 2.5, 0.5]
    assert found[10, 0][0] == pytest.approx((1.0 - np.mean(returns)) / np.std(returns, ddof=1), rel=1e-4)


def test_turns_and_their_rewards_must_agree() -> None:
    groups = make_groups(1)
    episode = groups[0].trajectories[0].episode
    assert episode is not None
    episode.turn_rewards.append(1.0)
    with pytest.raises(InvariantError, match="an episode of 2 turns has 3 rewards of turns"):
        pack(groups)


def test_without_environments_there_are_no_turns() -> None:
    groups = make_groups(1)
    for row in groups[0].trajectories:
        row.episode = None
    batch = pack(groups)
    assert batch.turn is None and batch.turn_rewards is None
    with pytest.raises(InvariantError, match="a group reached the learner without turns"):
        estimates(batch, advantage="turn_grpo")
    with pytest.raises(
        ConfigError, match=r"'progress' takes turn_rewards, which only episodes have: set environment\.name"
    ):
        check_algorithm(make_config(Path("model"), algorithm={"advantage": "progress"}))


# --- observations ---


def test_what_an_environment_said_has_no_gradient(one_rank: Ranks, tiny_model: Path) -> None:
    """The states whose logits score an observation get a gradient of exactly 0 from the output layer."""
    config = make_config(tiny_model, algorithm={"entropy_coef": 0.1}, environment=ENVIRONMENT)
    trainer = make_trainer(config, one_rank)
    model = trainer.policy.model
    (micro,) = pack(make_groups(1), 1000).micro_batches
    seen: list[Tensor] = []
    handle = model.base_model.register_forward_hook(lambda module, inputs, output: keep(output, seen))
    logprobs, entropies = trainer.policy.forward(micro)
    handle.remove()
    outputs = torch.stack([logprobs, entropies])
    trainer.policy.backward(outputs, torch.ones_like(outputs), last=True)
    (states,) = seen
    gradient = states.grad
    assert gradient is not None
    gradient = gradient.reshape(-1, gradient.shape[-1])
    scoring = torch.zeros(len(gradient), dtype=torch.bool)
    scoring[micro.layout.twins[micro.logit_index]] = True
    assert (gradient[~scoring] == 0).all() and (gradient[scoring].abs().sum(dim=1) > 0).all()
    assert (~scoring).sum() > 10


def keep(output: Any, seen: list[Tensor]) -> None:
    output.last_hidden_state.retain_grad()
    seen.append(output.last_hidden_state)


# --- packing ---


def some(strategy: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[list[Any]]:
    return st.lists(strategy, min_size=1, max_size=most)


@settings(max_examples=examples(60))
@given(some(some(some(some(st.integers(0, 1), 6)))))
def test_tokens_in_common_with_the_members_first_row_are_computed_once(groups: list[list[list[list[int]]]]) -> None:
    rows = [(g, (g, m), row) for g, group in enumerate(groups) for m, member in enumerate(group) for row in member]
    starts = np.cumsum([0, *(len(row) for _, _, row in rows)]).tolist()
    first: dict[Any, int] = {}
    expected: list[int] = []
    for number, (group, member, row) in enumerate(rows):
        leaders = [first.setdefault(group, number), first.setdefault(member, number)]
        common = [
            0 if leader == number else sum(row[: at + 1] == rows[leader][2][: at + 1] for at in range(len(row)))
            for leader in leaders
        ]
        shared = leaders[int(common[1] > common[0])]
        for at in range(len(row)):
            place = starts[shared] + at if at < max(common) else starts[number] + at
            expected.append(expected[place] if place < len(expected) else place)
    flat, sizes = np.array([token for _, _, row in rows for token in row]), np.array([len(row) for _, _, row in rows])
    names = [member for _, member, _ in rows]
    members = np.array([sorted(set(names)).index(name) for name in names])
    firsts = find_firsts(flat, sizes, np.array([group for group, _, _ in rows]), members)
    assert firsts.tolist() == expected
    layout = make_layout(sizes, firsts)
    assert layout.computed[layout.twins].tolist() == expected


def test_rows_of_a_member_stay_together_if_they_fit() -> None:
    lengths, members = np.array([6, 5, 6, 5, 5, 6]), np.array([0, 0, 1, 1, 2, 2])
    parts = pack_groups(lengths, np.zeros(6, dtype=np.int64), 12, members)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    micro: MicroBatch = pack(make_groups(1), 1000).micro_batches[0]
    assert len(micro.layout.computed) < len(micro.input_ids)
