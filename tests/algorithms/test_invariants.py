"""Invariants of all losses and advantages: order, gaps, parts, on-policy gradients, empty input, precision."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from algorithm_batches import CLOSE, Batch, batches, call, double, episodes, gradient, reordered, terms, tokens
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algorithms import advantages as adv
from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.corrections import (
    effective_sample_size,
    importance_weights,
    loglinear_proximal,
    opsm_mask,
)
from asyncrl.algorithms.kl import kl_estimate
from asyncrl.algorithms.losses import LOSSES, PolicyTerms, aggregate, m2po_bound, value_loss

TERMS = ["logprobs", "proximal_logprobs", "behavior_logprobs", "old_logprobs", "advantages", "seq"]
INPUTS = ["rewards", "values", "seq", "group", "lengths", "log_ratios", "greedy_rewards", "turn", "turn_rewards"]


def positional(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters
    return [name for name, parameter in parameters.items() if parameter.kind is not parameter.KEYWORD_ONLY]


# --- losses ---


def test_parameters_are_of_the_known_terms() -> None:
    for function in LOSSES.values():
        assert set(positional(function)) <= set(TERMS)
    for function in ADVANTAGES.values():
        assert set(positional(function)) <= set(INPUTS)


@pytest.mark.parametrize("name", LOSSES)
@given(tokens)
def test_on_policy_gradient_is_that_of_reinforce(name: str, batch: Batch) -> None:
    logprobs = double(batch["logprobs"]).requires_grad_()
    same = logprobs.detach()
    given_terms = PolicyTerms(logprobs, same, same, double(batch["advantages"]), torch.tensor(batch["seq"]))
    torch.testing.assert_close(gradient(call(name, given_terms), logprobs), -given_terms.advantages, **CLOSE)


@pytest.mark.parametrize("name", LOSSES)
@given(tokens, st.randoms(use_true_random=False))
def test_order_of_sequences_and_gaps_in_their_numbers_do_not_matter(name: str, batch: Batch, random: Any) -> None:
    order = sorted(set(batch["seq"]))
    random.shuffle(order)
    index = reordered(batch["seq"], order)
    plain = terms(batch)
    rank = torch.tensor([order.index(number) for number in batch["seq"]])
    moved = PolicyTerms(
        plain.logprobs[index], plain.proximal_logprobs[index], plain.behavior_logprobs[index],
        plain.advantages[index], 3 * rank[index] + 1,
    )  # fmt: skip
    torch.testing.assert_close(call(name, moved), call(name, plain)[index], **CLOSE)


@pytest.mark.parametrize("name", LOSSES)
@given(tokens)
def test_only_the_current_policy_gets_a_gradient(name: str, batch: Batch) -> None:
    given_terms = terms(batch)
    result = call(name, given_terms)
    assert result.requires_grad
    zero = PolicyTerms(
        given_terms.logprobs,
        given_terms.proximal_logprobs,
        given_terms.behavior_logprobs,
        torch.zeros_like(given_terms.advantages),
        given_terms.seq,
    )
    assert (gradient(call(name, zero), given_terms.logprobs) == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_log_ratios_stay_finite(name: str) -> None:
    logprobs = torch.tensor([0.0, -400.0, -1.0, -3.0], requires_grad=True)
    behavior, advantages = torch.tensor([-400.0, 0.0, -1.0, -700.0]), torch.tensor([-1.0, 1.0, 1.0, 1.0])
    for seq in (torch.tensor([0, 0, 0, 0]), torch.tensor([0, 1, 2, 3])):
        loss = call(name, PolicyTerms(logprobs, logprobs.detach(), behavior, advantages, seq))
        assert loss.isfinite().all() and gradient(loss, logprobs).isfinite().all()


# --- advantages ---


def estimate(name: str, columns: dict[str, Tensor]) -> Tensor:
    """Returns advantages [N] of the tokens by the function `name`, with the inputs that it takes."""
    function = ADVANTAGES[name]
    names = positional(function)
    rewards = columns["sequence_rewards" if {"group", "greedy_rewards"} & set(names) else "rewards"]
    result = function(*((columns | {"rewards": rewards})[key] for key in names))
    result = result[0] if isinstance(result, tuple) else result
    return result if len(result) == len(columns["seq"]) else result[columns["seq"]]


def columns_of(batch: Batch, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    result = {name: torch.tensor(batch[name], dtype=dtype) for name in ("rewards", "values", "log_ratios")}
    seq = torch.tensor(batch["seq"])
    sums = torch.zeros(int(seq.max()) + 1, dtype=dtype).index_add(0, seq, result["rewards"])
    numbers = torch.arange(len(sums))
    of_sequences = {"sequence_rewards": sums, "greedy_rewards": sums / 2 + 1, "group": numbers // 2}
    return result | of_sequences | {"seq": seq, "lengths": torch.bincount(seq)} | turns_of(seq, result["rewards"])


def turns_of(seq: Tensor, rewards: Tensor) -> dict[str, Tensor]:
    """Every token is a separate turn, with a reward that is a multiple of 1/8."""
    lengths = torch.bincount(seq)
    turn = torch.arange(len(seq)) - (lengths.cumsum(0) - lengths)[seq]
    table = torch.full((len(lengths), int(lengths.max())), torch.nan, dtype=rewards.dtype)
    table[seq, turn] = (8 * rewards).round() / 8
    return {"turn": turn, "turn_rewards": table}


@pytest.mark.parametrize("name", ADVANTAGES)
@given(episodes, st.randoms(use_true_random=False))
def test_advantages_do_not_depend_on_the_order_of_sequences(name: str, batch: Batch, random: Any) -> None:
    plain = columns_of(batch)
    order = list(range(len(plain["group"])))
    random.shuffle(order)
    index = reordered(batch["seq"], order)
    moved = {key: plain[key][index] for key in ("rewards", "values", "log_ratios")}
    moved |= {key: plain[key][order] for key in ("sequence_rewards", "greedy_rewards", "group", "lengths")}
    moved["seq"] = torch.arange(len(order)).repeat_interleave(moved["lengths"])
    moved |= {"turn": plain["turn"][index], "turn_rewards": plain["turn_rewards"][order]}
    torch.testing.assert_close(estimate(name, moved), estimate(name, plain)[index], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(episodes)
def test_float32_agrees_with_float64(name: str, batch: Batch) -> None:
    columns = columns_of(batch)
    columns["sequence_rewards"] = columns["sequence_rewards"].round(decimals=1).abs()
    columns["rewards"] = columns["rewards"].round(decimals=1)
    narrow = {key: x.float() if x.is_floating_point() else x for key, x in columns.items()}
    result = estimate(name, narrow)
    assert result.dtype is torch.float32 and not result.requires_grad
    spread = float(columns["sequence_rewards"].std()) if len(columns["group"]) > 1 else 0.0
    if spread > 0.1 or name in ("gae", "vtrace"):
        expected = estimate(name, columns)
        torch.testing.assert_close(result.double(), expected, atol=2e-2, rtol=1e-3)


@given(batches({"rewards": (-3, 3), "values": (-3, 3)}), st.integers(0, 4))
def test_a_reward_affects_no_other_sequence(batch: Batch, number: int) -> None:
    rewards, values, seq = double(batch["rewards"]), double(batch["values"]), torch.tensor(batch["seq"])
    changed = torch.where(seq == number, rewards + 1, rewards)
    before, after = (adv.gae(r, values, seq, gamma=0.9, lam=0.8)[0] for r in (rewards, changed))
    assert torch.equal(before[seq != number], after[seq != number])
    assert (after[seq == number] > before[seq == number]).all()


# --- empty input ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_empty_micro_batch_works_everywhere(dtype: torch.dtype) -> None:
    none, index = torch.zeros(0, dtype=dtype), torch.zeros(0, dtype=torch.int64)
    columns = dict.fromkeys(["rewards", "values", "log_ratios", "sequence_rewards", "greedy_rewards"], none)
    columns |= dict.fromkeys(["seq", "group", "lengths", "turn"], index) | {"turn_rewards": none.reshape(0, 0)}
    for name in ADVANTAGES:
        assert estimate(name, columns).shape == (0,) and estimate(name, columns).dtype is dtype
    for name in LOSSES:
        logprobs = none.clone().requires_grad_()
        loss = call(name, PolicyTerms(logprobs, none, none, none, index))
        modes: list[Any] = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
        for mode in modes:
            total = aggregate(loss, index, mode=mode, max_length=4)
            assert total.item() == 0.0 and total.requires_grad
        assert gradient(loss, logprobs).shape == (0,)
    levels: list[Any] = ["token", "sequence", "geometric"]
    for level in levels:
        assert importance_weights(none, index, level=level).shape == (0,)
        assert effective_sample_size(none, index, level=level).isnan()
    assert opsm_mask(none, none, none, index, delta=0.1).shape == (0,)
    assert loglinear_proximal(none, none, index, version=3).shape == (0,)
    assert value_loss(none, none, none).shape == kl_estimate(none, none).shape == (0,)
    assert m2po_bound(none, none).isinf() and adv.whiten(none).shape == adv.remax(none, none).shape == (0,)
