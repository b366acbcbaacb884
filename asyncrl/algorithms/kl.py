"""KL divergence from a reference policy: estimators per token."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from asyncrl.algorithms.corrections import MAX_LOG_RATIO

Estimator = Literal["k1", "k2", "k3", "k3+", "abs"]

MAX_K3 = 10.0
"""Upper bound of k3 per token in nats; k3 grows linearly with the ratio."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: Estimator = "k3") -> Tensor:
    """Divergence [N] in nats of the current policy [N] from the reference [N], at the sampled tokens.

    Each estimator's value, with d = log p_ref - log p, and its derivative with respect to log p:

    - k1 = -d, derivative 1: unbiased as a value. As a loss its expected gradient is 0; it belongs in the reward.
    - k2 = d^2 / 2, derivative -d: on-policy the exact gradient of KL(p || ref).
    - k3 = e^d - d - 1, derivative 1 - e^d: low variance and never negative, but its gradient is the gradient of
      KL(ref || p). d is clamped to +-20 first and the value to at most 10 (no gradient beyond the bounds).
    - k3+: the value of k3 with the derivative of k2.
    - abs = |d|, derivative -sign(d).

    Schulman, http://joschu.net/blog/kl-approx.html; gradients arXiv:2512.21852. Raises ValueError for another name.
    """
    log_ratios = ref_logprobs - logprobs
    match estimator:
        case "k1":
            return -log_ratios
        case "k2":
            return log_ratios.square() / 2
        case "abs":
            return log_ratios.abs()
        case "k3":
            return _k3(log_ratios)
        case "k3+":
            k2 = log_ratios.square() / 2
            return _k3(log_ratios).detach() + (k2 - k2.detach())
    raise ValueError(f"estimator = {estimator!r}: expected k1, k2, k3, k3+ or abs")


def _k3(log_ratios: Tensor) -> Tensor:
    bounded = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (bounded.expm1() - bounded).clamp(max=MAX_K3)
