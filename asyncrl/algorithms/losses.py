"""Policy losses: one loss per action token [N], and how a batch of them becomes one number.

A loss names the policies it needs as its positional parameters, out of the fields of `PolicyTerms`; its
keyword-only arguments are its options. Only `logprobs` carries a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from asyncrl.algorithms.corrections import importance_weights, safe_exp
from asyncrl.algorithms.segments import num_segments, segment_mean

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

TRUNCATED: Mapping[str, Any] = MappingProxyType({"level": "token", "mode": "truncate", "high": 2.0})
"""Options of `importance_weights`: truncated importance sampling per token."""


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """What a policy loss may ask for; all [N], log-probs in nats at the sampling temperature."""

    logprobs: Tensor
    """Of the current policy, with gradient."""
    proximal_logprobs: Tensor
    """Of the learner's weights before this update."""
    behavior_logprobs: Tensor
    """Of the policy that sampled the token, as the engine recorded them."""
    advantages: Tensor
    seq: Tensor
    """int64, the sequence of each token."""

    @property
    def old_logprobs(self) -> Tensor:
        """The old policy of a loss that knows only one: the policy that sampled the data."""
        return self.behavior_logprobs


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 3.0,
) -> Tensor:
    """Clipped surrogate max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = current / old, arXiv:1707.06347.

    A wider upper bound is clip-higher, arXiv:2503.14476. Where A < 0 the loss is at most -dual_clip A,
    arXiv:1912.09729; None switches that off.
    """
    ratio = safe_exp(logprobs - old_logprobs)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)


def decoupled_ppo(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    seq: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 3.0,
    correction: Mapping[str, Any] = TRUNCATED,
) -> Tensor:
    """PPO clipped around the proximal policy, times the weight of proximal against behavior policy.

    arXiv:2110.00641, arXiv:2505.24298 eq. 5. `correction` holds options of `importance_weights`.
    """
    weights = importance_weights(proximal_logprobs - behavior_logprobs, seq, **correction)
    clipped = ppo_clip(
        logprobs, proximal_logprobs, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    return weights * clipped


def reinforce_is(logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, *, cap: float | None = 5.0) -> Tensor:
    """-min(u, cap) A log p with the weight u = current / behavior held constant, arXiv:2505.24034.

    Its gradient is -min(u, cap) A d log p; None does not cap.
    """
    weights = safe_exp((logprobs - behavior_logprobs).detach())
    if cap is not None:
        weights = weights.clamp(max=cap)
    return -weights * advantages * logprobs


LOSSES: dict[str, Callable[..., Tensor]] = {
    "ppo_clip": ppo_clip,
    "decoupled_ppo": decoupled_ppo,
    "reinforce_is": reinforce_is,
}
"""By config name: functions that give one loss per action token [N]."""


def aggregate(
    token_loss: Tensor,
    seq: Tensor,
    *,
    mode: Aggregation = "token-mean",
    max_length: int | None = None,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
) -> Tensor:
    """One number from token losses [N] of whole sequences `seq` [N]. Differentiable.

    token-mean divides the sum by `num_tokens` (arXiv:2503.14476); token-sum does not divide; the seq-mean modes
    divide by `num_sequences` the sums, the means (arXiv:2402.03300), or the sums over `max_length`
    (arXiv:2503.20783) of the sequences. The counts are those of the whole optimizer step, over all
    micro-batches and ranks, so that the parts add up; without them, those of the given tokens.
    Raises ValueError for an unknown mode, or when seq-mean-token-sum-norm lacks `max_length`.
    """
    num_tokens = token_loss.numel() if num_tokens is None else num_tokens
    num_sequences = len(torch.unique(seq)) if num_sequences is None else num_sequences
    match mode:
        case "token-sum":
            return token_loss.sum()
        case "token-mean":
            return token_loss.sum() / num_tokens
        case "seq-mean-token-sum":
            return token_loss.sum() / num_sequences
        case "seq-mean-token-sum-norm":
            if max_length is None:
                raise ValueError("mode = 'seq-mean-token-sum-norm' needs max_length, a constant of the run")
            return token_loss.sum() / (num_sequences * max_length)
        case "seq-mean-token-mean":
            return segment_mean(token_loss, seq, num_segments(seq)).sum() / num_sequences
    raise ValueError(f"mode = {mode!r}: not an aggregation")
