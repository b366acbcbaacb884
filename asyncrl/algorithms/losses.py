"""Policy losses by name, and the critic's: one loss per action token [N].

A policy loss names the policies it needs as its positional parameters, out of the fields of `PolicyTerms`; its
keyword-only arguments are its options, except `bound` and `correction`, which the caller passes. Only `logprobs`
carries a gradient. A loss of one's own in `my_losses.py`:

    def clipped_reinforce(logprobs, behavior_logprobs, advantages, *, cap: float = 2.0):
        weights = (logprobs.detach() - behavior_logprobs).exp().clamp(max=cap)
        return -weights * advantages * logprobs  # one loss per action token [N]

is used with this config:

    algorithm:
      loss: my_losses:clipped_reinforce
      loss_options: {cap: 3.0}
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncrl.algorithms.clipped import TRUNCATED, decoupled_ppo, gspo, m2po, m2po_bound, ppo_clip, sapo
from asyncrl.algorithms.segments import num_segments, segment_mean
from asyncrl.algorithms.weighted import cispo, dppo, reinforce_is, topr, vespo, vtrace

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def aggregate(
    token_loss: Tensor,
    seq: Tensor,
    *,
    mode: Aggregation = "token-mean",
    max_length: int | None = None,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
) -> Tensor:
    """One number from token losses [N] of whole sequences `seq` [N]. Differentiable; 0 when N = 0.

    token-mean divides the sum by `num_tokens` (arXiv:2503.14476); token-sum does not divide; the seq-mean modes
    divide by `num_sequences` the sums, the means (arXiv:2402.03300), or the sums over `max_length`
    (arXiv:2503.20783) of the sequences. The counts are those of the whole optimizer step, over all
    micro-batches and ranks, so that the parts add up; without them, those of the given tokens.
    Raises ValueError for an unknown mode, or when seq-mean-token-sum-norm lacks `max_length`.
    """
    tokens = max(token_loss.numel() if num_tokens is None else num_tokens, 1)
    sequences = max(len(torch.unique_consecutive(seq)) if num_sequences is None else num_sequences, 1)
    match mode:
        case "token-sum":
            return token_loss.sum()
        case "token-mean":
            return token_loss.sum() / tokens
        case "seq-mean-token-sum":
            return token_loss.sum() / sequences
        case "seq-mean-token-sum-norm":
            if max_length is None:
                raise ValueError("mode = 'seq-mean-token-sum-norm' needs max_length, a constant of the run")
            return token_loss.sum() / (sequences * max_length)
        case "seq-mean-token-mean":
            return segment_mean(token_loss, seq, num_segments(seq)).sum() / sequences
    raise ValueError(f"mode = {mode!r}: not an aggregation")


__all__ = [
    "BOUNDS",
    "LOSSES",
    "TRUNCATED",
    "Aggregation",
    "PolicyTerms",
    "aggregate",
    "cispo",
    "decoupled_ppo",
    "dppo",
    "gspo",
    "m2po",
    "m2po_bound",
    "ppo_clip",
    "reinforce_is",
    "sapo",
    "topr",
    "value_loss",
    "vespo",
    "vtrace",
]


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


LOSSES: dict[str, Callable[..., Tensor]] = {
    "ppo_clip": ppo_clip,
    "decoupled_ppo": decoupled_ppo,
    "reinforce_is": reinforce_is,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo": dppo,
    "topr": topr,
    "m2po": m2po,
    "vespo": vespo,
    "vtrace": vtrace,
}
"""By config name: functions that give one loss per action token [N]."""

BOUNDS: dict[str, Callable[..., Tensor]] = {"m2po": m2po_bound}
"""Losses that take a `bound`: how it is solved, from log ratios [N] and advantages [N] of the whole batch."""


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = 0.2) -> Tensor:
    """The critic's loss [N]: max((v - R)^2, (v_clipped - R)^2) / 2, v_clipped = v within old_values +- clip.

    All [N], the gradient flows through `values`. A value that moved further than `clip` toward the return has no
    gradient; None does not clip. PPO's value clipping, arXiv:1707.06347 and arXiv:2005.12729.
    """
    squares = (values - returns).square()
    if clip is not None:
        bounded = values.clamp(old_values - clip, old_values + clip)
        squares = torch.maximum(squares, (bounded - returns).square())
    return squares / 2
