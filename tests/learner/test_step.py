"""The inputs of a step's updates against plain computations, and updates that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification
from worlds import CRITIC, copy_weights, make_config, make_groups, make_trainer, pack_groups

from asyncrl.algorithms.kl import kl_estimate
from asyncrl.errors import InvariantError, RunError
from asyncrl.learner import update
from asyncrl.learner.algorithm import make_algorithm
from asyncrl.learner.batch import Batch, make_batch
from asyncrl.learner.critic import Critic, CriticModel
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model.saving import collect_state
from asyncrl.learner.step import Estimates, ModelScores, Trainer, estimate, token_losses
from asyncrl.learner.update import sync_microbatches
from asyncrl.types import Trajectory

GAE: dict[str, Any] = {"advantage": "gae", "advantage_options": {"gamma": 0.9, "lam": 0.8}, "loss": "ppo_clip"}


def estimates_of(trainer: Trainer, batch: Batch, scores: ModelScores) -> Estimates:
    return estimate(trainer.algorithm, batch, scores, trainer.ranks)


def by_name(batch: Batch, column: Tensor) -> dict[tuple[int, int], list[float]]:
    """Returns the column's values of every trajectory."""
    return {
        name: column[micro.span][micro.seq == number].tolist()
        for micro in batch.micro_batches
        for number, name in enumerate(micro.names)
    }


def plain_gae(reward: float, values: list[float], last: float) -> tuple[list[float], list[float]]:
    advantages: list[float] = []
    following, next_value = 0.0, last
    for t in reversed(range(len(values))):
        r = reward if t == len(values) - 1 else 0.0
        following = r + 0.9 * next_value - values[t] + 0.9 * 0.8 * following
        next_value = values[t]
        advantages.insert(0, following)
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def test_a_step_of_dropped_groups_makes_no_update(one_rank: Ranks, tiny_model: Path) -> None:
    config = make_config(tiny_model, replay={"zero_variance": "drop"})
    trainer = make_trainer(config, one_rank)
    before = copy_weights(trainer.policy)
    assert trainer.train(pack_groups(config, []), step=1) == {"learner/tokens": 0.0, "learner/skipped_updates": 0.0}
    assert all(torch.equal(weight, before[name]) for name, weight in copy_weights(trainer.policy).items())
    with pytest.raises(RunError, match="step 1: the batch has no action token"):
        make_trainer(make_config(tiny_model), one_rank).train(pack_groups(config, []), step=1)


def test_minibatches_that_dropping_left_empty_are_no_updates(one_rank: Ranks, tiny_model: Path) -> None:
    learner = {"minibatches": 3, "epochs": 2}
    config = make_config(tiny_model, learner=learner, replay={"zero_variance": "drop"})
    trainer = make_trainer(config, one_rank)
    before = copy_weights(trainer.policy)
    groups = make_groups(2)
    metrics = trainer.train(pack_groups(config, groups), step=3)
    assert metrics["learner/skipped_updates"] == 0.0
    updates = trainer.policy.engine.global_steps
    assert updates == 4, "two mini-batches with a group in each of two epochs"
    assert any(not torch.equal(weight, before[name]) for name, weight in copy_weights(trainer.policy).items())


def test_truncated_trajectories_that_are_masked_still_count_in_their_group(one_rank: Ranks, tiny_model: Path) -> None:
    config = make_config(tiny_model, algorithm={"advantage": "dr_grpo"})
    trainer = make_trainer(config, one_rank)
    groups = make_groups(2)
    groups[0].trajectories[1].status = "truncated"
    whole = pack_groups(config, groups)
    masked = make_batch(groups, tokens_per_microbatch=40, skip_truncated=True)
    before, after = (by_name(b, estimates_of(trainer, b, ModelScores()).advantages) for b in (whole, masked))
    assert set(before) - set(after) == {(10, 1)}
    assert after == {name: values for name, values in before.items() if name != (10, 1)}
    assert masked.num_sequences == 7 and len(masked.rewards) == 8


def test_the_greedy_answer_is_the_baseline_of_remax(one_rank: Ranks, tiny_model: Path) -> None:
    config = make_config(tiny_model, algorithm={"advantage": "remax"})
    trainer = make_trainer(config, one_rank)
    groups = make_groups(3)
    with pytest.raises(InvariantError, match="without the reward of its greedy completion"):
        estimates_of(trainer, pack_groups(config, groups), ModelScores())
    for number, group in enumerate(groups):
        group.greedy_reward = number / 2
    batch = pack_groups(config, groups)
    got = by_name(batch, estimates_of(trainer, batch, ModelScores()).advantages)
    for number, group in enumerate(groups):
        for index, trajectory in enumerate(group.trajectories):
            expected = [trajectory.reward - number / 2] * trajectory.num_action_tokens
            assert got[(group.ticket, index)] == pytest.approx(expected)


def test_values_are_those_of_the_state_before_each_action(one_rank: Ranks, tiny_model: Path) -> None:
    config = make_config(tiny_model, algorithm=GAE)
    critic = Critic(config, one_rank)
    fill_head(critic.model)
    groups = make_groups(3)
    batch = pack_groups(config, groups)
    values = by_name(batch, critic.values(batch, 1))
    for group in groups:
        for number, trajectory in enumerate(group.trajectories):
            expected = critic.model.network.head(plain_hidden(critic, trajectory)[:-1])
            mask = torch.from_numpy(trajectory.action_mask[1:])
            assert values[(group.ticket, number)] == pytest.approx(expected[mask].tolist(), abs=1e-5)


def test_a_truncated_trajectory_ends_with_the_value_after_its_last_token(one_rank: Ranks, tiny_model: Path) -> None:
    """The first of two sequences in one row is truncated."""
    config = make_config(tiny_model, algorithm={**GAE, "truncated": "bootstrap"})
    trainer = make_trainer(config, one_rank)
    critic = trainer.critic
    assert isinstance(critic, Critic)
    fill_head(critic.model)
    groups = make_groups(1)
    groups[0].trajectories = groups[0].trajectories[1:3]
    cut, whole = groups[0].trajectories
    cut.status = "truncated"
    batch = pack_groups(config, groups)
    (micro,) = batch.micro_batches
    assert len(micro.names) == 2 and batch.ended.tolist() == [0]
    scores = trainer._score(batch, sync_microbatches(batch.minibatches, batch.num_members, one_rank, 1), 1)
    assert scores.values is not None and scores.after is not None
    torch.testing.assert_close(critic.values(pack_groups(make_config(tiny_model), groups), 1), scores.values)
    hidden = plain_hidden(critic, cut)
    (last,) = critic.model.network.head(hidden[-1:]).tolist()
    assert scores.after.tolist() == pytest.approx([last], abs=1e-5) and abs(last) > 0.01
    got = estimates_of(trainer, batch, scores)
    values = by_name(batch, scores.values)
    for number, trajectory, after in ((0, cut, last), (1, whole, 0.0)):
        own = values[(10, number)]
        assert got.returns is not None
        advantages, returns = plain_gae(trajectory.reward, own, after)
        assert by_name(batch, got.advantages)[(10, number)] == pytest.approx(advantages, abs=1e-5)
        assert by_name(batch, got.returns)[(10, number)] == pytest.approx(returns, abs=1e-5)
    metrics = [make_trainer(config, one_rank).train(batch, step=1) for _ in range(2)]
    assert metrics[0] == metrics[1]


def fill_head(model: CriticModel) -> None:
    with torch.no_grad():
        model.network.head.weight.normal_(generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def plain_hidden(critic: Critic, trajectory: Trajectory) -> Tensor:
    """Returns the last hidden states of all tokens of the trajectory, computed alone and without packing."""
    model = critic.model.model
    packed = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    ids = torch.from_numpy(trajectory.tokens.astype(np.int64)).unsqueeze(0)
    hidden = model.base_model(input_ids=ids).last_hidden_state[0]
    model.set_attn_implementation(packed)
    return hidden


def test_a_new_critic_returns_zero_and_learns_the_returns(one_rank: Ranks, tiny_model: Path) -> None:
    settings = {"lr": 3e-3, "warmup_steps": 30}
    config = make_config(tiny_model, algorithm=GAE, critic=settings, steps=60)
    trainer = make_trainer(config, one_rank)
    batch = pack_groups(config, make_groups(2))
    policy = copy_weights(trainer.policy)
    first = trainer.train(batch, step=1)
    assert first["critic/value_mean"] == 0.0 and "critic/explained_variance" in first
    assert first["learner/grad_norm"] == 0.0 and first["learner/lr"] == 0.0
    for step in range(2, 31):
        last = trainer.train(batch, step=step)
    assert last["critic/explained_variance"] > first["critic/explained_variance"] + 0.2
    assert last["critic/loss"] < first["critic/loss"]
    assert all(torch.equal(weight, policy[name]) for name, weight in copy_weights(trainer.policy).items())
    trainer.train(batch, step=31)
    assert not all(torch.equal(weight, policy[name]) for name, weight in copy_weights(trainer.policy).items())


def test_a_saved_critic_is_loaded_again(one_rank: Ranks, tiny_model: Path, tmp_path: Path) -> None:
    config = make_config(tiny_model, algorithm=GAE, critic={"lr": 0.01})
    trainer = make_trainer(config, one_rank)
    batch = pack_groups(config, make_groups(2))
    trainer.train(batch, step=1)
    assert trainer.critic is not None
    trainer.critic.save(tmp_path / "critic")
    again = Critic(make_config(tiny_model, algorithm=GAE, critic={"path": str(tmp_path / "critic")}), one_rank)
    values = again.values(batch, 1)
    torch.testing.assert_close(values, trainer.critic.values(batch, 2))
    assert values.abs().max() > 0.01
    assert AutoModelForTokenClassification.from_pretrained(tmp_path / "critic").config.num_labels == 1


def test_the_loss_contains_the_divergence_from_the_reference(one_rank: Ranks, tiny_model: Path) -> None:
    """At the start the policy equals its reference, so the gradient is 0; later the gradient points back to it."""
    config = make_config(tiny_model, algorithm={"kl_loss_coef": 10.0}, learner={"lr": 1e-2, "max_grad_norm": 100})
    groups = make_groups(2)
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.reward = 1.0
    trainer = make_trainer(config, one_rank)
    batch = pack_groups(config, groups)
    assert trainer.train(batch, step=1)["learner/grad_norm"] == pytest.approx(0, abs=1e-4)
    with torch.no_grad():
        for parameter in trainer.policy.network.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    divergences = [trainer.train(batch, step=2)["learner/loss"] for _ in range(8)]
    assert divergences[-1] < 0.3 * divergences[0]
    kl = kl_estimate(torch.tensor([-1.0]), torch.tensor([-2.0]), estimator="k3+")
    assert float(kl) > 0


@pytest.mark.parametrize("correction", [{"high": 1.5}, {"level": "geometric", "mode": "mask", "low": 0.7, "high": 1.3}])
def test_the_divergence_in_the_loss_is_weighed_as_stale_tokens_are(
    correction: dict[str, Any], tiny_model: Path
) -> None:
    """The gradient is -d of each token, times the importance weight."""
    config = make_config(tiny_model, algorithm={"loss": "decoupled_ppo", "kl_loss_coef": 0.3, "correction": correction})
    without = make_config(tiny_model, algorithm={"loss": "decoupled_ppo", "correction": correction})
    (micro,) = make_batch(make_groups(2), tokens_per_microbatch=1000).micro_batches
    count = len(micro.targets)
    logprobs, reference = micro.behavior_logprobs + 0.4 * torch.randn(2, count, generator=torch.manual_seed(3))
    estimates = Estimates(torch.randn(count), None, None, reference)
    counts = {"num_tokens": count, "num_sequences": len(micro.names)}
    gradients = [
        token_losses(make_algorithm(c), micro, estimates, logprobs, logprobs, counts=counts, version=0).gradient
        for c in (config, without)
    ]
    ratios = (logprobs - micro.behavior_logprobs).double()
    for token in range(count):
        own = micro.seq == micro.seq[token]
        if "low" in correction:
            ratio = float(ratios[own].mean().exp())
            weight = ratio if 0.7 <= ratio <= 1.3 else 0.0
        else:
            weight = min(float(ratios[token].exp()), 1.5)
        expected = -0.3 * weight * float(reference[token] - logprobs[token]) / count
        assert float(gradients[0][token] - gradients[1][token]) == pytest.approx(expected, rel=1e-3, abs=1e-6)


def gradient_steps(trainer: Trainer, batch: Batch) -> int:
    calls: list[float] = []
    step = trainer.policy.step

    def count(**options: float) -> None:
        calls.append(options["grad_norm"])
        step(**options)

    trainer.policy.step = count  # pyright: ignore[reportAttributeAccessIssue]
    trainer.train(batch, step=1)
    return len(calls)


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (1, 3), (2, 3)])
def test_epochs_and_minibatches(epochs: int, minibatches: int, one_rank: Ranks, tiny_model: Path) -> None:
    settings = {"epochs": epochs, "minibatches": minibatches}
    config = make_config(tiny_model, learner=settings, algorithm={"advantage": "rloo"})
    batch = pack_groups(config, make_groups())
    tickets = [{name[0] for micro in parts for name in micro.names} for parts in batch.minibatches]
    assert sorted(ticket for part in tickets for ticket in part) == list(range(10, 16))
    trainer = make_trainer(config, one_rank)
    assert gradient_steps(trainer, batch) == epochs * minibatches
    one = make_batch(make_groups(), tokens_per_microbatch=40)
    assert (batch.num_tokens, batch.num_sequences) == (one.num_tokens, one.num_sequences)


def test_the_proximal_policy_stays_that_of_the_step(one_rank: Ranks, tiny_model: Path) -> None:
    """The second pass over a batch is clipped around the policy before the step, not the one before the update."""
    groups = make_groups()
    losses: dict[str, float] = {}
    for clip in (1e-4, 10.0):
        options = {"clip_low": min(clip, 0.9), "clip_high": clip, "dual_clip": None}
        config = make_config(
            tiny_model,
            learner={"epochs": 4, "lr": 1e-2, "max_grad_norm": 100.0},
            algorithm={"loss": "decoupled_ppo", "loss_options": options, "correction": {"high": None}},
        )
        trainer = make_trainer(config, one_rank)
        losses[str(clip)] = trainer.train(pack_groups(config, groups), step=1)["learner/clip_fraction"]
    assert losses["0.0001"] > 0.3 and losses["10.0"] < 0.1


def batch_of(trainer: Trainer, step: int) -> Batch:
    return pack_groups(trainer.config, make_groups(4, seed=step))


def spoil(batch: Batch, value: float = float("nan")) -> Batch:
    """Sets the log-prob of one token in the batch's third micro-batch to `value`; returns the batch."""
    batch.micro_batches[2].behavior_logprobs[-1] = value
    return batch


def train_with_bad_logprob(trainer: Trainer, batch: Batch, step: int) -> dict[str, float]:
    return trainer.train(spoil(batch, float("-inf")), step=step)


def train_with_bad_output(trainer: Trainer, batch: Batch, step: int) -> dict[str, float]:
    """Trains a step in which the model returns an infinite log-prob in the third micro-batch."""
    forward, calls = trainer.policy.forward, [0]

    def overflow(micro: Any) -> tuple[Tensor, Tensor]:
        logprobs, entropies = forward(micro)
        calls[0] += 1
        mask = torch.zeros_like(logprobs, dtype=torch.bool)
        mask[-1] = calls[0] == 3
        return logprobs.masked_fill(mask, -torch.inf), entropies

    trainer.policy.forward = overflow  # type: ignore[method-assign]
    try:
        return trainer.train(batch, step=step)
    finally:
        trainer.policy.forward = forward  # type: ignore[method-assign]


def train_with_bad_gradient(trainer: Trainer, batch: Batch, step: int) -> dict[str, float]:
    backward = trainer.policy.backward

    def overflow(logprobs: Tensor, gradient: Tensor, *, last: bool) -> None:
        backward(logprobs * 1e30, gradient * 1e30, last=last)

    trainer.policy.backward = overflow  # type: ignore[method-assign]
    try:
        return trainer.train(batch, step=step)
    finally:
        trainer.policy.backward = backward  # type: ignore[method-assign]


BAD = [train_with_bad_logprob, train_with_bad_output, train_with_bad_gradient]

BAD_AT_STAGE = [
    *(("float32", 0, "none", bad) for bad in BAD),
    ("float32", 1, "none", train_with_bad_gradient),
    ("float32", 2, "none", train_with_bad_output),
    ("float32", 3, "none", train_with_bad_logprob),
    ("bfloat16", 0, "none", train_with_bad_logprob),
    ("bfloat16", 2, "none", train_with_bad_gradient),
    ("bfloat16", 3, "none", train_with_bad_output),
    ("float32", 1, "optimizer", train_with_bad_output),
    ("float32", 2, "optimizer", train_with_bad_logprob),
    ("float32", 3, "all", train_with_bad_logprob),
    ("bfloat16", 2, "optimizer", train_with_bad_output),
    ("bfloat16", 3, "all", train_with_bad_gradient),
]


@pytest.mark.parametrize(("dtype", "stage", "offload", "bad"), BAD_AT_STAGE)
def test_training_continues_as_if_the_update_had_not_happened(
    dtype: str, stage: int, offload: str, bad: Callable[..., dict[str, float]], one_rank: Ranks, tiny_model: Path
) -> None:
    config = make_config(tiny_model, model={"dtype": dtype}, learner={"zero_stage": stage, "offload": offload})
    whole, without = (make_trainer(config, one_rank) for _ in range(2))
    for trainer in (whole, without):
        trainer.train(batch_of(trainer, 1), step=1)
    before = copy_weights(whole.policy)
    metrics = bad(whole, batch_of(whole, 2), 2)
    assert metrics["learner/skipped_updates"] == 1.0 and metrics["learner/tokens"] > 0
    assert "learner/loss" not in metrics and "learner/grad_norm" not in metrics
    assert all(torch.equal(weight, before[name]) for name, weight in copy_weights(whole.policy).items())
    rows = [trainer.train(batch_of(trainer, 3), step=3) for trainer in (whole, without)]
    assert rows[0] == rows[1] and rows[0]["learner/skipped_updates"] == 0.0
    states = [collect_state(trainer.policy) for trainer in (whole, without)]
    for key, tensor in states[0].items():
        assert torch.equal(tensor, states[1][key]), key


def reasons(train: Callable[[], object]) -> list[str]:
    with structlog.testing.capture_logs() as logs:
        train()
    return [entry["reason"] for entry in logs if entry["event"] == "update skipped"]


def test_the_trajectory_is_named(one_rank: Ranks, tiny_model: Path) -> None:
    trainer = make_trainer(make_config(tiny_model), one_rank)
    batch = batch_of(trainer, 1)
    micro = batch.micro_batches[2]
    ticket, number = micro.names[int(micro.seq[-1])]
    where = f"ticket {ticket}, trajectory {number}"
    for bad in BAD[:2]:
        assert reasons(lambda bad=bad: bad(trainer, batch_of(trainer, 1), 1)) == [f"the loss of {where} is not finite"]
    (reason,) = reasons(lambda: train_with_bad_gradient(trainer, batch, 1))
    assert reason.startswith("the gradient is not finite (norm ") and reason.endswith("; 12 more")
    named = [f"ticket {t}, trajectory {n}" for micro in batch.micro_batches for t, n in micro.names]
    assert reason.partition(", of one of ")[2].split("; ")[:-1] == named[:4]


def test_only_the_update_with_the_trajectory_is_skipped(one_rank: Ranks, tiny_model: Path) -> None:
    config = make_config(tiny_model, learner={"minibatches": 2}, algorithm={"max_divergence": 0.1})
    trainer = make_trainer(config, one_rank)
    batch = batch_of(trainer, 1)
    batch.minibatches[0][0].behavior_logprobs[0] = float("inf")
    metrics = trainer.train(batch, step=1)
    assert metrics["learner/skipped_updates"] == 1.0 and metrics["learner/grad_norm"] > 0
    assert metrics["learner/tokens"] == batch.num_tokens and 0 < metrics["learner/lr"] <= 1e-3
    assert trainer.policy.skipped == 0
    assert all(weight.isfinite().all() for weight in copy_weights(trainer.policy).values())


def test_a_non_finite_value_is_attributed_to_its_trajectory(one_rank: Ranks, tiny_model: Path) -> None:
    config = make_config(tiny_model, **CRITIC, learner={"minibatches": 2})
    trainer = make_trainer(config, one_rank)
    batch = batch_of(trainer, 1)
    ticket, number = batch.micro_batches[1].names[0]
    reference = trainer._join

    def spoil_scores(score: Any, micro_batches: Any) -> Tensor:
        scores = reference(score, micro_batches)
        scores[batch.micro_batches[1].start] = float("nan")
        return scores

    trainer._join = spoil_scores  # type: ignore[method-assign]
    found: dict[str, float] = {}
    told = reasons(lambda: found.update(trainer.train(batch, step=1)))
    assert found["critic/skipped_updates"] >= 1 and found["learner/skipped_updates"] == 2.0
    assert set(told[-2:]) == {f"the loss of ticket {ticket}, trajectory {number} is not finite"}
    assert "kl/reference" not in found


@pytest.mark.parametrize("limit", [0, 2])
def test_too_many_in_a_row_end_the_run(
    limit: int, one_rank: Ranks, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update, "MAX_SKIPPED_UPDATES", limit)
    trainer = make_trainer(make_config(tiny_model), one_rank)
    before = copy_weights(trainer.policy)
    for step in range(1, limit + 1):
        trainer.train(spoil(batch_of(trainer, step)), step=step)
    advice = (
        rf"step {limit + 1}: {limit + 1} updates in a row are not finite, more than {limit}; "
        rf"the last one: the loss of ticket \d+, trajectory \d is not finite. .* Lower learner.lr or "
        r"learner.max_grad_norm, and continue with `asyncrl launch --resume`"
    )
    with pytest.raises(RunError, match=advice):
        trainer.train(spoil(batch_of(trainer, limit + 1)), step=limit + 1)
    assert all(torch.equal(weight, before[name]) for name, weight in copy_weights(trainer.policy).items())
