"""The schedule, and the bound that keeps the divergence of trained tokens within `algorithm.max_divergence`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from worlds import copy_weights, make_config, make_groups, make_trainer, pack_groups

from asyncrl.algorithms.corrections import mismatch_kl
from asyncrl.algorithms.losses import reinforce_is
from asyncrl.config.training import LearnerConfig
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.learning_rate import FIRST, DivergenceBound, learning_rate
from asyncrl.learner.step import Trainer

STATES, TOKENS, SAMPLES = 16, 12, 1024

LIMIT = 0.02


def make_bound(ranks: Ranks, *, limit: float | None, max_staleness: int, updates: int = 1) -> DivergenceBound:
    sections = {"algorithm": {"max_divergence": limit}, "replay": {"max_staleness": max_staleness}}
    return DivergenceBound(make_config(Path(), **sections, learner={"epochs": updates}), ranks)


def train_bandits(
    *, rate: float, lag: int, limit: float | None, ranks: Ranks, seed: int, updates: int = 1
) -> list[float]:
    """Trains a table of logits by AdamW on tokens that are `lag` versions old, with separate noisy rewards for each
    token. Returns the divergence of the tokens of each step."""
    torch.manual_seed(seed)
    logits = torch.randn(STATES, TOKENS).requires_grad_()
    worth = torch.randn(STATES, TOKENS)
    optimizer = torch.optim.AdamW([logits], lr=rate, weight_decay=0.0)
    bound = make_bound(ranks, limit=limit, max_staleness=lag, updates=updates)
    waiting: list[Any] = []

    def sample(version: int) -> None:
        states = torch.randint(STATES, (SAMPLES,))
        logprobs = logits.detach().log_softmax(1)[states]
        tokens = torch.distributions.Categorical(logits=logprobs).sample()
        advantages = worth[states, tokens] + torch.randn(SAMPLES)
        own = logprobs.gather(1, tokens[:, None])[:, 0]
        waiting.append((states, tokens, advantages - advantages.mean(), own, torch.full((SAMPLES,), version)))

    for _ in range(lag + 1):
        sample(0)
    divergences: list[float] = []
    for step in range(1, 41):
        states, tokens, advantages, behavior, versions = waiting.pop(0)
        for number in range(updates):
            logprobs = logits.log_softmax(1)[states].gather(1, tokens[:, None])[:, 0]
            loss = reinforce_is(logprobs, behavior, advantages).mean()
            optimizer.zero_grad()
            loss.backward()
            if number == 0:
                divergences.append(float(mismatch_kl(logprobs.detach() - behavior).mean()))
            micro = cast(Any, SimpleNamespace(versions=versions, behavior_logprobs=behavior))
            if number == 0:
                bound.add(micro, logprobs.detach(), version=step - 1)
            optimizer.param_groups[0]["lr"] = bound.rate(rate)
            optimizer.step()
        bound.end_step([float(optimizer.param_groups[0]["lr"])] * updates, rate)
        sample(step)
    return divergences


@pytest.mark.parametrize("seed", range(12))
def test_the_divergence_stays_within_the_bound_at_any_learning_rate(one_rank: Ranks, seed: int) -> None:
    random = np.random.default_rng(seed)
    rate, lag = 10 ** random.uniform(-3, 0.5), int(random.integers(1, 9))
    updates = int(random.choice([1, 1, 4]))
    bounded = train_bandits(rate=rate, lag=lag, limit=LIMIT, ranks=one_rank, seed=seed, updates=updates)
    free = train_bandits(rate=rate, lag=lag, limit=None, ranks=one_rank, seed=seed, updates=updates)
    assert max(bounded) <= 2.5 * LIMIT and np.mean(bounded) <= LIMIT
    if rate > 0.1:
        assert max(free) > 4 * max(bounded), "the bound is not what keeps it"
    if max(free) < LIMIT / 4:  # within the bound by itself: only the first update is smaller
        assert bounded[5:] == pytest.approx(free[5:], rel=1.0, abs=1e-4)


def test_a_step_after_a_checkpoint_has_the_same_rate_and_weights(
    one_rank: Ranks, tiny_model: Path, tmp_path: Path
) -> None:
    config = make_config(tiny_model, algorithm={"max_divergence": 0.5}, replay={"max_staleness": 3})
    whole, resumed = make_trainer(config, one_rank), make_trainer(config, one_rank)

    def train(trainer: Trainer, step: int) -> float:
        return trainer.train(pack_groups(config, make_groups(6, seed=step)), step=step)["learner/lr"]

    rates = [train(whole, step) for step in (1, 2)]
    assert rates[0] == pytest.approx(FIRST * config.learner.lr) and 0.0 < rates[1] != rates[0]
    for name, content in whole.snapshot(tmp_path).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        content(tmp_path / name)
    resumed.restore(tmp_path)
    assert train(whole, 3) == train(resumed, 3)
    for name, weight in copy_weights(whole.policy).items():
        assert torch.equal(weight, copy_weights(resumed.policy)[name]), name


def test_a_synchronous_run_has_the_scheduled_rates(one_rank: Ranks) -> None:
    bound = make_bound(one_rank, limit=LIMIT, max_staleness=0)
    assert bound.rate(1.0) == 1.0 and bound.end_step([1.0], 1.0) == {}


def test_the_rate_rises_to_the_scheduled_one_while_all_tokens_are_fresh(one_rank: Ranks) -> None:
    bound = make_bound(one_rank, limit=LIMIT, max_staleness=1, updates=2)
    fractions: list[float] = []
    for _ in range(6):
        fractions.append(bound.end_step([bound.rate(2.0)] * 2, 2.0)["learner/lr_fraction"])
    assert fractions == [FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST, 1.0, 1.0]


def rates(steps: int = 10, **settings: Any) -> list[float]:
    config = LearnerConfig(lr=2.0, **settings)
    return [learning_rate(step, config, steps=steps) for step in range(1, steps + 1)]


def test_constant_rate_with_and_without_warmup() -> None:
    assert rates() == [2.0] * 10
    assert rates(warmup_steps=4) == [0.5, 1.0, 1.5] + [2.0] * 7


def test_linear_and_cosine_fall_to_zero_after_the_last_step() -> None:
    assert rates(lr_schedule="linear") == pytest.approx([2.0 - 0.2 * i for i in range(10)])
    falling = rates(lr_schedule="cosine", warmup_steps=2)
    assert falling[:3] == [1.0, 2.0, 2.0]
    assert falling[6] == pytest.approx(1.0) and 0 < falling[-1] < 0.1
    assert rates(lr_schedule="linear", warmup_steps=20)[-1] == 1.0
