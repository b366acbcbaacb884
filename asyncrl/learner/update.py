"""One optimizer update: the micro-batches of a mini-batch forward and backward, checks, and the new weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.errors import RunError
from asyncrl.learner.batch import Batch, MicroBatch, empty_micro_batch
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.engine import TrainedModel


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


def agree(batch: Batch, ranks: Ranks, step: int) -> list[Minibatch]:
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
    max_grad_norm: float,
    key: str,
) -> float:
    """Updates the model once and gives the norm of the gradient before it was scaled to at most `max_grad_norm`.

    All ranks call it. `lr` is asked for the learning rate once the whole mini-batch has been seen. `key` is the config
    key of the learning rate, for the advice in errors. Raises RunError on all ranks, with the weights untouched, when
    a loss or gradient is not finite.
    """
    ranks = model.ranks
    suspects: list[tuple[MicroBatch, Tensor]] = []
    for number, micro in enumerate(minibatch.micro_batches, start=1):
        micro = micro.to(ranks.device)
        outputs, gradient = part(micro)
        suspects.append((micro, outputs.detach().isfinite() & gradient.isfinite()))
        # Gradients are averaged over the ranks, but each rank holds a part of one sum.
        model.backward(outputs, gradient * ranks.count, last=number == len(minibatch.micro_batches))
    ranks.raise_together(_find_culprit(suspects, step, key))
    grad_norm = model.gradient_norm()
    if not math.isfinite(grad_norm):
        raise RunError(
            f"step {step}: the gradient is not finite (norm {grad_norm}) although every loss is; the weights are "
            f"those of the update before. Lower {key}, or train in float32"
        )
    model.step(lr=lr(), max_grad_norm=max_grad_norm, grad_norm=grad_norm)
    return grad_norm


def _find_culprit(suspects: list[tuple[MicroBatch, Tensor]], step: int, key: str) -> RunError | None:
    """The error of the first trajectory with a token that is not finite."""
    for micro, finite in suspects:
        if not finite.all():
            ticket, number = micro.names[int(micro.seq[~finite][0])]
            return RunError(
                f"step {step}: the loss of ticket {ticket}, trajectory {number} is not finite; the weights are "
                f"those of the update before. Lower {key}, or train in float32"
            )
    return None
