"""One optimizer update: the micro-batches of a mini-batch forward and backward, and new weights if all is finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from asyncrl.config import LearnerConfig
from asyncrl.errors import RunError
from asyncrl.learner.batch import Batch, MicroBatch, Name, empty_micro_batch
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.engine import TrainedModel

SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""Factor on the learning rate by the part of the steps after the warm-up that is done, from 0 to 1."""


def learning_rate(step: int, settings: LearnerConfig, *, steps: int) -> float:
    """Learning rate of optimizer step `step` (from 1) of `steps`.

    Rises linearly over `warmup_steps`, whose last step has the full rate, then follows the shape, which reaches
    0 when the last step is done: no step has rate 0.
    """
    warmup = settings.warmup_steps
    if step <= warmup:
        return settings.lr * step / warmup
    progress = (step - 1 - warmup) / max(steps - warmup, 1)
    return settings.lr * SHAPES[settings.lr_schedule](progress)


log = structlog.get_logger()

MAX_NAMED = 4
"""Trajectories that a rank names when an update is skipped; of others it tells how many."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """This rank's part of one optimizer update; all ranks have as many micro-batches."""

    micro_batches: list[MicroBatch]
    num_tokens: int
    """Action tokens of all ranks."""
    num_sequences: int
    """Sequences of all ranks."""


Part = Callable[[MicroBatch], tuple[Tensor, Tensor]]
"""From a micro-batch to what the model gives for its N action tokens [N], and the gradient [N] of its part of the
update's loss with respect to that."""


def sync_microbatches(batch: Batch, ranks: Ranks, step: int) -> list[Minibatch]:
    """The mini-batches with the counts of all ranks; ranks with fewer micro-batches get empty ones.

    All ranks call it. Raises RunError when there is no action token in a mini-batch.
    """
    own = [(sum(len(m.targets) for m in p), sum(len(m.names) for m in p), len(p)) for p in batch.minibatches]
    table = ranks.gather(torch.tensor(own))
    agreed: list[Minibatch] = []
    for number, parts in enumerate(batch.minibatches):
        num_tokens, num_sequences, _ = table[:, number].sum(dim=0).tolist()
        if not num_tokens:
            which = f", mini-batch {number + 1}" if len(batch.minibatches) > 1 else ""
            raise RunError(f"step {step}{which}: the batch has no action token")
        missing = int(table[:, number, 2].max()) - len(parts)
        agreed.append(Minibatch(parts + [empty_micro_batch()] * missing, num_tokens, num_sequences))
    return agreed


def update(
    model: TrainedModel,
    minibatch: Minibatch,
    part: Part,
    *,
    step: int,
    lr: Callable[[], float],
    settings: LearnerConfig,
    key: str,
    culprits: str = "",
) -> float | None:
    """Updates the model once. Returns the norm of the gradient before clipping to `max_grad_norm`, or None if the
    update was skipped because a loss or the gradient is not finite.

    All ranks call it, and all skip or none. `lr` is asked for the learning rate once the mini-batch is known to be
    sound. `culprits` names trajectories that are known to spoil the step. `key` is the config key of the learning rate,
    for the advice in errors. Raises RunError on all ranks when more than `max_skipped_updates` in a row were skipped.
    """
    ranks = model.ranks
    suspects: list[tuple[MicroBatch, Tensor]] = []
    for number, micro in enumerate(minibatch.micro_batches, start=1):
        micro = micro.to(ranks.device)
        outputs, gradient = part(micro)
        suspects.append((micro, outputs.detach().isfinite() & gradient.isfinite()))
        # Gradients are averaged over the ranks, but each rank holds a part of one sum.
        model.backward(outputs, gradient * ranks.count, last=number == len(minibatch.micro_batches))
    grad_norm = model.gradient_norm()
    reason = _find_reason(suspects, grad_norm, ranks, culprits)
    if not reason:
        model.step(lr=lr(), max_grad_norm=settings.max_grad_norm, grad_norm=grad_norm)
        return grad_norm
    model.skip()
    if ranks.rank == 0:
        log.warning("an update is skipped", step=step, of=ranks.what, reason=reason, in_a_row=model.skipped)
    if model.skipped > settings.max_skipped_updates:
        raise RunError(
            f"step {step}: {model.skipped} updates in a row are not finite, more than learner.max_skipped_updates = "
            f"{settings.max_skipped_updates}; the last one: {reason}. The weights are those of the last update that "
            f"was. Lower {key} or learner.max_grad_norm, or raise learner.max_skipped_updates, and continue with "
            "`asyncrl launch --resume`, which trains the steps since the newest checkpoint again"
        )
    return None


def name_together(names: Sequence[Name], ranks: Ranks) -> str:
    """The trajectories that any rank names, as text; empty if none does. All ranks call it."""
    return _exchange(names, False, ranks)[0]


def broken_names(micro: MicroBatch, finite: Tensor) -> list[Name]:
    """The trajectories of the micro-batch with an action token [N] that is not `finite`."""
    return [micro.names[number] for number in micro.seq[~finite].unique().cpu().tolist()]


def _find_reason(suspects: list[tuple[MicroBatch, Tensor]], grad_norm: float, ranks: Ranks, culprits: str) -> str:
    """Why the update must be skipped, the same on all ranks; empty if it need not."""
    names = [name for micro, finite in suspects for name in broken_names(micro, finite)]
    losses, overflow = _exchange(names, not math.isfinite(grad_norm), ranks)
    if losses:
        return f"the loss of {culprits or losses} is not finite"
    if not overflow:
        return ""
    names = [name for micro, _ in suspects for name in micro.names]
    return f"the gradient is not finite (norm {grad_norm}), of one of {name_together(names, ranks)}"


def _exchange(names: Sequence[Name], flag: bool, ranks: Ranks) -> tuple[str, bool]:
    """The trajectories that any rank names, as text, and whether any rank has the flag."""
    own = torch.full((2 + 2 * MAX_NAMED,), -1)
    own[0], own[1] = flag, len(names)
    for index, name in enumerate(names[:MAX_NAMED]):
        own[2 + 2 * index : 4 + 2 * index] = torch.tensor(name)
    table = ranks.gather(own)
    found = [pair for row in table for pair in row[2:].view(-1, 2).tolist() if pair[0] >= 0]
    texts = [f"ticket {ticket}, trajectory {number}" for ticket, number in found]
    more = int(table[:, 1].sum()) - len(found)
    return "; ".join(texts) + (f"; {more} more" if more else ""), bool(table[:, 0].any())
