"""The loss of one micro-batch and its gradient with respect to the log-probs and entropies of the current
policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from asyncrl.algorithms.corrections import loglinear_proximal, opsm_mask
from asyncrl.algorithms.kl import kl_estimate
from asyncrl.algorithms.losses import PolicyTerms
from asyncrl.config.config import Config
from asyncrl.learner.advantage_step import Estimates
from asyncrl.learner.algorithm import Algorithm
from asyncrl.learner.batch import MicroBatch


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """A micro-batch's part of an update's loss; gradients are with respect to the current log-probs [N]."""

    loss: Tensor
    policy_loss: Tensor
    """The part of `loss` that is the policy's."""
    kl_loss: Tensor
    """The divergence from the reference policy in `loss`, before its coefficient; 0 without one."""
    gradient: Tensor
    """[N], gradient of `loss`; NaN at tokens whose log-probs or advantage are not finite."""
    policy_gradient: Tensor
    """[N], gradient of the sum of the policy's token losses."""
    masked: Tensor
    """[N] bool, tokens that the importance weights or the off-policy sequence mask exclude."""
    entropy_gradient: Tensor | None = None
    """[N], gradient of `loss` with respect to the entropies; None without an entropy bonus."""

    def pair(self, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs that the loss depends on, and its gradient with respect to them, as
        `TrainedModel.backward` takes them: log-probs [N], or with an entropy bonus log-probs and entropies [2, N]."""
        if self.entropy_gradient is None:
            return logprobs, self.gradient
        return torch.stack([logprobs, entropies]), torch.stack([self.gradient, self.entropy_gradient])


def token_losses(
    algorithm: Algorithm,
    config: Config,
    micro: MicroBatch,
    estimates: Estimates,
    logprobs: Tensor,
    entropies: Tensor,
    *,
    counts: dict[str, int],
    version: int,
) -> TokenLosses:
    """Returns the loss of the micro-batch at the current log-probs [N] and entropies [N], and its gradients.

    `counts` contains the denominators of the update; `version` is the version of the weights before the step.
    """
    settings = config.algorithm
    if not len(logprobs):
        # With ZeRO stage 3 all ranks must differentiate with respect to the same outputs.
        of_entropies = entropies if settings.entropy_coef else None
        masked = torch.zeros_like(logprobs, dtype=torch.bool)
        none = logprobs.sum()
        return TokenLosses(none, none, none, logprobs, logprobs, masked, of_entropies)
    leaf = logprobs.clone().requires_grad_()
    terms = PolicyTerms(
        logprobs=leaf,
        proximal_logprobs=_proximal(settings.proximal, micro, estimates, logprobs, version),
        behavior_logprobs=micro.behavior_logprobs,
        advantages=estimates.advantages,
        seq=micro.seq,
    )
    token_loss, masked = algorithm.loss(terms, bound=estimates.bound), algorithm.masks(terms)
    delta = settings.correction.mask_delta
    if delta is not None:
        kept = opsm_mask(logprobs, micro.behavior_logprobs, estimates.advantages, micro.seq, delta=delta)
        token_loss, masked = token_loss * kept, masked | (kept == 0)
    if estimates.weights is not None:
        token_loss = token_loss * estimates.weights
    aggregate = partial(algorithm.aggregate, seq=micro.seq, lengths=estimates.lengths, **counts)
    loss = policy_loss = aggregate(token_loss)
    kl_loss = torch.zeros_like(policy_loss)
    (policy_gradient,) = torch.autograd.grad(token_loss.sum(), leaf, retain_graph=True)
    if settings.kl_loss_coef:
        assert estimates.ref_logprobs is not None
        kl = kl_estimate(leaf, estimates.ref_logprobs, estimator=algorithm.kl_estimator or "k3+")
        # The gradient of the estimate is correct only for tokens of the current policy; stale tokens are reweighted.
        weights = algorithm.weights(logprobs - micro.behavior_logprobs, micro.seq)
        if estimates.weights is not None:
            weights = weights * estimates.weights
        kl_loss = aggregate(weights * kl)
        loss = policy_loss + settings.kl_loss_coef * kl_loss
    (gradient,) = torch.autograd.grad(loss, leaf)
    bonus, entropy_gradient = _entropy_bonus(aggregate, settings.entropy_coef, entropies, estimates.weights)
    inputs = torch.stack([terms.proximal_logprobs, terms.behavior_logprobs, terms.advantages])
    # Losses clamp log ratios, which would hide a non-finite input.
    gradient = gradient.masked_fill(~inputs.isfinite().all(dim=0), torch.nan)
    parts = (loss.detach() - bonus, policy_loss.detach(), kl_loss.detach())
    return TokenLosses(*parts, gradient, policy_gradient, masked, entropy_gradient)


def _entropy_bonus(
    aggregate: Callable[[Tensor], Tensor], coef: float, entropies: Tensor, weights: Tensor | None
) -> tuple[Tensor | float, Tensor | None]:
    """Returns the bonus that is subtracted from the loss, and the loss's gradient with respect to the entropies [N].
    Entropies are exact for every state, so no importance weights apply; only the states are those of stale tokens."""
    if not coef:
        return 0.0, None
    leaf = entropies.detach().requires_grad_()
    weighted = leaf if weights is None else leaf * weights
    bonus = coef * aggregate(weighted)
    (gradient,) = torch.autograd.grad(bonus, leaf)
    return bonus.detach(), -gradient


def _proximal(how: str, micro: MicroBatch, estimates: Estimates, logprobs: Tensor, version: int) -> Tensor:
    """Returns log-probs [N] of the proximal policy; the current ones if none were recomputed before the update."""
    if how == "loglinear":
        return loglinear_proximal(logprobs, micro.behavior_logprobs, micro.versions, version=version)
    return logprobs if estimates.proximal_logprobs is None else estimates.proximal_logprobs
