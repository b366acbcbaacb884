"""The quantities computed once per step before the first update: log-probs of other policies, values, advantages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.advantages import sequence_ends, whiten
from asyncrl.algorithms.corrections import segment_sum
from asyncrl.algorithms.kl import kl_estimate
from asyncrl.errors import InvariantError
from asyncrl.learner.algorithm import Algorithm
from asyncrl.learner.batch import Batch, MicroBatch
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.turns import with_remainder


@dataclass(frozen=True, slots=True)
class Scores:
    """Outputs of the models for the batch's action tokens before the first update, float32 [N] on the CPU. None where
    the algorithm does not need them."""

    proximal_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    after: Tensor | None = None
    """[C], values after the last tokens of the sequences in `Batch.ended`."""


@dataclass(frozen=True, slots=True)
class Estimates:
    """Inputs of the updates, float32 [N] on the CPU."""

    advantages: Tensor
    returns: Tensor | None
    proximal_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    weights: Tensor | None = None
    """Weights of the losses; None if all are 1."""
    lengths: Tensor | None = None
    """Number of action tokens of each token's member; None if all members have one row."""
    bound: Tensor | None = None
    """The bound of a loss in `losses.BOUNDS`, solved over the batch of all ranks."""
    kl: float | None = None
    """Mean divergence from the reference policy over the action tokens of all ranks, nats."""

    def of(self, micro: MicroBatch, device: torch.device) -> Estimates:
        """Returns the micro-batch's part on the device, for the policy: without returns."""

        def part(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[micro.span].to(device)

        return Estimates(
            advantages=self.advantages[micro.span].to(device),
            returns=None,
            proximal_logprobs=part(self.proximal_logprobs),
            ref_logprobs=part(self.ref_logprobs),
            weights=part(self.weights),
            lengths=part(self.lengths),
            bound=self.bound,
        )


_GIVEN = {
    "greedy_rewards": "the reward of its greedy completion",
    "turn": "turns: it is of no environment",
    "turn_rewards": "the rewards of turns: it is of no environment",
}
"""Terms that a group may lack, in words."""


def estimate(algorithm: Algorithm, batch: Batch, scores: Scores, ranks: Ranks, *, kl_coef: float) -> Estimates:
    """Returns advantages, and returns if there is a critic, from the rewards and the scores of the batch.

    `kl_coef` times the divergence of the proximal from the reference policy is subtracted from the rewards per token.
    A collective: all ranks call it.
    """
    kl = None
    if scores.proximal_logprobs is not None and scores.ref_logprobs is not None:
        estimator = algorithm.kl_estimator or "k1"
        kl = kl_estimate(scores.proximal_logprobs.double(), scores.ref_logprobs.double(), estimator=estimator)
    penalty = None if kl is None or not kl_coef else kl_coef * kl
    terms = _terms(algorithm, batch, scores, penalty)
    result = algorithm.advantage(reduce=ranks.sum, **terms)
    advantages, returns = result if isinstance(result, tuple) else (result, None)
    advantages = _in_batch(batch, advantages) if algorithm.per_token else advantages[batch.member_of_token]
    if algorithm.whiten:
        advantages = whiten(advantages, reduce=ranks.sum)
    advantages = advantages.float()
    return Estimates(
        advantages=advantages,
        returns=None if returns is None else _in_batch(batch, returns).float(),
        proximal_logprobs=scores.proximal_logprobs,
        ref_logprobs=scores.ref_logprobs,
        weights=None if batch.weights is None else batch.weights[batch.member_of_token],
        lengths=None if batch.order is None else batch.lengths[batch.member_of_token].float(),
        bound=_bound(algorithm, batch, scores, advantages, ranks),
        kl=None if kl is None else _mean(kl, ranks),
    )


def _bound(algorithm: Algorithm, batch: Batch, scores: Scores, advantages: Tensor, ranks: Ranks) -> Tensor | None:
    if algorithm.bound is None:
        return None
    assert scores.proximal_logprobs is not None
    return algorithm.bound(scores.proximal_logprobs - batch.behavior_logprobs, advantages, reduce=ranks.sum)


def _terms(algorithm: Algorithm, batch: Batch, scores: Scores, penalty: Tensor | None) -> dict[str, Tensor]:
    """Returns the inputs available to the advantage function, by parameter name: those of tokens by member."""
    seq = _by_member(batch, batch.member_of_token)
    terms = {"seq": seq, "group": batch.group, "lengths": batch.lengths.double()}
    turn_rewards = None
    if batch.turn is not None and batch.turn_rewards is not None:
        turn_rewards, terms["turn"] = with_remainder(batch.turn_rewards, batch.rewards), _by_member(batch, batch.turn)
        terms["turn_rewards"] = turn_rewards
        if penalty is not None:
            of_tokens = _by_member(batch, penalty)
            terms["turn_rewards"] = turn_rewards.index_put((seq, terms["turn"]), -of_tokens, accumulate=True)
    if algorithm.per_sequence:
        terms["rewards"] = batch.rewards.clone()
        if penalty is not None:
            terms["rewards"] -= segment_sum(penalty, batch.member_of_token, len(batch.rewards))
    else:
        ends = sequence_ends(seq) if turn_rewards is None else sequence_ends(seq) | sequence_ends(terms["turn"])
        token_rewards = torch.zeros(len(seq), dtype=torch.float64)
        if turn_rewards is None:
            token_rewards[ends] = batch.rewards[seq[ends]]
        else:
            token_rewards[ends] = turn_rewards[seq[ends], terms["turn"][ends]]
        terms["rewards"] = token_rewards if penalty is None else token_rewards - _by_member(batch, penalty)
    if batch.greedy_rewards is not None:
        terms["greedy_rewards"] = batch.greedy_rewards
    if scores.values is not None:
        terms["values"] = _by_member(batch, scores.values.double())
    if scores.after is not None and len(scores.after):
        terms["bootstrap"] = torch.zeros(batch.num_trained, dtype=torch.float64)
        terms["bootstrap"][batch.member[batch.ended]] = scores.after.double()
    if scores.proximal_logprobs is not None:
        log_ratios = (scores.proximal_logprobs - batch.behavior_logprobs).double()
        terms["log_ratios"] = _by_member(batch, log_ratios)
    for name, what in _GIVEN.items():
        if name in algorithm.needs and name not in terms:
            raise InvariantError(f"a group reached the learner without {what}")
    return terms


def _by_member(batch: Batch, column: Tensor) -> Tensor:
    """A column of action tokens in the order of the members."""
    return column if batch.order is None else column[batch.order]


def _in_batch(batch: Batch, column: Tensor) -> Tensor:
    """The inverse of `_by_member`."""
    return column if batch.order is None else torch.empty_like(column).index_copy(0, batch.order, column)


def _mean(x: Tensor, ranks: Ranks) -> float:
    total, count = ranks.sum(torch.stack([x.sum(), torch.tensor(float(len(x)), dtype=x.dtype)])).tolist()
    return total / max(count, 1.0)
