"""Policy losses by name, and the critic's: one loss per action token [N].

A policy loss names the policies it needs as its positional parameters, out of the fields of `PolicyTerms`; its
keyword-only arguments are its options, but for `bound`, which the caller knows. Only `logprobs` carries a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.aggregation import Aggregation, aggregate
from asyncrl.algorithms.clipped import TRUNCATED, decoupled_ppo, gspo, m2po, m2po_bound, ppo_clip, sapo
from asyncrl.algorithms.weighted import cispo, dppo, reinforce_is, topr, vespo, vtrace

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
