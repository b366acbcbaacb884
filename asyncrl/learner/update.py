"""The parts of an optimizer update that policy and critic share: mini-batches, learning rate, skipped updates.

`Trainer.train` and `Critic.train` use them in loops of the same form:

    for minibatch in plan_updates(...):
        finite = []
        for micro, last in minibatch.on(device):
            outputs = ...  # forward
            gradient = ...  # gradient of the loss with respect to the outputs
            finite.append(outputs.detach().isfinite() & gradient.isfinite())
            model.backward(outputs, gradient, last=last)
        grad_norm = model.gradient_norm()
        if skip_if_not_finite(model, minibatch, finite, grad_norm, ...):
            continue
        model.step(lr=..., max_grad_norm=..., grad_norm=grad_norm)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from asyncrl.config import Config, LearnerConfig
from asyncrl.errors import RunError
from asyncrl.learner.batch import MicroBatch, Name, empty_micro_batch
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model.engine import TrainedModel

SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""Factor of the learning rate as a function of the completed fraction, from 0 to 1, of the steps after the warm-up."""


def learning_rate(step: int, settings: LearnerConfig, *, steps: int) -> float:
    """Returns the learning rate of step `step` (from 1) of `steps`.

    The rate rises linearly over `warmup_steps`, the last of which has the full rate. It then follows the schedule,
    which reaches 0 only after the last step: no step has rate 0.
    """
    warmup = settings.warmup_steps
    if step <= warmup:
        return settings.lr * step / warmup
    progress = (step - 1 - warmup) / max(steps - warmup, 1)
    return settings.lr * SHAPES[settings.lr_schedule](progress)


log = structlog.get_logger()

MAX_SKIPPED_UPDATES = 5
"""Consecutive updates that may be skipped because their loss or gradient is not finite."""
MAX_NAMED = 4
"""Maximum number of trajectories that each rank names for a skipped update; the others are only counted."""


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
    own = [(sum(len(m.targets) for m in p), n, len(p)) for p, n in zip(minibatches, num_members, strict=True)]
    table = ranks.gather(torch.tensor(own))
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
    culprits: str = "",
) -> bool:
    """Drops the gradient if a loss or the gradient itself is not finite. Returns True if it did.

    All ranks call it after the last backward, and either all or none of them skip the update. `finite` has one mask per
    micro-batch, true for the action tokens [N] with finite outputs and gradients. `culprits` names trajectories already
    known to have non-finite scores, and `lr_key` is the config key of the learning rate, for the error. Raises RunError
    on all ranks if more than MAX_SKIPPED_UPDATES updates in a row were skipped.
    """
    reason = _find_reason(minibatch, finite, grad_norm, model.ranks.of_data, culprits)
    if not reason:
        return False
    model.skip()
    if model.ranks.rank == 0:
        log.warning("update skipped", step=step, of=model.ranks.what, reason=reason, in_a_row=model.skipped)
    if model.skipped > MAX_SKIPPED_UPDATES:
        raise RunError(
            f"step {step}: {model.skipped} updates in a row are not finite, more than {MAX_SKIPPED_UPDATES}; "
            f"the last one: {reason}. The weights are those after the last finite "
            f"update. Lower {lr_key} or learner.max_grad_norm, and continue with "
            "`asyncrl launch --resume`, which trains the steps after the newest checkpoint again"
        )
    return True


def broken_names(micro: MicroBatch, finite: Tensor) -> list[Name]:
    """Returns the trajectories of the micro-batch that have an action token [N] for which `finite` is false."""
    return [micro.names[number] for number in micro.seq[~finite.to(micro.seq.device)].unique().tolist()]


def name_together(names: Sequence[Name], ranks: Ranks) -> str:
    """Returns a text with the trajectories named by any rank; empty if no rank names one. All ranks call it."""
    return _exchange(names, False, ranks)[0]


def _find_reason(minibatch: Minibatch, finite: Sequence[Tensor], grad_norm: float, ranks: Ranks, culprits: str) -> str:
    """Returns the reason to skip the update, the same on all ranks; empty if the update is finite."""
    pairs = zip(minibatch.micro_batches, finite, strict=True)
    names = [name for micro, own in pairs for name in broken_names(micro, own)]
    losses, overflow = _exchange(names, not math.isfinite(grad_norm), ranks)
    if losses:
        return f"the loss of {culprits or losses} is not finite"
    if not overflow:
        return ""
    names = [name for micro in minibatch.micro_batches for name in micro.names]
    return f"the gradient is not finite (norm {grad_norm}), of one of {name_together(names, ranks)}"


def _exchange(names: Sequence[Name], flag: bool, ranks: Ranks) -> tuple[str, bool]:
    """Returns a text with the trajectories named by any rank, and True if the flag is set on any rank."""
    own = torch.full((2 + 2 * MAX_NAMED,), -1)
    own[0], own[1] = flag, len(names)
    for index, name in enumerate(names[:MAX_NAMED]):
        own[2 + 2 * index : 4 + 2 * index] = torch.tensor(name)
    table = ranks.gather(own)
    found = [pair for row in table for pair in row[2:].view(-1, 2).tolist() if pair[0] >= 0]
    texts = [f"ticket {ticket}, trajectory {number}" for ticket, number in found]
    more = int(table[:, 1].sum()) - len(found)
    return "; ".join(texts) + (f"; {more} more" if more else ""), bool(table[:, 0].any())
