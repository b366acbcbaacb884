"""The quantities computed once per step before the first update: log-probs of other policies, values, advantages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.advantages import whiten
from asyncrl.algorithms.kl import kl_estimate
from asyncrl.algorithms.segments import segment_sum
from asyncrl.errors import InvariantError
from asyncrl.learner.algorithm import Algorithm
from asyncrl.learner.batch import Batch, MicroBatch
from asyncrl.learner.distributed import Ranks


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
            bound=self.bound,
        )


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
    if not algorithm.per_token:
        advantages = advantages[batch.seq]
    if algorithm.whiten:
        advantages = whiten(advantages, reduce=ranks.sum)
    advantages = advantages.float()
    return Estimates(
        advantages=advantages,
        returns=None if returns is None else returns.float(),
        proximal_logprobs=scores.proximal_logprobs,
        ref_logprobs=scores.ref_logprobs,
        weights=None if batch.weights is None else batch.weights[batch.seq],
        bound=_bound(algorithm, batch, scores, advantages, ranks),
        kl=None if kl is None else _mean(kl, ranks),
    )


def _bound(algorithm: Algorithm, batch: Batch, scores: Scores, advantages: Tensor, ranks: Ranks) -> Tensor | None:
    if algorithm.bound is None:
        return None
    assert scores.proximal_logprobs is not None
    return algorithm.bound(scores.proximal_logprobs - batch.behavior_logprobs, advantages, reduce=ranks.sum)


def _terms(algorithm: Algorithm, batch: Batch, scores: Scores, penalty: Tensor | None) -> dict[str, Tensor]:
    """Returns the inputs available to the advantage function, by parameter name."""
    seq = batch.seq
    rewards = batch.rewards.clone()
    if algorithm.per_sequence:
        if penalty is not None:
            rewards[: batch.num_sequences] -= segment_sum(penalty, seq, batch.num_sequences)
    else:
        token_rewards = torch.zeros(len(seq), dtype=torch.float64)
        last = torch.cumsum(torch.bincount(seq, minlength=batch.num_sequences), dim=0) - 1
        token_rewards[last] = rewards[: batch.num_sequences]
        rewards = token_rewards if penalty is None else token_rewards - penalty
    terms = {"rewards": rewards, "seq": seq, "group": batch.group, "lengths": batch.lengths.double()}
    if batch.greedy_rewards is not None:
        terms["greedy_rewards"] = batch.greedy_rewards
    elif "greedy_rewards" in algorithm.needs:
        raise InvariantError("a group reached the learner without the reward of its greedy completion")
    if scores.values is not None:
        terms["values"] = scores.values.double()
    if scores.after is not None and len(scores.after):
        terms["bootstrap"] = torch.zeros(batch.num_sequences, dtype=torch.float64)
        terms["bootstrap"][batch.ended] = scores.after.double()
    if scores.proximal_logprobs is not None:
        terms["log_ratios"] = (scores.proximal_logprobs - batch.behavior_logprobs).double()
    return terms


def _mean(x: Tensor, ranks: Ranks) -> float:
    total, count = ranks.sum(torch.stack([x.sum(), torch.tensor(float(len(x)), dtype=x.dtype)])).tolist()
    return total / max(count, 1.0)
