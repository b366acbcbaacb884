"""The seconds of the phases of a step, and what a batch's metrics say."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from worlds import make_config, make_groups, make_trainer, pack_groups

from asyncrl.learner.batch import Batch
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.metrics import PhaseTimer, batch_metrics


def test_a_phase_is_the_sum_of_its_blocks_and_starts_again_with_the_next_step(one_rank: Ranks) -> None:
    timer = PhaseTimer(one_rank)
    for name in ("forward", "backward", "forward"):
        with timer.phase(name):
            time.sleep(0.02)
    metrics = timer.metrics()
    assert list(metrics) == ["learner/forward_s", "learner/backward_s", "learner/peak_memory_bytes"]
    assert 0.02 <= metrics["learner/backward_s"] < metrics["learner/forward_s"] < 1.0
    assert metrics["learner/peak_memory_bytes"] > 10e6
    assert list(timer.metrics()) == ["learner/peak_memory_bytes"]


class TwoRanks:
    """A fake of `Ranks` whose other rank has the table given."""

    def __init__(self, other: Tensor | None) -> None:
        self._other = other

    def gather(self, values: Tensor) -> Tensor:
        return torch.stack([values, values if self._other is None else self._other])


def batch_of(rewards: list[float], prompt_tokens: list[int], lengths: list[int]) -> Batch:
    columns = SimpleNamespace(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        prompt_tokens=torch.tensor(prompt_tokens),
        lengths=torch.tensor(lengths),
    )
    return cast(Batch, columns)


def test_the_metrics_of_a_batch_are_over_all_ranks() -> None:
    others = torch.tensor(
        [[1.0, 4.0, 16.0, 4.0, 4.0], [1.0, 9.0, 81.0, 9.0, 9.0], [1.0, 2.0, 4.0, 2.0, 2.0],
         [0.0, 0.0, 0.0, torch.inf, -torch.inf]], dtype=torch.float64,
    )  # fmt: skip
    ranks: Any = TwoRanks(others)
    metrics = batch_metrics(batch_of([0.0, 2.0], [3, 3], [5, 7]), torch.tensor([-1.0, 1.0]), cast(Ranks, ranks))
    assert metrics["batch/reward_mean"] == 2.0 and metrics["batch/reward_std"] == pytest.approx((8 / 3) ** 0.5)
    assert (metrics["batch/reward_min"], metrics["batch/reward_max"]) == (0.0, 4.0)
    assert (metrics["batch/prompt_tokens_mean"], metrics["batch/prompt_tokens_max"]) == (5.0, 9.0)
    assert (metrics["batch/completion_tokens_min"], metrics["batch/completion_tokens_max"]) == (2.0, 7.0)
    assert (metrics["batch/advantage_mean"], metrics["batch/advantage_std"]) == (0.0, 1.0)


@pytest.mark.parametrize("coef", [0.0, 0.25])
def test_the_loss_is_the_policy_s_and_the_divergence_times_its_coefficient(
    coef: float, one_rank: Ranks, tiny_model: Path
) -> None:
    config = make_config(tiny_model, algorithm={"kl_loss_coef": coef})
    trainer = make_trainer(config, one_rank)
    for step in (1, 2):
        metrics = trainer.train(pack_groups(config, make_groups(3, seed=step)), step=step)
    if not coef:
        assert "learner/kl_loss" not in metrics and metrics["learner/policy_loss"] == metrics["learner/loss"]
        return
    assert metrics["learner/kl_loss"] > 0.0
    parts = metrics["learner/policy_loss"] + coef * metrics["learner/kl_loss"]
    assert metrics["learner/loss"] == pytest.approx(parts, rel=1e-5, abs=1e-7)
