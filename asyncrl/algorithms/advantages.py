"""Advantages computed from rewards. They carry no gradient; results keep the dtype and device of the rewards.

An advantage function declares its inputs as positional parameters, chosen from: rewards, values, seq, group, lengths,
log_ratios, greedy_rewards, turn, turn_rewards. A function with the parameter `group` or `greedy_rewards` receives one
reward per sequence [S]; any other function receives one reward per token [N]. An episode is one sequence, also if its
tokens are those of several rows; with an environment the rewards of tokens are those of turns, on their last tokens.
`turn_rewards` [M, T] of M members are NaN after a member's last turn and add up to the member's reward: rewards of no
turn are in the last one. `turn` [N] is the turn of each action token. A function with the parameter `values`
returns the pair (advantages [N], returns [N]), where the returns are the critic's regression targets. Keyword-only
arguments are options, except `reduce` and `bootstrap`, which the caller passes. A user-defined advantage in
`my_advantages.py`:

    def fixed_baseline(rewards, group, *, baseline: float = 0.5):
        return rewards - baseline  # one advantage per sequence [S], since `seq` is not a parameter

is used with this config:

    algorithm:
      advantage: my_advantages:fixed_baseline
      advantage_options: {baseline: 0.4}"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from asyncrl.algorithms.corrections import Fraction, at_most, num_segments, safe_exp, segment_sum

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over the ranks that share an optimizer batch. A collective: every rank must call it equally often."""
LIMIT = 1e150
"""Bound on partial results of `_solve`. The product of two of them is finite, so that multiplying it by the coefficient
0 at the end of a sequence yields 0."""


@torch.no_grad()
def grpo(rewards: Tensor, group: Tensor, *, eps: NonNegativeFloat = 1e-6) -> Tensor:
    """Rewards [S] standardized within their group [S]: (r - mean) / (std + eps), with the unbiased standard deviation.

    A group of one gets 0. Group relative policy optimization, arXiv:2402.03300.
    """
    size, mean, std = group_moments(rewards, group)
    return torch.where(size > 1, (rewards - mean) / (std + eps), 0.0)


@torch.no_grad()
def dr_grpo(rewards: Tensor, group: Tensor) -> Tensor:
    """Rewards [S] minus the mean of their group [S], not divided by the standard deviation; 0 for a group of one.

    arXiv:2503.20783.
    """
    return _compare(rewards, numbered(group))[1]


@torch.no_grad()
def rloo(rewards: Tensor, group: Tensor) -> Tensor:
    """Rewards [S] minus the mean of the others in their group [S]; 0 for a group of one. arXiv:2402.14740."""
    size, centered = _compare(rewards, numbered(group))
    return torch.where(size > 1, centered * size / (size - 1).clamp(min=1), 0.0)


@torch.no_grad()
def opo(rewards: Tensor, group: Tensor, lengths: Tensor) -> Tensor:
    """Rewards [S] minus the mean of their group [S] weighted by `lengths` [S]: r - sum(n r) / sum(n).

    This baseline minimizes the variance if every token's gradient has the same norm, arXiv:2505.23585. A group of one
    gets 0.
    """
    group = numbered(group)
    tokens = lengths.to(rewards.dtype)
    baseline = group_total(tokens * rewards, group) / group_total(tokens, group).clamp(min=1)
    return torch.where(group_total(torch.ones_like(group), group) > 1, rewards - baseline, 0.0)


@torch.no_grad()
def maxrl(rewards: Tensor, group: Tensor, *, eps: NonNegativeFloat = 1e-6) -> Tensor:
    """(r - mean) / (mean + eps) of rewards [S] within their group [S]: maximum likelihood RL, arXiv:2602.02710.

    Intended for non-negative rewards: a negative mean inverts the sign. A group of one gets 0, and so does a group
    whose mean is within eps of 0 and therefore provides no scale.
    """
    size, centered = _compare(rewards, numbered(group))
    mean = rewards - centered
    return torch.where((size > 1) & (mean.abs() > eps), centered / (mean + eps), 0.0)


@torch.no_grad()
def remax(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """Rewards [S] minus those of greedy completions of the same prompts [S], arXiv:2310.10505."""
    return rewards - greedy_rewards


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    seq: Tensor,
    *,
    gamma: Fraction = 1.0,
    lam: Fraction = 1.0,
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
    gamma: Fraction = 1.0,
    rho_clip: PositiveFloat | None = 1.0,
    pg_rho_clip: PositiveFloat | None = 1.0,
    trace_clip: PositiveFloat | None = 1.0,
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
def reinforce_plus_plus(rewards: Tensor, seq: Tensor, *, gamma: Fraction = 1.0, reduce: Reduce | None = None) -> Tensor:
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


@torch.no_grad()
def turn_grpo(
    rewards: Tensor,
    turn_rewards: Tensor,
    turn: Tensor,
    seq: Tensor,
    group: Tensor,
    *,
    gamma: Fraction = 1.0,
    outcome: NonNegativeFloat = 0.0,
    eps: NonNegativeFloat = 1e-6,
) -> Tensor:
    """Returns to go of the turns, standardized within the group at the same turn: advantages [N].

    The return of turn k is G_k = r_k + gamma G_{k+1}, discounted by turns and not by tokens, arXiv:2507.11948. It is
    compared, as in `grpo`, with the other members that have a turn k; if no other has one, the advantage is 0.
    `outcome` times the GRPO advantage of the rewards [M] is added to every turn of a member, arXiv:2505.11821. With the
    reward in the last turn, gamma 1, outcome 0 and equal numbers of turns this is `grpo`.
    """
    there = ~turn_rewards.isnan()
    returns = turn_rewards.nan_to_num()
    for number in range(returns.shape[1] - 2, -1, -1):
        returns[:, number] += gamma * returns[:, number + 1]
    member, number = there.nonzero(as_tuple=True)
    advantages = torch.zeros_like(returns)
    advantages[there] = grpo(returns[there], numbered(group)[member] * returns.shape[1] + number, eps=eps)
    return advantages[seq, turn] + outcome * grpo(rewards, group, eps=eps)[seq]


@torch.no_grad()
def progress(
    turn_rewards: Tensor,
    turn: Tensor,
    seq: Tensor,
    group: Tensor,
    *,
    gamma: Fraction = 0.9,
    eps: NonNegativeFloat = 1e-6,
) -> Tensor:
    """The members' rewards distributed over the turns that led to them, standardized within the group: advantages [N].

    For environments that score states: the reward r_k of turn k is the score after the turn minus the score before it,
    so that a turn that is undone later nets nothing. Since a state may have been prepared, r_k is shared by turn k and
    those before it with weights gamma^(k-j) that add up to 1; turn j has the sum c_j of its shares, and the c_j add up
    to the member's reward R. With v_j = K c_j in an episode of K turns, whose mean is R, the advantage of turn j is
    (v_j - mean R) / (std + eps). The variance is of the v_j, every member with the same weight: the sum over the n
    members of the means over their turns of (v_j - mean R)^2, divided by n - 1. With gamma 0 a turn has its own reward
    only; with gamma 1 and all of the reward in the last turn this is `grpo`. A group of one gets 0.
    """
    there = ~turn_rewards.isnan()
    given = turn_rewards.nan_to_num()
    steps = torch.arange(given.shape[1], dtype=given.dtype, device=given.device)
    distance = steps - steps[:, None]
    shares = torch.where(distance >= 0, gamma ** distance.clamp(min=0), 0.0)
    turns = there.sum(dim=1, keepdim=True)
    values = turns * (given @ (shares / shares.sum(dim=0)).T)
    group = numbered(group)
    size, mean, _ = group_moments(given.sum(dim=1), group)
    centered = torch.where(there, values - mean[:, None], 0.0)
    squares = centered.square().sum(dim=1) / turns[:, 0].clamp(min=1)
    std = (group_total(squares, group) / (size - 1).clamp(min=1)).sqrt()
    advantages = torch.where(size > 1, 1 / (std + eps), 0.0)[:, None] * centered
    return advantages[seq, turn]


def numbered(group: Tensor) -> Tensor:
    """Index [S] of each sequence's group, counted from 0 without gaps."""
    return torch.unique(group, return_inverse=True)[1]


def group_total(x: Tensor, group: Tensor) -> Tensor:
    """Sum [S] of x [S] over the group of each sequence; `group` [S] comes from `numbered`."""
    return segment_sum(x, group, num_segments(group))[group]


def _compare(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """(group sizes [S], rewards minus group means [S]); `group` [S] comes from `numbered`."""
    size = group_total(torch.ones_like(rewards), group)
    return size, rewards - group_total(rewards, group) / size


def group_moments(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Size, mean and unbiased standard deviation of the group of each sequence [S], of rewards [S] and `group` [S]. The
    deviation of a group of one is 0."""
    group = numbered(group)
    size = group_total(torch.ones_like(rewards), group)
    mean = group_total(rewards, group) / size
    return size, mean, (group_total((rewards - mean).square(), group) / (size - 1).clamp(min=1)).sqrt()


def group_sizes(group: Tensor) -> Tensor:
    """Number of sequences in the group of each sequence: int64 [S] from `group` [S]."""
    return group_total(torch.ones_like(group), numbered(group))


def sequence_ends(seq: Tensor) -> Tensor:
    """Bool [N], true for the last token of each sequence; `seq` [N] is non-decreasing."""
    ends = torch.ones_like(seq, dtype=torch.bool)
    torch.ne(seq[1:], seq[:-1], out=ends[:-1])
    return ends


def following(x: Tensor, ends: Tensor, last: Tensor | float = 0.0) -> Tensor:
    """x [N] of the next token of the same sequence; `last` (a number or [N]) for the last token of a sequence."""
    return torch.where(ends, last, x.roll(-1))


def backward_recurrence(a: Tensor, c: Tensor, ends: Tensor) -> Tensor:
    """x [N] with x_t = a_t + c_t x_{t+1} within a sequence, and x_t = a_t at its end. Keeps the dtype of `a`.

    Computed in float64, since a sum over thousands of tokens would lose digits in float32. The algorithm composes
    neighboring affine maps: log2(N) steps of halving size, about four passes over the data in total, independent of
    the sequence lengths.
    """
    if not len(a):
        return a.clone()
    return _solve(a.double(), c.double().masked_fill(ends, 0.0)).to(a.dtype)


def _solve(a: Tensor, c: Tensor) -> Tensor:
    """x [n] with x_t = a_t + c_t x_{t+1}, from flat tensors [n], n > 0; a coefficient of 0 separates sequences."""
    count = len(a)
    if count == 1:
        return a
    if count % 2:
        a, c = (torch.cat([x, x.new_zeros(1)]) for x in (a, c))
    first, second = a[0::2], a[1::2]
    c_first, c_second = c[0::2], c[1::2]
    a_pair = torch.addcmul(first, c_first, second).clamp_(-LIMIT, LIMIT)
    x_first = _solve(a_pair, (c_first * c_second).clamp_(-LIMIT, LIMIT))
    x_next = torch.cat([x_first[1:], x_first.new_zeros(1)])
    x_second = torch.addcmul(second, c_second, x_next).clamp_(-LIMIT, LIMIT)
    return torch.stack([x_first, x_second], dim=1).flatten()[:count]


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
