"""The parts of an update of weights: mini-batch, losses of micro-batches, and the check that all is finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from asyncrl.config.config import Config
from asyncrl.errors import RunError
from asyncrl.learner.batch import MicroBatch, Name, empty_micro_batch
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model.engine import TrainedModel

log = structlog.get_logger()
MAX_SKIPPED_UPDATES = 5
"""Consecutive updates that may be skipped because their loss or gradient is not finite."""
MAX_NAMED = 4
"""Maximum number of trajectories that each rank names for a skipped update; the others are only counted."""


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


@dataclass(frozen=True, slots=True)
class Minibatch:
    """This rank's part of one optimizer update; all ranks have the same number of micro-batches."""

    micro_batches: list[MicroBatch]
    num_tokens: int
    """Action tokens of all ranks."""
    num_sequences: int
    """Members of the groups of all ranks; those that are not trained have a loss of 0, as in TRL and verl."""

    @property
    def counts(self) -> dict[str, int]:
        """The denominators of the update's loss, as `losses.aggregate` takes them."""
        return {"num_tokens": self.num_tokens, "num_sequences": self.num_sequences}

    def on(self, device: torch.device) -> Iterator[tuple[MicroBatch, bool]]:
        """Yields each micro-batch on the device, and True with the last one."""
        for number, micro in enumerate(self.micro_batches, start=1):
            yield micro.to(device), number == len(self.micro_batches)


def plan_updates(scored: list[Minibatch], *, epochs: int) -> list[Minibatch]:
    """The mini-batch of every update of a step, in their order, without those that have no action token."""
    return [minibatch for minibatch in scored * epochs if minibatch.num_tokens]


def may_be_empty(config: Config) -> bool:
    """True if a step or a mini-batch may have no trained action token."""
    return config.replay.drops or config.algorithm.truncated == "mask"


def sync_microbatches(
    minibatches: list[list[MicroBatch]], num_members: list[int], ranks: Ranks, step: int, *, may_be_empty: bool = False
) -> list[Minibatch]:
    """Returns the mini-batches, of which this rank has `num_members` members each, with the counts over all ranks;
    ranks with fewer micro-batches get empty ones.

    All ranks call it. Raises RunError if a mini-batch has no action token on any rank, unless it `may_be_empty`.
    """
    sizes = [(sum(len(m.targets) for m in p), n, len(p)) for p, n in zip(minibatches, num_members, strict=True)]
    table = ranks.gather(torch.tensor(sizes))
    synced: list[Minibatch] = []
    for number, parts in enumerate(minibatches):
        num_tokens, num_sequences, _ = table[:, number].sum(dim=0).tolist()
        if not num_tokens and not may_be_empty:
            which = f", mini-batch {number + 1}" if len(minibatches) > 1 else ""
            raise RunError(f"step {step}{which}: the batch has no action token")
        missing = int(table[:, number, 2].max()) - len(parts)
        synced.append(Minibatch(parts + [empty_micro_batch()] * missing, num_tokens, num_sequences))
    return synced


def skip_if_not_finite(
    model: TrainedModel,
    minibatch: Minibatch,
    finite: Sequence[Tensor],
    grad_norm: float,
    step: int,
    lr_key: str,
    *,
    find_culprits: Callable[[], str] = str,
) -> bool:
    """Drops the update of `model` if its loss or gradient is not finite on any rank. Returns True, on all ranks, if it
    was dropped. All ranks call it, after the last backward.

    `finite` contains, for each micro-batch, a mask of the action tokens [N] with finite outputs and gradients. `lr_key`
    is the config key of the learning rate, for the error. `find_culprits` is called on all ranks if a loss is not
    finite, and names the trajectories whose scores made it so, if there are any. Raises RunError on all ranks if more
    than MAX_SKIPPED_UPDATES updates in a row were skipped.
    """
    ranks = model.ranks.of_data
    if broken := name_broken(minibatch.micro_batches, finite, ranks):
        reason = f"the loss of {find_culprits() or broken} is not finite"
    elif ranks.any(not math.isfinite(grad_norm)):
        names = [name for micro in minibatch.micro_batches for name in micro.names]
        reason = f"the gradient is not finite (norm {grad_norm}), of one of {_join_names(names, ranks)}"
    else:
        return False
    model.skip()
    if model.ranks.rank == 0:
        log.warning("update skipped", step=step, of=model.ranks.what, reason=reason, in_a_row=model.skipped)
    if model.skipped > MAX_SKIPPED_UPDATES:
        raise RunError(
            f"step {step}: {model.skipped} updates in a row are not finite, more than {MAX_SKIPPED_UPDATES}; the last "
            f"one: {reason}. The weights are those after the last finite update. Lower {lr_key} or "
            "learner.max_grad_norm, and continue with `asyncrl launch --resume`, which trains the steps after the "
            "newest checkpoint again"
        )
    return True


def name_broken(micro_batches: Sequence[MicroBatch], finite: Sequence[Tensor], ranks: Ranks) -> str:
    """Returns a text with the trajectories of all ranks that have an action token whose mask in `finite` is false.

    `finite` contains a mask [N] for each micro-batch. Empty if there is no such trajectory. All ranks call it.
    """
    names = [
        micro.names[number]
        for micro, mask in zip(micro_batches, finite, strict=True)
        for number in micro.seq[~mask.to(micro.seq.device)].unique().tolist()
    ]
    return _join_names(names, ranks)


def _join_names(names: Sequence[Name], ranks: Ranks) -> str:
    """Returns a text with the trajectories named by any rank; empty if no rank names one. All ranks call it."""
    texts = [f"ticket {ticket}, trajectory {number}" for ticket, number in names[:MAX_NAMED]]
    texts += [f"{len(names) - MAX_NAMED} more"] * (len(names) > MAX_NAMED)
    return "; ".join(text for text in ranks.gather_texts("; ".join(texts)) if text)
