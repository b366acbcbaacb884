"""One training step: what the models say of the batch, advantages, and the updates of policy and critic."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.algorithms.corrections import loglinear_proximal, opsm_mask
from asyncrl.algorithms.kl import AdaptiveKL, FixedKL, kl_estimate
from asyncrl.algorithms.losses import PolicyTerms
from asyncrl.config import Config
from asyncrl.learner.advantage_step import Estimates, Scores, estimate
from asyncrl.learner.algorithm import Algorithm
from asyncrl.learner.batch import Batch, MicroBatch
from asyncrl.learner.checkpoint.files import Files, bytes_file, model_files, tensors_file
from asyncrl.learner.checkpoint.zero_state import random_state, restore_random_state, restore_state
from asyncrl.learner.critic import ValueFunction
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.metrics import StepMetrics
from asyncrl.learner.mismatch_check import MismatchCheck
from asyncrl.learner.policy import Policy, Reference
from asyncrl.learner.update import Minibatch, broken_names, learning_rate, name_together, sync_microbatches, update


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """A micro-batch's part of an update's loss; gradients are with respect to the current log-probs [N]."""

    loss: Tensor
    gradient: Tensor
    """[N], of `loss`; NaN at tokens whose log-probs or advantage are not finite."""
    policy_gradient: Tensor
    """[N], of the sum of the policy's token losses."""
    masked: Tensor
    """[N] bool: tokens that the importance weights or the off-policy sequence mask leave out."""


class Trainer:
    """What one learner rank trains with; every method is called by all ranks."""

    def __init__(self, config: Config, ranks: Ranks, algorithm: Algorithm, critic: ValueFunction | None = None) -> None:
        """Loads the policy. `critic` must be given when the algorithm needs one."""
        self.config = config
        self.ranks = ranks
        self.algorithm = algorithm
        self.policy = Policy(config, ranks)
        self.critic = critic
        self.mismatch_check: MismatchCheck | None = None
        """Set where engines of this run sample what is trained, and until it has concluded."""
        self._reference: Reference | None = None
        settings = config.algorithm
        self.kl_control: FixedKL | AdaptiveKL = FixedKL(settings.kl_reward_coef)
        if settings.kl_target is not None:
            self.kl_control = AdaptiveKL(settings.kl_reward_coef, settings.kl_target, settings.kl_horizon)
        self._updates = config.learner.epochs * config.learner.minibatches

    def train(self, batch: Batch, *, step: int) -> dict[str, float]:
        """Trains version step - 1 into version `step` on this rank's batch. Returns the metrics of all ranks; those
        that are not finite are left out.

        Denominators are those of a complete update over all ranks, known before its first backward. An update whose
        loss or gradient is not finite is skipped on all ranks; RunError is raised on all of them after
        `learner.max_skipped_updates` in a row.
        """
        settings = self.config.learner
        minibatches = sync_microbatches(batch, self.ranks, step)
        scores = self._score(batch, minibatches, step)
        estimates = estimate(self.algorithm, batch, scores, self.ranks, kl_coef=self.kl_control.coef)
        if self.critic is not None:
            assert estimates.returns is not None
            self.critic.train(estimates.returns)
        bound = self._bound(batch, estimates)
        culprits = self._find_culprits(batch, scores)
        rates: list[float] = []
        norms: list[float] = []
        skipped = 0
        total = self._tally(step)
        for number, minibatch in enumerate(minibatches * settings.epochs):
            tally = self._tally(step)
            # Later ones are scored with weights that no engine has.
            check = self.mismatch_check if number == 0 else None
            part = _PolicyPart(self, minibatch, estimates, bound, tally, step, check)
            if step <= self.config.critic.warmup_steps and self.critic is not None:
                part.look()
                total.join(tally)
                continue

            def lr(tally: StepMetrics = tally) -> float:
                scale = tally.ess(self.ranks) ** 0.5 if settings.ess_scaled_lr else 1.0
                rates.append(scale * learning_rate(step, settings, steps=self.config.steps))
                return rates[-1]

            norm = update(
                self.policy, minibatch, part, step=step, lr=lr, settings=settings, key="learner.lr", culprits=culprits
            )
            if norm is None:
                skipped += 1
            else:
                norms.append(norm)
                total.join(tally)
        self._compare_with_engine(step)
        metrics = total.reduce(self.ranks, updates=self._updates - skipped)
        metrics["learner/tokens"] = float(sum(minibatch.num_tokens for minibatch in minibatches))
        metrics["learner/skipped_updates"] = float(skipped)
        if skipped < self._updates:
            metrics["learner/grad_norm"] = sum(norms) / max(len(norms), 1)
            metrics["learner/lr"] = sum(rates) / max(len(rates), 1)
        metrics |= self._control_kl(estimates, sum(minibatch.num_sequences for minibatch in minibatches))
        metrics |= self.critic.finish() if self.critic is not None else {}
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _compare_with_engine(self, step: int) -> None:
        if self.mismatch_check is not None and self.mismatch_check.conclude(step):
            self.mismatch_check = None

    def snapshot(self, folder: Path) -> Files:
        """What this rank writes of its state into the checkpoint in `folder`, copied to the CPU."""
        rank = self.ranks.rank
        files = model_files(self.policy, "policy", tokenizer=self.config.model.path)
        files[f"random/rank-{rank}.safetensors"] = tensors_file(random_state())
        if rank == 0:
            files["trainer.json"] = bytes_file(json.dumps({"kl_reward_coef": self.kl_control.coef}).encode())
        return files | (self.critic.snapshot(folder) if self.critic is not None else {})

    def restore(self, folder: Path) -> None:
        """Takes over the state in the checkpoint. Raises RunError when it is of another model."""
        restore_state(self.policy, folder / "policy")
        if self.critic is not None:
            self.critic.restore(folder)
        if isinstance(self.kl_control, AdaptiveKL):
            self.kl_control.coef = json.loads((folder / "trainer.json").read_text())["kl_reward_coef"]
        states = folder / "random" / f"rank-{self.ranks.rank}.safetensors"
        if states.exists():  # there is none when there were fewer ranks
            restore_random_state(load_file(states))

    def _score(self, batch: Batch, minibatches: list[Minibatch], step: int) -> Scores:
        """One look at the batch by each model that the algorithm asks for."""
        algorithm, settings = self.algorithm, self.config.algorithm
        wants_reference = settings.kl_loss_coef > 0 or settings.kl_reward_coef > 0
        recomputes = "proximal_logprobs" in algorithm.needs and settings.proximal == "recompute" and self._updates > 1
        wants_proximal = recomputes or wants_reference or "log_ratios" in algorithm.needs or algorithm.bound is not None
        if wants_reference and self._reference is None:
            self._reference = Reference(self.config, self.ranks)
        reference = self._reference if wants_reference else None
        micro_batches = [micro.to(self.ranks.device) for minibatch in minibatches for micro in minibatch.micro_batches]
        values = self.critic.values(batch, step) if self.critic is not None else None
        return Scores(
            proximal_logprobs=self._join(self.policy.logprobs, micro_batches) if wants_proximal else None,
            ref_logprobs=self._join(reference.logprobs, micro_batches) if reference is not None else None,
            values=None if values is None else values[: batch.num_tokens],
            after=None if values is None else values[batch.num_tokens :],
        )

    @staticmethod
    def _join(score: Callable[[MicroBatch], Tensor], micro_batches: list[MicroBatch]) -> Tensor:
        return torch.cat([score(micro).cpu() for micro in micro_batches])

    def _bound(self, batch: Batch, estimates: Estimates) -> Tensor | None:
        """The bound of a loss that has one for the whole batch."""
        if self.algorithm.bound is None:
            return None
        assert estimates.proximal_logprobs is not None
        log_ratios = estimates.proximal_logprobs - batch.behavior_logprobs
        return self.algorithm.bound(log_ratios, estimates.advantages, reduce=self.ranks.sum)

    def _tally(self, step: int) -> StepMetrics:
        algorithm = self.algorithm
        return StepMetrics(step - 1, algorithm.correction_level, algorithm.correction_cap, self.ranks.device)

    def _find_culprits(self, batch: Batch, scores: Scores) -> str:
        """The trajectories of all ranks whose own log-probs or values are not finite, as text. Advantages spread them
        over others."""
        given = (batch.behavior_logprobs, scores.proximal_logprobs, scores.ref_logprobs, scores.values)
        finite = torch.stack([column.isfinite() for column in given if column is not None]).all(dim=0)
        names = [name for micro in batch.micro_batches for name in broken_names(micro, finite[micro.span])]
        return name_together(names, self.ranks)

    def _control_kl(self, estimates: Estimates, num_sequences: int) -> dict[str, float]:
        if estimates.kl is None:
            return {}
        metrics = {"kl/reference": estimates.kl}
        if self.kl_control.coef:
            metrics["kl/reward_coef"] = self.kl_control.coef
        if math.isfinite(estimates.kl):
            self.kl_control.update(estimates.kl, num_sequences)
        return metrics


@dataclass(frozen=True, slots=True)
class _PolicyPart:
    """The policy's part of an update, micro-batch by micro-batch."""

    trainer: Trainer
    minibatch: Minibatch
    estimates: Estimates
    bound: Tensor | None
    tally: StepMetrics
    step: int
    check: MismatchCheck | None

    def __call__(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        logprobs, entropies = self.trainer.policy.forward(micro)
        return logprobs, self._losses(micro, logprobs.detach(), entropies).gradient

    def look(self) -> None:
        """Counts what an update would do, and does nothing."""
        for micro in self.minibatch.micro_batches:
            micro = micro.to(self.trainer.ranks.device)
            self._losses(micro, *self.trainer.policy.score(micro))

    def _losses(self, micro: MicroBatch, logprobs: Tensor, entropies: Tensor) -> TokenLosses:
        estimates = self.estimates.of(micro, logprobs.device)
        counts = {"num_tokens": self.minibatch.num_tokens, "num_sequences": self.minibatch.num_sequences}
        losses = token_losses(
            self.trainer.algorithm,
            self.trainer.config,
            micro,
            estimates,
            logprobs,
            counts=counts,
            version=self.step - 1,
            bound=self.bound,
        )
        self.tally.add(
            micro,
            loss=losses.loss,
            logprobs=logprobs,
            entropies=entropies,
            advantages=estimates.advantages,
            token_gradient=losses.policy_gradient,
            masked=losses.masked,
        )
        if self.check is not None:
            self.check.add(micro, logprobs, version=self.step - 1)
        return losses


def token_losses(
    algorithm: Algorithm,
    config: Config,
    micro: MicroBatch,
    estimates: Estimates,
    logprobs: Tensor,
    *,
    counts: dict[str, int],
    version: int,
    bound: Tensor | None,
) -> TokenLosses:
    """The loss of the micro-batch at current log-probs [N], and its gradients.

    `counts` are the denominators of the update, `version` is that of the weights before the step.
    """
    if not len(logprobs):
        return TokenLosses(logprobs.sum(), logprobs, logprobs, torch.zeros_like(logprobs, dtype=torch.bool))
    settings = config.algorithm
    leaf = logprobs.clone().requires_grad_()
    terms = PolicyTerms(
        logprobs=leaf,
        proximal_logprobs=_proximal(settings.proximal, micro, estimates, logprobs, version),
        behavior_logprobs=micro.behavior_logprobs,
        advantages=estimates.advantages,
        seq=micro.seq,
    )
    token_loss, masked = algorithm.loss(terms, bound=bound), algorithm.masks(terms)
    if settings.offpolicy_mask_delta is not None:
        kept = opsm_mask(
            logprobs, micro.behavior_logprobs, estimates.advantages, micro.seq, delta=settings.offpolicy_mask_delta
        )
        token_loss, masked = token_loss * kept, masked | (kept == 0)
    loss = algorithm.aggregate(token_loss, micro.seq, **counts)
    (policy_gradient,) = torch.autograd.grad(token_loss.sum(), leaf, retain_graph=True)
    if settings.kl_loss_coef:
        assert estimates.ref_logprobs is not None
        kl = kl_estimate(leaf, estimates.ref_logprobs, estimator=algorithm.kl_estimator or "k3+")
        # Its gradient is that of the current policy's divergence on that policy's own tokens only.
        weights = algorithm.weights(logprobs - micro.behavior_logprobs, micro.seq)
        loss = loss + settings.kl_loss_coef * algorithm.aggregate(weights * kl, micro.seq, **counts)
    (gradient,) = torch.autograd.grad(loss, leaf)
    given = torch.stack([terms.proximal_logprobs, terms.behavior_logprobs, terms.advantages])
    # Log ratios are clamped, and so would make a number of one that is not.
    gradient = gradient.masked_fill(~given.isfinite().all(dim=0), torch.nan)
    return TokenLosses(loss.detach(), gradient, policy_gradient, masked)


def _proximal(how: str, micro: MicroBatch, estimates: Estimates, logprobs: Tensor, version: int) -> Tensor:
    """Log-probs [N] of the proximal policy; the current ones where the step has one update."""
    if how == "loglinear":
        return loglinear_proximal(logprobs, micro.behavior_logprobs, micro.versions, version=version)
    return logprobs if estimates.proximal_logprobs is None else estimates.proximal_logprobs
