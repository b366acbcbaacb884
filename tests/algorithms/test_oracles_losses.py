"""Losses and their aggregation against plain loops over the formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import mean
from typing import Any

import pytest
import torch
from algorithm_batches import CLOSE, Batch, batches, call, double, gradient, on_ranks, reordered, terms, tokens
from hypothesis import given
from hypothesis import strategies as st
from test_oracles_corrections import loop_weights
from torch import Tensor

from asyncrl.algorithms.losses import (
    LOSSES,
    aggregate,
    decoupled_ppo,
    m2po,
    m2po_bound,
    ppo_clip,
    reinforce_is,
    value_loss,
)


def loop_ppo(batch: dict[str, Any], old: str, low: float, high: float, dual: float | None) -> list[float]:
    result: list[float] = []
    for logprob, reference, advantage in zip(batch["logprobs"], batch[old], batch["advantages"], strict=True):
        ratio = math.exp(logprob - reference)
        loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
        result.append(min(loss, -dual * advantage) if dual is not None and advantage < 0 else loss)
    return result


@given(tokens)
def test_decoupled_ppo(batch: dict[str, Any]) -> None:
    seq = torch.tensor(batch["seq"])
    logprobs, proximal, behavior, advantages = (
        double(batch[name]) for name in ("logprobs", "proximal", "behavior", "advantages")
    )
    options: dict[str, Any] = {"level": "sequence", "mode": "mask", "low": 0.1, "high": 4.0}
    result = decoupled_ppo(logprobs, proximal, behavior, advantages, seq, correction=options)
    weights = loop_weights((proximal - behavior).tolist(), batch["seq"], *options.values())
    loop = loop_ppo(batch, "proximal", 0.2, 0.28, 3.0)
    expected = double([weight * loss for weight, loss in zip(weights, loop, strict=True)])
    torch.testing.assert_close(result, expected, **CLOSE)


@given(tokens)
def test_decoupled_ppo_is_ppo_when_the_proximal_policy_sampled(batch: dict[str, Any]) -> None:
    seq = torch.tensor(batch["seq"])
    logprobs, proximal, advantages = (double(batch[n]) for n in ("logprobs", "proximal", "advantages"))
    result = decoupled_ppo(logprobs, proximal, proximal, advantages, seq)
    torch.testing.assert_close(result, ppo_clip(logprobs, proximal, advantages), **CLOSE)


@given(tokens)
def test_one_update_per_batch_makes_decoupled_ppo_weighted_reinforce(batch: dict[str, Any]) -> None:
    seq = torch.tensor(batch["seq"])
    logprobs = double(batch["logprobs"]).requires_grad_()
    behavior, advantages = double(batch["behavior"]), double(batch["advantages"])
    decoupled = decoupled_ppo(logprobs, logprobs.detach(), behavior, advantages, seq)
    reinforce = reinforce_is(logprobs, behavior, advantages, cap=2.0)
    torch.testing.assert_close(gradient(decoupled, logprobs), gradient(reinforce, logprobs), **CLOSE)


Pair = tuple[float, float]


def clipped(ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> Pair:
    plain, bounded = -advantage * ratio, -advantage * min(max(ratio, low), high)
    value, slope = (plain, plain) if plain >= bounded else (bounded, 0.0)
    if dual is not None and advantage < 0 and value > -dual * advantage:
        return -dual * advantage, 0.0
    return value, slope


def weighted(weight: float, advantage: float, logprob: float) -> Pair:
    return -weight * advantage * logprob, -weight * advantage


def ratios_of(batch: Batch, i: int) -> list[float]:
    """Returns the log ratios of all tokens in the sequence of token i."""
    own = [j for j, number in enumerate(batch["seq"]) if number == batch["seq"][i]]
    return [batch["logprobs"][j] - batch["behavior"][j] for j in own]


def loop_ppo_clip(batch: Batch, i: int, p: float, q: float, a: float) -> Pair:
    return clipped(math.exp(p - q), a, 0.8, 1.28, 3.0)


def loop_decoupled_ppo(batch: Batch, i: int, p: float, q: float, a: float) -> Pair:
    proximal = batch["proximal"][i]
    weight = min(math.exp(proximal - q), 2.0)
    value, slope = clipped(math.exp(p - proximal), a, 0.8, 1.28, 3.0)
    return weight * value, weight * slope


def loop_reinforce_is(batch: Batch, i: int, p: float, q: float, a: float) -> Pair:
    return weighted(min(math.exp(p - q), 5.0), a, p)


def loop_gspo(batch: Batch, i: int, p: float, q: float, a: float) -> Pair:
    return clipped(math.exp(min(mean(ratios_of(batch, i)), 10.0)), a, 1 - 3e-4, 1 + 4e-4)


def loop_cispo(batch: Batch, i: int, p: float, q: float, a: float) -> Pair:
    return weighted(min(max(math.exp(p - q), 0.0), 1.28), a, p)


def loop_sapo(batch: Batch, i: int, p: float, q: float, a: float) -> Pair:
    ratio, tau = math.exp(p - q), 1.0 if a > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -a * 4 / tau * gate, -a * 4 * gate * (1 - gate) * ratio


def loop_dppo(batch: Batch, i: int, p: float, q: float, a: float) -> Pair:
    moved = math.exp(p) - math.exp(q)
    keep = not ((a > 0 and moved > 0.2) or (a <= 0 and moved < -0.2))
    return weighted(keep * min(math.exp(p - q), 20.0), a, p)


def loop_topr(batch: Batch, i: int, p: float, q: float, a: float) -> Pair:
    return weighted(1.0 if a >= 0 else min(math.exp(max(sum(ratios_of(batch, i)), -20.0)), 1.0), a, p)


def loop_vespo(batch: Batch, i: int, p: float, q: float, a: float) -> Pair:
    product = math.exp(max(-20.0, min(20.0, sum(ratios_of(batch, i)))))
    k, lam = (2, 3) if a >= 0 else (3, 2)
    return weighted(product**k * math.exp(lam * (1 - product)), a, p)


def loop_vtrace(batch: Batch, i: int, p: float, q: float, a: float) -> Pair:
    return weighted(1.0, a, p)


def loop_bound(log_ratios: list[float], advantages: list[float], budget: float) -> float:
    """Returns tau by sorting the squares and trying every interval between two of them."""
    squares = sorted(d * d for d, a in zip(log_ratios, advantages, strict=True) if a * d > 0)
    if sum(squares) <= budget * len(squares):
        return math.inf
    for i, square in enumerate(squares):
        tau_square = (budget * len(squares) - sum(squares[:i])) / (len(squares) - i)
        if tau_square <= square:
            return math.sqrt(tau_square)
    raise AssertionError("no piece holds the root")


def loop_m2po(batch: Batch, i: int, p: float, q: float, a: float) -> Pair:
    log_ratios = [x - y for x, y in zip(batch["logprobs"], batch["behavior"], strict=True)]
    tau = loop_bound(log_ratios, batch["advantages"], 0.04)
    return clipped(math.exp(p - q), a, min(math.exp(-tau), 0.7), max(math.exp(tau), 1.5))


LOOPS: dict[str, Callable[[Batch, int, float, float, float], Pair]] = {
    "ppo_clip": loop_ppo_clip,
    "decoupled_ppo": loop_decoupled_ppo,
    "reinforce_is": loop_reinforce_is,
    "gspo": loop_gspo,
    "cispo": loop_cispo,
    "sapo": loop_sapo,
    "dppo": loop_dppo,
    "topr": loop_topr,
    "m2po": loop_m2po,
    "vespo": loop_vespo,
    "vtrace": loop_vtrace,
}


def test_every_loss_has_a_loop() -> None:
    assert set(LOOPS) == set(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(tokens)
def test_loss_and_gradient(name: str, dtype: torch.dtype, batch: Batch) -> None:
    given_terms = terms(batch, dtype)
    result = call(name, given_terms)
    assert result.dtype is dtype and result.shape == given_terms.logprobs.shape
    rows = zip(batch["logprobs"], batch["behavior"], batch["advantages"], strict=True)
    pairs = [LOOPS[name](batch, i, p, q, a) for i, (p, q, a) in enumerate(rows)]
    close: dict[str, Any] = CLOSE if dtype is torch.float64 else {"atol": 1e-3, "rtol": 1e-3}
    torch.testing.assert_close(result.double(), double([value for value, _ in pairs]), **close)
    if dtype is torch.float64:
        slopes = gradient(result, given_terms.logprobs)
        torch.testing.assert_close(slopes, double([slope for _, slope in pairs]), **CLOSE)


@given(tokens, st.sampled_from([0.01, 0.04, 1.0]), st.integers(0, 5))
def test_m2po_bound_and_its_parts(batch: Batch, budget: float, cut: int) -> None:
    log_ratios, advantages = double(batch["logprobs"]) - double(batch["behavior"]), double(batch["advantages"])
    result = m2po_bound(log_ratios, advantages, budget=budget)
    expected = loop_bound(log_ratios.tolist(), batch["advantages"], budget)
    assert float(result) == pytest.approx(expected, rel=1e-9)
    harmful = (log_ratios[advantages * log_ratios > 0]).square()
    if result.isfinite():
        assert float(harmful.clamp(max=float(result) ** 2).mean()) == pytest.approx(budget, rel=1e-9)
    first = torch.tensor(batch["seq"]) < cut
    parts = on_ranks(
        [first, ~first],
        lambda part, reduce: m2po_bound(log_ratios[part], advantages[part], budget=budget, reduce=reduce),
    )
    for part in parts:
        torch.testing.assert_close(part, result, **CLOSE)


@pytest.mark.parametrize("spread", [0.3, 3.0, 30.0])
def test_m2po_bound_of_many_tokens_takes_few_sums(spread: float) -> None:
    generator = torch.Generator().manual_seed(0)
    log_ratios = torch.randn(100_000, generator=generator) * spread * torch.rand(100_000, generator=generator).pow(8)
    advantages = torch.randn(100_000, generator=generator)
    sums = 0

    def counted(x: Tensor) -> Tensor:
        nonlocal sums
        sums += 1
        return x

    tau = m2po_bound(log_ratios, advantages, budget=0.004, reduce=counted).double()
    harmful = log_ratios[advantages * log_ratios > 0].double().clamp(-20, 20).square()
    assert sums < 20
    assert float(harmful.clamp(max=tau.square()).mean()) == pytest.approx(0.004, rel=1e-5)


@given(tokens)
def test_m2po_with_the_bound_of_the_batch_does_not_depend_on_microbatches(batch: Batch) -> None:
    logprobs, behavior, advantages = (double(batch[name]) for name in ("logprobs", "behavior", "advantages"))
    bound = m2po_bound(logprobs - behavior, advantages)
    whole = m2po(logprobs, behavior, advantages, clip_low=0.0, clip_high=0.0)
    half = len(logprobs) // 2
    parts = [
        m2po(logprobs[s], behavior[s], advantages[s], clip_low=0.0, clip_high=0.0, bound=bound)
        for s in (slice(0, half), slice(half, None))
    ]
    torch.testing.assert_close(torch.cat(parts), whole, **CLOSE)
    rows = zip((logprobs - behavior).tolist(), batch["advantages"], strict=True)
    tau = float(bound)
    expected = [clipped(math.exp(d), a, math.exp(-tau), math.exp(tau))[0] for d, a in rows]
    torch.testing.assert_close(whole, double(expected), **CLOSE)


@given(batches({"values": (-2, 2), "old": (-2, 2), "returns": (-3, 3)}), st.none() | st.just(0.2))
def test_value_loss(batch: Batch, clip: float | None) -> None:
    values = double(batch["values"]).requires_grad_()
    result = value_loss(values, double(batch["old"]), double(batch["returns"]), clip=clip)
    expected: list[Pair] = []
    for value, old, target in zip(batch["values"], batch["old"], batch["returns"], strict=True):
        plain = ((value - target) ** 2 / 2, value - target)
        if clip is None:
            expected.append(plain)
            continue
        bounded = min(max(value, old - clip), old + clip)
        slope = bounded - target if bounded == value else 0.0
        expected.append(max(plain, ((bounded - target) ** 2 / 2, slope), key=lambda pair: pair[0]))
    torch.testing.assert_close(result, double([value for value, _ in expected]), **CLOSE)
    torch.testing.assert_close(gradient(result, values), double([slope for _, slope in expected]), **CLOSE)
    still = value_loss(values, values.detach(), double(batch["returns"]), clip=clip)
    torch.testing.assert_close(gradient(still, values), values.detach() - double(batch["returns"]), **CLOSE)


def loop_aggregate(values: list[float], seq: list[int], mode: str, max_length: int) -> float:
    rows = [[v for v, s in zip(values, seq, strict=True) if s == number] for number in sorted(set(seq))]
    match mode:
        case "token-mean":
            return sum(values) / len(values)
        case "token-sum":
            return sum(values)
        case "seq-mean-token-sum":
            return mean(sum(row) for row in rows)
        case "seq-mean-token-mean":
            return mean(mean(row) for row in rows)
        case _:
            return mean(sum(row) / max_length for row in rows)


@pytest.mark.parametrize(
    "mode",
    ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"],
)
@given(batches({"loss": (-3, 3)}), st.integers(0, 5))
def test_aggregate_and_its_parts(mode: Any, batch: dict[str, Any], cut: int) -> None:
    loss, seq = double(batch["loss"]), torch.tensor(batch["seq"])
    whole = aggregate(loss, seq, mode=mode, max_length=7)
    expected = loop_aggregate(batch["loss"], batch["seq"], mode, 7)
    assert float(whole) == pytest.approx(expected, abs=1e-9)
    first = seq < cut
    counts = {"num_tokens": len(seq), "num_sequences": len(set(batch["seq"]))}
    parts = [aggregate(loss[part], seq[part], mode=mode, max_length=7, **counts) for part in (first, ~first)]
    torch.testing.assert_close(parts[0] + parts[1], whole, **CLOSE)


@given(batches({"loss": (-3, 3)}), st.randoms(use_true_random=False))
def test_aggregation_does_not_depend_on_order(batch: Batch, random: Any) -> None:
    order = sorted(set(batch["seq"]))
    random.shuffle(order)
    index = reordered(batch["seq"], order)
    loss, seq = double(batch["loss"]), torch.tensor(batch["seq"])
    rank = torch.tensor([order.index(number) for number in batch["seq"]])
    modes: list[Any] = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
    for mode in modes:
        moved = aggregate(loss[index], 2 * rank[index], mode=mode)
        torch.testing.assert_close(moved, aggregate(loss, seq, mode=mode), **CLOSE)
