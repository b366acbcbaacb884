"""One step of the learner: trains the policy on a batch of trajectories and produces its next version.

The models that the algorithm needs (proximal and reference policy, critic) score the batch, and advantages are computed
once. Each of the `learner.epochs` x `learner.minibatches` optimizer updates then accumulates the gradients of its
micro-batches: forward, `token_losses`, backward. Differences from published PPO (arXiv:1707.06347):

- The batch is stale. The behavior policy, which sampled it, is up to `replay.max_staleness` versions old and may change
  within a trajectory; the engine recorded its log-probs. Losses may clip around a third policy, the proximal policy:
  the weights before the step. By default a step is one update, for which proximal and current policy are the same.
- Losses have one denominator: the tokens or sequences of the update over all micro-batches and ranks. The gradient
  therefore depends neither on packing nor on the number of ranks.
- An update whose loss or gradient is not finite on any rank is skipped on all of them. A step of which the replay queue
  has dropped every group (`replay.zero_variance: drop`) makes no update; its version has the weights of the one before.
- Baselines are computed from groups of trajectories, or by a critic, which is a separate model with its own optimizer.
  During `critic.warmup_steps` only the critic is updated; the policy's losses are computed for the metrics.
- Log-probs are at the sampling temperature. The divergence from a reference policy is added to the reward or the loss.
- An entropy bonus is the entropy of the distribution at the sampling temperature, aggregated as the loss is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.config import Config
from asyncrl.learner.advantage_step import Estimates, Scores, estimate
from asyncrl.learner.algorithm import Algorithm
from asyncrl.learner.batch import Batch, MicroBatch
from asyncrl.learner.checkpoint.files import Files, bytes_file, model_files, step_of, tensors_file
from asyncrl.learner.checkpoint.zero_state import random_state, restore_random_state, restore_state, seed_random_state
from asyncrl.learner.critic.value_function import Critic, ValueFunction
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.divergence_bound import DivergenceBound
from asyncrl.learner.metrics.batch import batch_metrics
from asyncrl.learner.metrics.flops import ModelFlops
from asyncrl.learner.metrics.phases import PhaseTimer
from asyncrl.learner.metrics.step import StepMetrics
from asyncrl.learner.mismatch_check import MismatchCheck
from asyncrl.learner.model.policy import Policy, Reference
from asyncrl.learner.model.states import states_of, tensors_of
from asyncrl.learner.token_losses import token_losses
from asyncrl.learner.update import (
    Minibatch,
    broken_names,
    learning_rate,
    may_be_empty,
    name_together,
    plan_updates,
    skip_if_not_finite,
    sync_microbatches,
)


class Update(NamedTuple):
    """One optimizer update that was not skipped."""

    grad_norm: float
    """Norm of the gradient before clipping."""
    lr: float


class Trainer:
    """The models, the algorithm and the training state of one learner rank. All ranks call every method together."""

    def __init__(self, config: Config, ranks: Ranks, algorithm: Algorithm, critic: ValueFunction | None = None) -> None:
        """Loads the policy. `critic` is required if the algorithm needs one."""
        self.config = config
        self.ranks, self.data_ranks = ranks, ranks.of_data
        self.algorithm = algorithm
        self.policy = Policy(config, ranks)
        self.critic = critic
        self.mismatch_check: MismatchCheck | None = None
        """Compares log-probs with the run's engines in the first steps; None after it has concluded, or if the run has
        no engines."""
        self.before_update: Callable[[], None] = lambda: None
        """Called before the policy's weights change."""
        self.phases = PhaseTimer(ranks)
        """The seconds of the phases of a step, which the loop reads."""
        self._flops = ModelFlops.of(self.policy.model)
        self._reference: Reference | None = None
        """With adapters the reference policy is the policy without them, otherwise a model of its own."""
        self.divergence_bound = DivergenceBound(config, ranks.of_data)

    def train(self, batch: Batch, *, step: int) -> dict[str, float]:
        """Trains version `step` - 1 of the policy on this rank's batch, which results in version `step`. Returns the
        finite metrics over all ranks.

        Raises RunError on all ranks after more than MAX_SKIPPED_UPDATES skipped updates in a row.
        """
        settings, device = self.config.learner, self.ranks.device
        minibatches = sync_microbatches(
            batch.minibatches, batch.num_members, self.data_ranks, step, may_be_empty=may_be_empty(self.config)
        )
        if not any(minibatch.num_tokens for minibatch in minibatches):
            return {"learner/tokens": 0.0, "learner/skipped_updates": 0.0}
        scores = self._score(batch, minibatches, step)
        phase = self.phases.phase
        with phase("advantage"):
            estimates = estimate(
                self.algorithm, batch, scores, self.data_ranks, kl_coef=self.config.algorithm.kl_reward_coef
            )
        if self.critic is not None:
            assert estimates.returns is not None
            with phase("critic"):
                self.critic.train(estimates.returns)
        culprits = self._find_culprits(batch, scores)
        warmup = self.critic is not None and step <= self.config.critic.warmup_steps
        total = self._new_metrics(step)
        updates: list[Update] = []
        scheduled = learning_rate(step, settings, steps=self.config.steps)
        planned = plan_updates(minibatches, epochs=settings.epochs)
        for number, minibatch in enumerate(planned):
            metrics = self._new_metrics(step)
            finite: list[Tensor] = []
            for micro, last in minibatch.on(device):
                own = estimates.of(micro, device)
                with phase("forward"):
                    logprobs, entropies = self.policy.score(micro) if warmup else self.policy.forward(micro)
                    current, spread, counts = logprobs.detach(), entropies.detach(), minibatch.counts
                    losses = token_losses(
                        self.algorithm, self.config, micro, own, current, spread, counts=counts, version=step - 1
                    )
                metrics.add(micro, losses, current, spread, own.advantages)
                if number == 0:  # later updates start from other weights
                    self.divergence_bound.add(micro, current, version=step - 1)
                    if self.mismatch_check is not None:
                        self.mismatch_check.add(micro, current, version=step - 1)
                if not warmup:
                    finite.append(current.isfinite() & losses.gradient.isfinite())
                    with phase("backward"):
                        self.policy.backward(*losses.pair(logprobs, entropies), last=last)
            if not warmup:
                with phase("optimizer"):
                    norm = self.policy.gradient_norm()
                if skip_if_not_finite(self.policy, minibatch, finite, norm, step, "learner.lr", culprits):
                    continue
                lr = self.divergence_bound.rate(scheduled)
                self.before_update()
                with phase("optimizer"):
                    self.policy.step(lr=lr, max_grad_norm=settings.max_grad_norm, grad_norm=norm)
                updates.append(Update(norm, lr))
            total.join(metrics)
        if self.mismatch_check is not None and self.mismatch_check.conclude(step):
            self.mismatch_check = None
        skipped = 0 if warmup else len(planned) - len(updates)
        metrics = self._describe(total, updates, skipped, minibatches, estimates, counted=len(planned) - skipped)
        metrics |= self.divergence_bound.end_step([update.lr for update in updates], scheduled)
        metrics["learner/flops"] = self._count_flops(batch, scores, warmup=warmup)
        return metrics | batch_metrics(batch, estimates.advantages, self.data_ranks)

    def tensors(self) -> Iterator[Tensor]:
        """Yields what the models of this rank have in memory; a tensor may come several times."""
        yield from states_of(self.policy)
        if isinstance(self.critic, Critic):
            yield from states_of(self.critic.model)
        if self._reference is not None:
            yield from tensors_of(self._reference.network)

    def snapshot(self, folder: Path) -> Files:
        """Returns this rank's files of the checkpoint in `folder`, copied to the CPU. All ranks call it."""
        rank = self.ranks.rank
        files = model_files(self.policy, "policy")
        files[f"random/rank-{rank}.safetensors"] = tensors_file(random_state())
        if rank == 0:
            state = {"divergence_bound": self.divergence_bound.state()}
            files["trainer.json"] = bytes_file(json.dumps(state).encode())
        return files | (self.critic.snapshot(folder) if self.critic is not None else {})

    def restore(self, folder: Path) -> None:
        """Loads the state from the checkpoint. Raises RunError if it belongs to another model."""
        restore_state(self.policy, folder / "policy")
        if self.critic is not None:
            self.critic.restore(folder)
        state = json.loads((folder / "trainer.json").read_text())
        self.divergence_bound.restore(state["divergence_bound"])
        states = folder / "random" / f"rank-{self.ranks.rank}.safetensors"
        if states.exists():
            restore_random_state(load_file(states))
        else:  # the checkpoint was written by fewer ranks
            seed_random_state(self.config.seed, step_of(folder), self.ranks.rank)

    def _score(self, batch: Batch, minibatches: list[Minibatch], step: int) -> Scores:
        """Returns the batch's scores by each model that the algorithm needs."""
        algorithm, settings, updates = self.algorithm, self.config.algorithm, self.config.learner.updates
        wants_reference = settings.kl_loss_coef > 0 or settings.kl_reward_coef > 0
        recomputes = "proximal_logprobs" in algorithm.needs and settings.proximal == "recompute" and updates > 1
        wants_proximal = recomputes or wants_reference or "log_ratios" in algorithm.needs or algorithm.bound is not None
        if wants_reference and self._reference is None and self.policy.adapters is None:
            self._reference = Reference(self.config, self.ranks)
        micro_batches = [micro for minibatch in minibatches for micro in minibatch.micro_batches]
        phase, proximal, ref, values = self.phases.phase, None, None, None
        if self.critic is not None:
            with phase("values"):
                values = self.critic.values(batch, step)
        if wants_proximal:
            with phase("proximal"):
                proximal = self._join(self.policy.logprobs, micro_batches)
        if wants_reference:
            with phase("reference"):
                score = self.policy.base_logprobs if self._reference is None else self._reference.logprobs
                ref = self._join(score, micro_batches)
        return Scores(
            proximal_logprobs=proximal,
            ref_logprobs=ref,
            values=None if values is None else values[: batch.num_tokens],
            after=None if values is None else values[batch.num_tokens :],
        )

    def _join(self, score: Callable[[MicroBatch], Tensor], micro_batches: list[MicroBatch]) -> Tensor:
        return torch.cat([score(micro.to(self.ranks.device)) for micro in micro_batches]).cpu()

    def _new_metrics(self, step: int) -> StepMetrics:
        algorithm = self.algorithm
        with_kl = self.config.algorithm.kl_loss_coef > 0
        return StepMetrics(
            step - 1, algorithm.correction_level, algorithm.correction_cap, self.ranks.device, with_kl=with_kl
        )

    def _count_flops(self, batch: Batch, scores: Scores, *, warmup: bool) -> float:
        """Returns the floating-point operations of the policy in the step, of all ranks."""
        passes = (1 if warmup else 3 if self.policy.adapters is None else 2) * self.config.learner.epochs
        passes += sum(column is not None for column in (scores.proximal_logprobs, scores.ref_logprobs))
        own = self._flops.step(batch, passes=passes)
        return float(self.data_ranks.sum(torch.tensor([own], dtype=torch.float64)))

    def _find_culprits(self, batch: Batch, scores: Scores) -> str:
        """Returns a text naming the trajectories of all ranks whose own log-probs or values are not finite. Through the
        advantages they also make the losses of other trajectories non-finite."""
        given = (batch.behavior_logprobs, scores.proximal_logprobs, scores.ref_logprobs, scores.values)
        finite = torch.stack([column.isfinite() for column in given if column is not None]).all(dim=0)
        names = [name for micro in batch.micro_batches for name in broken_names(micro, finite[micro.span])]
        return name_together(names, self.data_ranks)

    def _describe(
        self,
        total: StepMetrics,
        updates: list[Update],
        skipped: int,
        minibatches: list[Minibatch],
        estimates: Estimates,
        *,
        counted: int,
    ) -> dict[str, float]:
        """Returns the finite metrics of the step, whose `total` is of `counted` updates. Waits for the critic, whose
        metrics are included."""
        metrics = total.reduce(self.data_ranks, updates=counted)
        metrics["learner/tokens"] = float(sum(minibatch.num_tokens for minibatch in minibatches))
        metrics["learner/skipped_updates"] = float(skipped)
        if counted:
            metrics["learner/grad_norm"] = sum(update.grad_norm for update in updates) / max(len(updates), 1)
            metrics["learner/lr"] = sum(update.lr for update in updates) / max(len(updates), 1)
        if estimates.kl is not None:
            metrics["kl/reference"] = estimates.kl
        if self.critic is not None:
            with self.phases.phase("critic"):
                metrics |= self.critic.finish()
        return {name: value for name, value in metrics.items() if math.isfinite(value)}
