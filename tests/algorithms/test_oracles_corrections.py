"""Weights, sample sizes, masks and divergences against plain loops written from their formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from algorithm_batches import CLOSE, Batch, batches, double, gradient, tokens
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.corrections import (
    effective_sample_size,
    importance_weights,
    loglinear_proximal,
    mismatch_kl,
    opsm_mask,
    weight_moments,
)
from asyncrl.algorithms.kl import kl_estimate
from asyncrl.algorithms.losses import aggregate


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


def test_weight_moments_of_parts_add_up() -> None:
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


@given(tokens, st.sampled_from([0.1, 0.5, 1.0]))
def test_opsm_mask(batch: Batch, delta: float) -> None:
    logprobs, behavior, advantages = (double(batch[name]) for name in ("logprobs", "behavior", "advantages"))
    result = opsm_mask(logprobs, behavior, advantages, torch.tensor(batch["seq"]), delta=delta)
    for i, number in enumerate(batch["seq"]):
        own = [j for j, other in enumerate(batch["seq"]) if other == number]
        advantage = sum(batch["advantages"][j] for j in own) / len(own)
        drift = sum(batch["behavior"][j] - batch["logprobs"][j] for j in own) / len(own)
        if abs(drift - delta) > 1e-9 and (abs(advantage) > 1e-9 or advantage == 0):
            assert float(result[i]) == (0.0 if advantage < 0 and drift > delta else 1.0)
    on_policy = opsm_mask(logprobs, logprobs, advantages, torch.tensor(batch["seq"]), delta=delta)
    assert torch.equal(on_policy, torch.ones_like(on_policy))


@given(tokens)
def test_loglinear_proximal(batch: Batch) -> None:
    logprobs, behavior = double(batch["logprobs"]).requires_grad_(), double(batch["behavior"])
    versions = [7 - number for number in batch["seq"]]
    result = loglinear_proximal(logprobs, behavior, torch.tensor(versions), version=7)
    expected: list[float] = []
    for current, old, sampled in zip(batch["logprobs"], batch["behavior"], versions, strict=True):
        alpha = (7 - sampled) / (8 - sampled)
        expected.append(old + alpha * (current - old))
    torch.testing.assert_close(result, double(expected), **CLOSE)
    assert not result.requires_grad
    fresh = torch.tensor(versions) == 7
    assert torch.equal(result[fresh], behavior[fresh])


# --- divergence ---


def loop_kl(estimator: str, current: float, reference: float) -> tuple[float, float]:
    """Returns the value and its derivative by the current log-prob."""
    d = reference - current
    k3 = math.exp(d) - d - 1
    return {
        "k1": (-d, 1.0),
        "k2": (d * d / 2, -d),
        "abs": (abs(d), math.copysign(1.0, -d) if d else 0.0),
        "k3": (min(k3, 10.0), 1 - math.exp(d) if k3 < 10 else 0.0),
        "k3+": (min(k3, 10.0), -d),
    }[estimator]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3+", "abs"])
@given(batches({"logprobs": (-6, 0), "reference": (-6, 0)}))
def test_kl_estimate(estimator: Any, batch: Batch) -> None:
    logprobs = double(batch["logprobs"]).requires_grad_()
    result = kl_estimate(logprobs, double(batch["reference"]), estimator=estimator)
    rows = [loop_kl(estimator, p, q) for p, q in zip(batch["logprobs"], batch["reference"], strict=True)]
    torch.testing.assert_close(result, double([value for value, _ in rows]), **CLOSE)
    torch.testing.assert_close(gradient(result, logprobs), double([slope for _, slope in rows]), **CLOSE)
    assert (kl_estimate(logprobs, logprobs, estimator=estimator) == 0).all()
    if estimator != "k1":
        assert (result >= 0).all()


@pytest.mark.parametrize(("estimator", "direction"), [("k2", "current"), ("k3+", "current"), ("k3", "reference")])
def test_expected_gradient_of_kl_estimators(estimator: Any, direction: str) -> None:
    logits = double([0.3, -1.0, 0.8, 0.1]).requires_grad_()
    reference = double([-0.2, 0.4, 0.5, -0.7]).log_softmax(0)
    current = logits.log_softmax(0)
    expected_loss = (current.detach().exp() * kl_estimate(current, reference, estimator=estimator)).sum()
    exact = {
        "current": (current.exp() * (current - reference)).sum(),
        "reference": (reference.exp() * (reference - current)).sum(),
    }[direction]
    (given_gradient,) = torch.autograd.grad(expected_loss, logits, retain_graph=True)
    torch.testing.assert_close(given_gradient, gradient(exact, logits), **CLOSE)


def test_k3_stays_finite_and_k3_plus_keeps_pulling() -> None:
    logprobs, reference = torch.tensor([-500.0, 0.0], requires_grad=True), torch.tensor([0.0, -500.0])
    k3 = kl_estimate(logprobs, reference, estimator="k3")
    assert k3.tolist() == [10.0, 10.0] and gradient(k3, logprobs).tolist() == [0.0, 0.0]
    k3_plus = kl_estimate(logprobs, reference, estimator="k3+")
    assert k3_plus.tolist() == [10.0, 10.0] and gradient(k3_plus, logprobs).tolist() == [-500.0, 500.0]


def test_unknown_estimator_is_named() -> None:
    with pytest.raises(ValueError, match="estimator = 'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), estimator="k4")  # pyright: ignore[reportArgumentType]


@given(st.floats(-100.0, 100.0, width=32) | st.floats(-(2.0**-20), 2.0**-20, width=32))
def test_mismatch_is_precise_and_never_negative(log_ratio: float) -> None:
    (got,) = mismatch_kl(torch.tensor([log_ratio])).tolist()
    bounded = max(-20.0, min(20.0, log_ratio))
    # For small d, e^d - 1 - d is computed by its series, since the difference cancels.
    near = bounded**2 / 2 + bounded**3 / 6 + bounded**4 / 24
    expected = near if abs(log_ratio) < 1e-3 else math.expm1(bounded) - log_ratio
    assert got >= 0 and got == pytest.approx(expected, rel=1e-6, abs=1e-20)
