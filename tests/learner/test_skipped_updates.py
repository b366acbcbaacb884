"""A non-finite update is skipped without any effect of its batch; too many in a row end the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from safetensors.torch import save_file
from torch import Tensor
from worlds import CRITIC, copy_weights, make_config, make_groups, make_trainer, pack_groups

from asyncrl.errors import RunError
from asyncrl.learner import step as update
from asyncrl.learner.batch import Batch
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model.saving import collect_state, restore_state
from asyncrl.learner.step import Trainer


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


def test_the_row_is_part_of_the_state(
    one_rank: Ranks, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update, "MAX_SKIPPED_UPDATES", 2)
    config = make_config(tiny_model)
    first, second = (make_trainer(config, one_rank) for _ in range(2))
    for step in (1, 2):
        first.train(spoil(batch_of(first, step)), step=step)
    state = collect_state(first.policy)
    save_file(state, tmp_path / "rank-0.safetensors")
    restore_state(second.policy, tmp_path)
    with pytest.raises(RunError, match="step 3: 3 updates in a row"):
        second.train(spoil(batch_of(second, 3)), step=3)
