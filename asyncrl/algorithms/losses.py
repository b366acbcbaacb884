"""Policy losses by name, and the critic's loss. Each returns one loss per action token [N].

A policy loss declares its inputs as positional parameters, chosen from the fields of `PolicyTerms`. Its keyword-only
arguments are options, except `bound` and `correction`, which the caller passes. Only `logprobs` carries a gradient.
A user-defined loss in `my_losses.py`:

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
    lengths: Tensor | None = None,
) -> Tensor:
    """The scalar loss of token losses [N] of complete sequences `seq` [N]. Differentiable; 0 when N = 0.

    - token-mean: the sum over all tokens, divided by `num_tokens` (arXiv:2503.14476).
    - token-sum: the sum over all tokens.
    - seq-mean-token-sum: the sum of the sequences' sums, divided by `num_sequences`.
    - seq-mean-token-mean: the sum of the sequences' means, divided by `num_sequences` (arXiv:2402.03300).
    - seq-mean-token-sum-norm: the sum of the sequences' sums, divided by `num_sequences` times `max_length`
      (arXiv:2503.20783).

    `num_tokens` and `num_sequences` count the complete optimizer step, over all micro-batches and ranks, so that the
    losses of the parts add up; None counts the passed tokens or sequences. Episodes with several rows count as one
    sequence, of which `seq` has parts: then `lengths` [N] is the number of tokens of each token's episode.
    Raises ValueError for an unknown mode, or if seq-mean-token-sum-norm lacks `max_length`.
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
            if lengths is not None:
                return (token_loss / lengths).sum() / sequences
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
    """The inputs available to a policy loss. All are [N]; log-probs are in nats at the sampling temperature."""

    logprobs: Tensor
    """Log-probs of the current policy, with gradient."""
    proximal_logprobs: Tensor
    """Log-probs of the learner's weights before this update."""
    behavior_logprobs: Tensor
    """Log-probs of the policy that sampled the token, as the engine recorded them."""
    advantages: Tensor
    seq: Tensor
    """Index of each token's sequence, int64."""

    @property
    def old_logprobs(self) -> Tensor:
        """Log-probs of the old policy for a loss that uses only one: the policy that sampled the data."""
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
"""Policy losses by config name. Each returns one loss per action token [N]."""

BOUNDS: dict[str, Callable[..., Tensor]] = {"m2po": m2po_bound}
"""Solvers of `bound` by the name of the loss that takes it. Inputs: log ratios [N] and advantages [N] of a complete
batch."""


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = 0.2) -> Tensor:
    """The critic's loss [N]: max((v - R)^2, (v_clipped - R)^2) / 2, v_clipped = v within old_values +- clip.

    All inputs are [N]; the gradient flows through `values`. A value that moved further than `clip` toward the return
    has no gradient; None disables clipping. PPO's value clipping, arXiv:1707.06347 and arXiv:2005.12729.
    """
    squares = (values - returns).square()
    if clip is not None:
        bounded = values.clamp(old_values - clip, old_values + clip)
        squares = torch.maximum(squares, (bounded - returns).square())
    return squares / 2
