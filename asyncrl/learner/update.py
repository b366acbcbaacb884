"""One optimizer step: all micro-batches forward and backward, checks, and the update of the weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncrl.algorithms.losses import PolicyTerms
from asyncrl.errors import RunError
from asyncrl.learner.algorithm import Algorithm
from asyncrl.learner.batch import Batch, MicroBatch, empty_micro_batch
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.metrics import Tally
from asyncrl.learner.policy import Policy


def update(
    policy: Policy, algorithm: Algorithm, batch: Batch, *, step: int, lr: float, max_grad_norm: float
) -> dict[str, float]:
    """Trains version step - 1 into version `step` on this rank's batch; gives the step's metrics, of all ranks.

    All ranks call it. Denominators are those of the whole step, known before the first backward. There is one update
    per batch, so the proximal policy is the current one. Raises RunError on all ranks, with the weights
    untouched, when a loss or gradient is not finite.
    """
    ranks = policy.ranks
    micro_batches, counts = _agree(batch, ranks, step)
    tally = Tally(version=step - 1, level=algorithm.correction_level, device=ranks.device)
    suspects: list[tuple[MicroBatch, Tensor]] = []
    for number, micro in enumerate(micro_batches, start=1):
        micro = micro.to(ranks.device)
        logprobs, entropies = policy.forward(micro)
        values = logprobs.detach()
        loss, token_gradient, gradient = loss_gradients(algorithm, micro, values, counts)
        tally.add(micro, loss=loss, logprobs=values, entropies=entropies, token_gradient=token_gradient)
        suspects.append((micro, values.isfinite() & gradient.isfinite()))
        # Gradients are averaged over the ranks, but each rank holds a part of one sum.
        policy.backward(logprobs, gradient * ranks.count, last=number == len(micro_batches))
    ranks.raise_together(_find_culprit(suspects, step))
    grad_norm = policy.gradient_norm()
    if not math.isfinite(grad_norm):
        raise RunError(
            f"step {step}: the gradient is not finite (norm {grad_norm}) although every loss is; the weights are "
            "those of the step before. Lower learner.lr, or train in float32"
        )
    policy.step(lr=lr, max_grad_norm=max_grad_norm, grad_norm=grad_norm)
    return tally.reduce(ranks) | {"learner/grad_norm": grad_norm, "learner/lr": lr}


def loss_gradients(
    algorithm: Algorithm, micro: MicroBatch, logprobs: Tensor, counts: dict[str, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the micro-batch at current log-probs [N]: its part of the step's loss, the gradient [N] of the sum of
    the token losses, and the gradient [N] of that part, both by the log-probs."""
    if not len(logprobs):
        return logprobs.sum(), logprobs, logprobs
    leaf = logprobs.clone().requires_grad_()
    token_loss = algorithm.loss(
        PolicyTerms(
            logprobs=leaf,
            proximal_logprobs=logprobs,
            behavior_logprobs=micro.behavior_logprobs,
            advantages=micro.advantages,
            seq=micro.seq,
        )
    )
    loss = algorithm.aggregate(token_loss, micro.seq, **counts)
    (token_gradient,) = torch.autograd.grad(token_loss.sum(), leaf, retain_graph=True)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), token_gradient, gradient


def _agree(batch: Batch, ranks: Ranks, step: int) -> tuple[list[MicroBatch], dict[str, int]]:
    """As many micro-batches as the rank with most has, and the action tokens and sequences of all ranks."""
    table = ranks.gather(torch.tensor([batch.num_tokens, batch.num_sequences, len(batch.micro_batches)]))
    num_tokens, num_sequences, _ = table.sum(dim=0).tolist()
    if not num_tokens:
        raise RunError(f"step {step}: the batch has no action token")
    missing = int(table[:, 2].max()) - len(batch.micro_batches)
    padded = batch.micro_batches + [empty_micro_batch() for _ in range(missing)]
    return padded, {"num_tokens": num_tokens, "num_sequences": num_sequences}


def _find_culprit(suspects: list[tuple[MicroBatch, Tensor]], step: int) -> RunError | None:
    """The error of the first trajectory with a token that is not finite."""
    for micro, finite in suspects:
        if not finite.all():
            ticket, number = micro.names[int(micro.seq[~finite][0])]
            return RunError(
                f"step {step}: the loss of ticket {ticket}, trajectory {number} is not finite; the weights are "
                "those of the step before. Lower learner.lr, or train in float32"
            )
    return None
