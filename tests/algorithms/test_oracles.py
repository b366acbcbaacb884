"""Each function against a plain loop written from its formula, and against an invariant on random input."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algorithms.advantages import ADVANTAGES, dr_grpo, grpo, rloo, whiten
from asyncrl.algorithms.corrections import effective_sample_size, importance_weights, weight_moments
from asyncrl.algorithms.losses import aggregate, decoupled_ppo, ppo_clip, reinforce_is

CLOSE: dict[str, Any] = {"atol": 1e-9, "rtol": 1e-9}


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32, allow_subnormal=False)


@st.composite
def batches(draw: st.DrawFn, columns: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """`seq` as a list of sequence numbers in order, and columns of as many numbers."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    seq = [i for i, length in enumerate(lengths) for _ in range(length)]
    return {"seq": seq} | {
        name: draw(st.lists(numbers(*bounds), min_size=len(seq), max_size=len(seq))) for name, bounds in columns.items()
    }


rewards = batches({"rewards": (-3, 3)}).flatmap(
    lambda batch: st.permutations(range(len(batch["seq"]))).map(
        lambda order: ([batch["rewards"][i] for i in order], [7 * batch["seq"][i] for i in order])
    )
)
tokens = batches({"logprobs": (-4, 0), "proximal": (-4, 0), "behavior": (-4, 0), "advantages": (-2, 2)})


def double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- advantages ---


def loop_advantage(name: str, values: list[float], group: list[int]) -> list[float]:
    result: list[float] = []
    for i, reward in enumerate(values):
        members = [values[j] for j in range(len(values)) if group[j] == group[i]]
        others = [values[j] for j in range(len(values)) if group[j] == group[i] and j != i]
        if not others:
            result.append(0.0)
        elif name == "grpo":
            result.append((reward - mean(members)) / (stdev(members) + 1e-6))
        else:
            result.append(reward - mean(members if name == "dr_grpo" else others))
    return result


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@given(rewards)
def test_group_advantages(name: str, batch: tuple[list[float], list[int]]) -> None:
    values, group = batch
    result = ADVANTAGES[name](double(values), torch.tensor(group))
    torch.testing.assert_close(result, double(loop_advantage(name, values, group)), atol=1e-6, rtol=1e-6)
    shifted = ADVANTAGES[name](double(values) + 5, torch.tensor(group))
    torch.testing.assert_close(shifted, result, atol=1e-6, rtol=1e-6)
    for number in set(group):
        assert result[torch.tensor(group) == number].sum().abs() < 1e-6


@pytest.mark.parametrize("function", [grpo, dr_grpo, rloo])
def test_group_of_one_and_equal_rewards_give_zero(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    result = function(double([0.3, 1.0, 1.0, 1.0]), torch.tensor([4, 2, 2, 2]))
    assert result.tolist() == [0.0] * 4


@given(st.lists(numbers(-3, 3), min_size=1, max_size=9), st.booleans())
def test_whiten(values: list[float], shift_mean: bool) -> None:
    center = mean(values)
    spread = math.sqrt((stdev(values) ** 2 if len(values) > 1 else 0.0) + 1e-8)
    expected = [(value - center) / spread + (0.0 if shift_mean else center) for value in values]
    result = whiten(double(values), shift_mean=shift_mean)
    torch.testing.assert_close(result, double(expected), atol=1e-6, rtol=1e-6)
    if len(values) > 1 and stdev(values) > 0.01:
        assert abs(float(result.std()) - 1) < 1e-3


# --- corrections ---


def loop_weights(
    ratios: list[float], seq: list[int], level: str, mode: str, low: float | None, high: float | None
) -> list[float]:
    result: list[float] = []
    for i, ratio in enumerate(ratios):
        own = [ratios[j] for j in range(len(ratios)) if seq[j] == seq[i]]
        log = {"token": ratio, "sequence": sum(own), "geometric": sum(own) / len(own)}[level]
        weight = math.exp(max(-20.0, min(20.0, log)))
        below, above = low is not None and weight < low, high is not None and weight > high
        if mode == "mask" and (below or above):
            weight = 0.0
        if mode in ("truncate", "clip") and high is not None:
            weight = min(weight, high)
        if mode == "clip" and low is not None:
            weight = max(weight, low)
        result.append(weight)
    return result


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
@given(
    batches({"ratios": (-30, 30)}),
    st.none() | st.sampled_from([0.0, 0.4]),
    st.none() | st.sampled_from([1.3, 50.0]),
)
def test_importance_weights(
    level: Any, mode: Any, batch: dict[str, Any], low: float | None, high: float | None
) -> None:
    ratios, seq = batch["ratios"], batch["seq"]
    options: dict[str, Any] = {"level": level, "mode": mode, "low": low, "high": high}
    result = importance_weights(double(ratios).requires_grad_(), torch.tensor(seq), **options)
    expected = double(loop_weights(ratios, seq, level, mode, low, high))
    torch.testing.assert_close(result, expected, **CLOSE)
    assert not result.requires_grad
    assert high is None or float(result.max()) <= high
    ones = importance_weights(torch.zeros(len(seq)), torch.tensor(seq), **options)
    assert torch.equal(ones, torch.ones(len(seq)))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@given(batches({"ratios": (-5, 5)}), st.none() | st.just(1.5))
def test_effective_sample_size(level: Any, batch: dict[str, Any], high: float | None) -> None:
    ratios, seq = batch["ratios"], torch.tensor(batch["seq"])
    by_token = loop_weights(ratios, batch["seq"], level, "truncate", None, high)
    weights = by_token if level == "token" else list(dict(zip(batch["seq"], by_token, strict=True)).values())
    expected = sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))
    result = effective_sample_size(double(ratios), seq, level=level, high=high)
    assert float(result) == pytest.approx(expected, rel=1e-9)
    assert 0 < float(result) <= 1 + 1e-12


def test_weight_moments_of_parts_add_up_to_the_whole() -> None:
    ratios, seq = double([0.1, -0.4, 0.8, 1.2, -2.0]), torch.tensor([0, 0, 1, 2, 2])
    whole = torch.stack(weight_moments(ratios, seq, level="sequence"))
    parts = [weight_moments(ratios[s], seq[s], level="sequence") for s in (slice(0, 2), slice(2, 5))]
    torch.testing.assert_close(torch.stack(parts[0]) + torch.stack(parts[1]), whole)


def test_unknown_level_mode_and_aggregation_are_named() -> None:
    ratios, seq = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="level = 'tokens'"):
        importance_weights(ratios, seq, level="tokens")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="mode = 'drop'"):
        importance_weights(ratios, seq, mode="drop")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="mode = 'mean'"):
        aggregate(ratios, seq, mode="mean")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="max_length"):
        aggregate(ratios, seq, mode="seq-mean-token-sum-norm")


# --- losses ---


def loop_ppo(batch: dict[str, Any], old: str, low: float, high: float, dual: float | None) -> list[float]:
    result: list[float] = []
    for logprob, reference, advantage in zip(batch["logprobs"], batch[old], batch["advantages"], strict=True):
        ratio = math.exp(logprob - reference)
        loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
        result.append(min(loss, -dual * advantage) if dual is not None and advantage < 0 else loss)
    return result


@given(tokens, st.none() | st.just(3.0))
def test_ppo_clip(batch: dict[str, Any], dual: float | None) -> None:
    arguments = [double(batch[name]) for name in ("logprobs", "behavior", "advantages")]
    result = ppo_clip(*arguments, clip_low=0.2, clip_high=0.28, dual_clip=dual)
    torch.testing.assert_close(result, double(loop_ppo(batch, "behavior", 0.2, 0.28, dual)), **CLOSE)


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


def gradient(loss: Tensor, logprobs: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), logprobs)[0]


@given(tokens)
def test_one_update_per_batch_makes_decoupled_ppo_weighted_reinforce(batch: dict[str, Any]) -> None:
    seq = torch.tensor(batch["seq"])
    logprobs = double(batch["logprobs"]).requires_grad_()
    behavior, advantages = double(batch["behavior"]), double(batch["advantages"])
    decoupled = decoupled_ppo(logprobs, logprobs.detach(), behavior, advantages, seq)
    reinforce = reinforce_is(logprobs, behavior, advantages, cap=2.0)
    torch.testing.assert_close(gradient(decoupled, logprobs), gradient(reinforce, logprobs), **CLOSE)


@given(tokens, st.none() | st.just(1.5))
def test_reinforce_is(batch: dict[str, Any], cap: float | None) -> None:
    logprobs = double(batch["logprobs"]).requires_grad_()
    result = reinforce_is(logprobs, double(batch["behavior"]), double(batch["advantages"]), cap=cap)
    rows = list(zip(batch["logprobs"], batch["behavior"], batch["advantages"], strict=True))
    weights = [min(math.exp(p - b), math.inf if cap is None else cap) for p, b, _ in rows]
    expected = [-weight * a * p for weight, (p, _, a) in zip(weights, rows, strict=True)]
    torch.testing.assert_close(result, double(expected), **CLOSE)
    expected = [-weight * a for weight, (_, _, a) in zip(weights, rows, strict=True)]
    torch.testing.assert_close(gradient(result, logprobs), double(expected), **CLOSE)


def test_extreme_log_ratios_stay_finite_in_float32() -> None:
    logprobs = torch.tensor([0.0, -400.0, -1.0], requires_grad=True)
    behavior, advantages = torch.tensor([-400.0, 0.0, -1.0]), torch.tensor([-1.0, 1.0, 1.0])
    seq = torch.tensor([0, 0, 0])
    for loss in (
        ppo_clip(logprobs, behavior, advantages, dual_clip=None),
        decoupled_ppo(logprobs, logprobs.detach(), behavior, advantages, seq),
        reinforce_is(logprobs, behavior, advantages),
    ):
        assert loss.dtype is torch.float32 and loss.isfinite().all()
        assert gradient(loss, logprobs).isfinite().all()


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
