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
- An entropy bonus is the entropy of the distribution at the sampling temperature, aggregated as the loss is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.algorithms.advantages import sequence_ends, whiten
from asyncrl.algorithms.corrections import loglinear_proximal, opsm_mask, segment_sum
from asyncrl.algorithms.kl import kl_estimate
from asyncrl.algorithms.losses import PolicyTerms
from asyncrl.colocate import states_of, tensors_of
from asyncrl.config.config import Config
from asyncrl.errors import InvariantError
from asyncrl.learner.algorithm import Algorithm
from asyncrl.learner.batch import Batch, MicroBatch
from asyncrl.learner.checkpoint import Files, bytes_file, step_of, tensors_file
from asyncrl.learner.critic import Critic, RemoteCritic
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.learning_rate import DivergenceBound, learning_rate
from asyncrl.learner.metrics import ModelFlops, PhaseTimer, StepMetrics, batch_metrics
from asyncrl.learner.model.model_checks import MismatchCheck
from asyncrl.learner.model.policy import Policy, Reference
from asyncrl.learner.model.saving import (
    collect_state,
    exported_files,
    random_state,
    restore_random_state,
    restore_state,
    seed_random_state,
)
from asyncrl.learner.update import (
    Minibatch,
    TokenLosses,
    may_be_empty,
    name_broken,
    plan_updates,
    skip_if_not_finite,
    sync_microbatches,
)

_REQUIRED = {
    "greedy_rewards": "the reward of its greedy completion",
    "turn": "turns: it is of no environment",
    "turn_rewards": "the rewards of turns: it is of no environment",
}
"""Terms that a group may lack, in words."""


class Trainer:
    """The models, the algorithm and the training state of one learner rank. All ranks call every method together."""

    def __init__(
        self, config: Config, ranks: Ranks, algorithm: Algorithm, critic: Critic | RemoteCritic | None = None
    ) -> None:
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
        """With adapters the reference policy is the policy without them, otherwise a separate model."""
        self.divergence_bound = DivergenceBound(config, ranks.of_data)

    def train(self, batch: Batch, *, step: int) -> dict[str, float]:
        """Trains version `step` - 1 of the policy on this rank's batch, which results in version `step`. Returns the
        finite metrics over all ranks.

        Raises RunError on all ranks after more than MAX_SKIPPED_UPDATES skipped updates in a row.
        """
        settings, device, phase = self.config.learner, self.ranks.device, self.phases.phase
        minibatches = sync_microbatches(
            batch.minibatches, batch.num_members, self.data_ranks, step, may_be_empty=may_be_empty(self.config)
        )
        if not any(minibatch.num_tokens for minibatch in minibatches):
            return {"learner/tokens": 0.0, "learner/skipped_updates": 0.0}
        scores = self._score(batch, minibatches, step)
        find_culprits = partial(self._find_culprits, batch, scores)
        with phase("advantage"):
            estimates = estimate(self.algorithm, batch, scores, self.data_ranks)
        if self.critic is not None:
            assert estimates.returns is not None
            with phase("critic"):
                self.critic.train(estimates.returns)
        warmup = self.critic is not None and step <= self.config.critic.warmup_steps
        scheduled = learning_rate(step, settings, steps=self.config.steps)
        planned = plan_updates(minibatches, epochs=settings.epochs)
        total, norms, rates, skipped = self._new_metrics(step), [], [], 0
        for number, minibatch in enumerate(planned):
            metrics = self._new_metrics(step)
            finite: list[Tensor] = []
            for micro, last in minibatch.on(device):
                part = estimates.of(micro, device)
                with phase("forward"):
                    logprobs, entropies = self.policy.score(micro) if warmup else self.policy.forward(micro)
                    current, spread, counts = logprobs.detach(), entropies.detach(), minibatch.counts
                    losses = token_losses(self.algorithm, micro, part, current, spread, counts=counts, version=step - 1)
                metrics.add(micro, losses, current, spread, part.advantages)
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
                if skip_if_not_finite(
                    self.policy, minibatch, finite, norm, step, "learner.lr", find_culprits=find_culprits
                ):
                    skipped += 1
                    continue
                norms.append(norm)
                rates.append(self.divergence_bound.rate(scheduled))
                self.before_update()
                with phase("optimizer"):
                    self.policy.step(lr=rates[-1], max_grad_norm=settings.max_grad_norm, grad_norm=norm)
            total.join(metrics)
        if self.mismatch_check is not None and self.mismatch_check.conclude(step):
            self.mismatch_check = None
        counted = len(planned) - skipped
        result = total.reduce(self.data_ranks, updates=counted)
        result["learner/tokens"] = float(sum(minibatch.num_tokens for minibatch in minibatches))
        result["learner/skipped_updates"] = float(skipped)
        if counted:
            result["learner/grad_norm"] = sum(norms) / max(len(norms), 1)
            result["learner/lr"] = sum(rates) / max(len(rates), 1)
        if estimates.kl is not None:
            result["kl/reference"] = estimates.kl
        if self.critic is not None:
            with phase("critic"):
                result |= self.critic.finish()
        result = {name: value for name, value in result.items() if math.isfinite(value)}
        result |= self.divergence_bound.end_step(rates, scheduled)
        result["learner/flops"] = self._count_flops(batch, scores, warmup=warmup)
        return result | batch_metrics(batch, estimates.advantages, self.data_ranks)

    def tensors(self) -> Iterator[Tensor]:
        """Yields what the models of this rank have in memory; a tensor may come several times."""
        yield from states_of(self.policy)
        if self.critic is not None and self.critic.model is not None:
            yield from states_of(self.critic.model)
        if self._reference is not None:
            yield from tensors_of(self._reference.network)

    def snapshot(self, folder: Path) -> Files:
        """Returns this rank's files of the checkpoint in `folder`, copied to the CPU. All ranks call it."""
        rank = self.ranks.rank
        files = exported_files(self.policy, "model")
        files[f"policy/rank-{rank}.safetensors"] = tensors_file(collect_state(self.policy))
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

    def _score(self, batch: Batch, minibatches: list[Minibatch], step: int) -> ModelScores:
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
        return ModelScores(
            proximal_logprobs=proximal,
            ref_logprobs=ref,
            values=None if values is None else values[: batch.num_tokens],
            after=None if values is None else values[batch.num_tokens :],
        )

    def _join(self, score: Callable[[MicroBatch], Tensor], micro_batches: list[MicroBatch]) -> Tensor:
        return torch.cat([score(micro.to(self.ranks.device)) for micro in micro_batches]).cpu()

    def _new_metrics(self, step: int) -> StepMetrics:
        return StepMetrics(step - 1, self.config.algorithm, self.ranks.device)

    def _count_flops(self, batch: Batch, scores: ModelScores, *, warmup: bool) -> float:
        """Returns the floating-point operations of the policy in the step, of all ranks."""
        passes = (1 if warmup else 3 if self.policy.adapters is None else 2) * self.config.learner.epochs
        passes += sum(column is not None for column in (scores.proximal_logprobs, scores.ref_logprobs))
        return float(self.data_ranks.sum(torch.tensor([self._flops.step(batch, passes=passes)], dtype=torch.float64)))

    def _find_culprits(self, batch: Batch, scores: ModelScores) -> str:
        """Returns a text with the trajectories of all ranks whose log-probs or values are not finite: through the
        advantages they also make the losses of other trajectories non-finite."""
        columns = (batch.behavior_logprobs, scores.proximal_logprobs, scores.ref_logprobs, scores.values)
        finite = torch.stack([column.isfinite() for column in columns if column is not None]).all(dim=0)
        micro_batches = batch.micro_batches
        return name_broken(micro_batches, [finite[micro.span] for micro in micro_batches], self.data_ranks)


@dataclass(frozen=True, slots=True)
class ModelScores:
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

        names = ("proximal_logprobs", "ref_logprobs", "lengths")
        parts = {name: part(getattr(self, name)) for name in names}
        return replace(self, advantages=self.advantages[micro.span].to(device), returns=None, **parts)


def estimate(algorithm: Algorithm, batch: Batch, scores: ModelScores, ranks: Ranks) -> Estimates:
    """Returns advantages, and returns if there is a critic, from the rewards and the scores of the batch.

    `kl_reward_coef` times the divergence of the proximal from the reference policy is subtracted from the rewards per
    token. A collective: all ranks call it.
    """
    settings, kl = algorithm.settings, None
    if scores.proximal_logprobs is not None and scores.ref_logprobs is not None:
        estimator = settings.kl_estimator or "k1"
        kl = kl_estimate(scores.proximal_logprobs.double(), scores.ref_logprobs.double(), estimator=estimator)
    penalty = None if kl is None or not settings.kl_reward_coef else settings.kl_reward_coef * kl
    terms = _terms(algorithm, batch, scores, penalty)
    result = algorithm.advantage(terms, reduce=ranks.sum, bootstrap=terms.get("bootstrap"))
    advantages, returns = result if isinstance(result, tuple) else (result, None)
    advantages = _in_batch(batch, advantages) if algorithm.per_token else advantages[batch.member_of_token]
    if settings.whiten:
        advantages = whiten(advantages, reduce=ranks.sum)
    advantages = advantages.float()
    bound = mean_kl = None
    if algorithm.bound is not None:
        assert scores.proximal_logprobs is not None
        bound = algorithm.bound(scores.proximal_logprobs - batch.behavior_logprobs, advantages, reduce=ranks.sum)
    if kl is not None:
        total, count = ranks.sum(torch.stack([kl.sum(), torch.tensor(float(len(kl)), dtype=kl.dtype)])).tolist()
        mean_kl = total / max(count, 1.0)
    return Estimates(
        advantages=advantages,
        returns=None if returns is None else _in_batch(batch, returns).float(),
        proximal_logprobs=scores.proximal_logprobs,
        ref_logprobs=scores.ref_logprobs,
        lengths=None if batch.order is None else batch.lengths[batch.member_of_token].float(),
        bound=bound,
        kl=mean_kl,
    )


def _terms(algorithm: Algorithm, batch: Batch, scores: ModelScores, penalty: Tensor | None) -> dict[str, Tensor]:
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
    for name, text in _REQUIRED.items():
        if name in algorithm.needs and name not in terms:
            raise InvariantError(f"a group reached the learner without {text}")
    return terms


def with_remainder(turn_rewards: Tensor, rewards: Tensor) -> Tensor:
    """The rewards of turns [M, T], NaN where there is no turn, with the rest of a member's reward [M] added to its last
    turn: the reward of the complete episode, and penalties. Members without a turn stay as they are."""
    turns = turn_rewards.isfinite().sum(dim=1)
    rows = torch.arange(len(rewards))[turns > 0]
    last = turns[rows] - 1
    complete = turn_rewards.clone()
    complete[rows, last] += rewards[rows] - turn_rewards.nansum(dim=1)[rows]
    return complete


def _by_member(batch: Batch, column: Tensor) -> Tensor:
    return column if batch.order is None else column[batch.order]


def _in_batch(batch: Batch, column: Tensor) -> Tensor:
    return column if batch.order is None else torch.empty_like(column).index_copy(0, batch.order, column)


def token_losses(
    algorithm: Algorithm,
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
    settings = algorithm.settings
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
        trained = opsm_mask(logprobs, micro.behavior_logprobs, estimates.advantages, micro.seq, delta=delta)
        token_loss, masked = token_loss * trained, masked | (trained == 0)
    aggregate = partial(algorithm.aggregate, seq=micro.seq, lengths=estimates.lengths, **counts)
    loss = policy_loss = aggregate(token_loss)
    kl_loss = torch.zeros_like(policy_loss)
    (policy_gradient,) = torch.autograd.grad(token_loss.sum(), leaf, retain_graph=True)
    if settings.kl_loss_coef:
        assert estimates.ref_logprobs is not None
        kl = kl_estimate(leaf, estimates.ref_logprobs, estimator=settings.kl_estimator or "k3+")
        # The gradient of the estimate is correct only for tokens of the current policy; stale tokens are reweighted.
        weights = algorithm.weights(logprobs - micro.behavior_logprobs, micro.seq)
        kl_loss = aggregate(weights * kl)
        loss = policy_loss + settings.kl_loss_coef * kl_loss
    (gradient,) = torch.autograd.grad(loss, leaf)
    bonus, entropy_gradient = _entropy_bonus(aggregate, settings.entropy_coef, entropies)
    inputs = torch.stack([terms.proximal_logprobs, terms.behavior_logprobs, terms.advantages])
    # Losses clamp log ratios, which would hide a non-finite input.
    gradient = gradient.masked_fill(~inputs.isfinite().all(dim=0), torch.nan)
    parts = (loss.detach() - bonus, policy_loss.detach(), kl_loss.detach())
    return TokenLosses(*parts, gradient, policy_gradient, masked, entropy_gradient)


def _entropy_bonus(
    aggregate: Callable[[Tensor], Tensor], coef: float, entropies: Tensor
) -> tuple[Tensor | float, Tensor | None]:
    """Returns the bonus that is subtracted from the loss, and the loss's gradient with respect to the entropies [N].
    Entropies are exact for every state, so no importance weights apply; only the states are those of stale tokens."""
    if not coef:
        return 0.0, None
    leaf = entropies.detach().requires_grad_()
    bonus = coef * aggregate(leaf)
    (gradient,) = torch.autograd.grad(bonus, leaf)
    return bonus.detach(), -gradient


def _proximal(how: str, micro: MicroBatch, estimates: Estimates, logprobs: Tensor, version: int) -> Tensor:
    """Returns log-probs [N] of the proximal policy; the current ones if none were recomputed before the update."""
    if how == "loglinear":
        return loglinear_proximal(logprobs, micro.behavior_logprobs, micro.versions, version=version)
    return logprobs if estimates.proximal_logprobs is None else estimates.proximal_logprobs
