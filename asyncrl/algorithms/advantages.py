"""Advantages computed from rewards. They carry no gradient; results keep the dtype and device of the rewards.

An advantage function declares its inputs as positional parameters, chosen from: rewards, values, seq, group, lengths,
log_ratios, greedy_rewards, turn, turn_rewards. A function with the parameter `group` or `greedy_rewards` receives one
reward per sequence [S]; any other function receives one reward per token [N]. An episode is one sequence, also if its
tokens are those of several rows; with an environment the rewards of tokens are those of turns, on their last tokens.
`turn` and `turn_rewards` are explained in `turns`. A function with the parameter `values` returns the
pair (advantages [N], returns [N]), where the returns are the critic's regression targets. Keyword-only arguments are
options, except `reduce` and `bootstrap`, which the caller passes. A user-defined advantage in `my_advantages.py`:

    def fixed_baseline(rewards, group, *, baseline: float = 0.5):
        return rewards - baseline  # one advantage per sequence [S], since `seq` is not a parameter

is used with this config:

    algorithm:
      advantage: my_advantages:fixed_baseline
      advantage_options: {baseline: 0.4}
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms.group_advantages import dr_grpo, group_sizes, grpo, maxrl, opo, remax, rloo
from asyncrl.algorithms.segments import at_most, backward_recurrence, following, safe_exp, sequence_ends
from asyncrl.algorithms.turns import progress, turn_grpo

__all__ = [
    "ADVANTAGES",
    "dr_grpo",
    "gae",
    "grpo",
    "maxrl",
    "opo",
    "progress",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "turn_grpo",
    "vtrace",
    "vtrace_advantages",
    "whiten",
]

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over the ranks that share an optimizer batch. A collective: every rank must call it equally often."""


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    seq: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation: (advantages [N], returns [N] = advantages + values), arXiv:1506.02438.

    A_t = d_t + gamma lam A_{t+1} with d_t = r_t + gamma V_{t+1} - V_t, from rewards [N], values [N] and `seq` [N].
    `bootstrap` [S] is the value after the last token of each sequence number, 0 when None. The advantages are not
    whitened.
    """
    ends = sequence_ends(seq)
    last = 0.0 if bootstrap is None else bootstrap.double()[seq]
    precise = values.double()
    deltas = rewards.double() + gamma * following(precise, ends, last) - precise
    advantages = backward_recurrence(deltas, torch.full_like(deltas, gamma * lam), ends)
    return advantages.to(rewards.dtype), (advantages + precise).to(rewards.dtype)


@torch.no_grad()
def vtrace(
    log_ratios: Tensor,
    rewards: Tensor,
    values: Tensor,
    seq: Tensor,
    *,
    gamma: float = 1.0,
    rho_clip: float | None = 1.0,
    pg_rho_clip: float | None = 1.0,
    trace_clip: float | None = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """V-trace: (values v [N], policy gradient advantages [N]), arXiv:1802.01561 eq. 1.

    With u_t = exp(log_ratios_t) of current against behavior policy,
    v_t = V_t + min(rho_clip, u_t) (r_t + gamma V_{t+1} - V_t) + gamma min(trace_clip, u_t) (v_{t+1} - V_{t+1}) and
    A_t = min(pg_rho_clip, u_t) (r_t + gamma v_{t+1} - V_t). A clip of None does not clip. All inputs are [N];
    `bootstrap` [S] is the value after the last token of each sequence number, 0 when None.
    """
    ends = sequence_ends(seq)
    last = 0.0 if bootstrap is None else bootstrap.double()[seq]
    ratios, precise, gains = safe_exp(log_ratios.double()), values.double(), rewards.double()
    next_values = following(precise, ends, last)
    deltas = at_most(ratios, rho_clip) * (gains + gamma * next_values - precise)
    targets = precise + backward_recurrence(deltas, gamma * at_most(ratios, trace_clip), ends)
    advantages = at_most(ratios, pg_rho_clip) * (gains + gamma * following(targets, ends, last) - precise)
    return targets.to(rewards.dtype), advantages.to(rewards.dtype)


@wraps(vtrace, assigned=("__annotations__",))
def vtrace_advantages(*terms: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """`vtrace` with its results as (advantages [N], returns [N]), the order of every advantage that needs values."""
    returns, advantages = vtrace(*terms, **options)
    return advantages, returns


@torch.no_grad()
def reinforce_plus_plus(rewards: Tensor, seq: Tensor, *, gamma: float = 1.0, reduce: Reduce | None = None) -> Tensor:
    """Whitened discounted rewards to go: whiten(G) [N], G_t = r_t + gamma G_{t+1}, arXiv:2501.03262.

    The inputs are rewards [N] and `seq` [N]. `reduce` as in `whiten`.
    """
    ends = sequence_ends(seq)
    precise = rewards.double()
    returns = backward_recurrence(precise, torch.full_like(precise, gamma), ends)
    return whiten(returns, reduce=reduce).to(rewards.dtype)


@torch.no_grad()
def reinforce_plus_plus_baseline(
    rewards: Tensor, group: Tensor, seq: Tensor, *, reduce: Reduce | None = None
) -> Tensor:
    """Rewards [S] minus the mean of their group [S], broadcast to all tokens [N] and whitened, arXiv:2501.03262.

    `seq` [N] indexes the rewards. A group of one has no baseline: its tokens get 0 and are excluded from the
    statistics. `reduce` as in `whiten`.
    """
    centered = dr_grpo(rewards, group)[seq]
    compared = (group_sizes(group) > 1)[seq]
    return torch.zeros_like(centered).masked_scatter(compared, whiten(centered[compared], reduce=reduce))


@torch.no_grad()
def whiten(x: Tensor, *, shift_mean: bool = True, reduce: Reduce | None = None) -> Tensor:
    """(x - mean) rsqrt(var + 1e-8) of x [N], with the mean added back when `shift_mean` is false.

    The variance is unbiased; the variance of a single value is taken as 0. Mean and variance are computed over the
    complete optimizer batch: `reduce` sums a tensor over the ranks that hold its parts (None: x is the complete
    batch). Every rank must call this function, even if its x is empty.
    """
    total = reduce or (lambda part: part)
    precise = x.double()
    count, sum_x = total(torch.stack([precise.new_tensor(len(x)), precise.sum()])).unbind()
    mean = sum_x / count.clamp(min=1)
    variance = total((precise - mean).square().sum()) / (count - 1).clamp(min=1)
    whitened = (precise - mean) * torch.rsqrt(variance + 1e-8)
    return (whitened if shift_mean else whitened + mean).to(x.dtype)


ADVANTAGES: dict[str, Callable[..., Any]] = {
    "gae": gae,
    "vtrace": vtrace_advantages,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "maxrl": maxrl,
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "turn_grpo": turn_grpo,
    "progress": progress,
}
"""Advantage functions by config name."""
