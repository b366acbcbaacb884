"""How the token losses of a batch become one number."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asyncrl.algorithms.segments import num_segments, segment_mean

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def aggregate(
    token_loss: Tensor,
    seq: Tensor,
    *,
    mode: Aggregation = "token-mean",
    max_length: int | None = None,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
) -> Tensor:
    """One number from token losses [N] of whole sequences `seq` [N]. Differentiable; 0 when N = 0.

    token-mean divides the sum by `num_tokens` (arXiv:2503.14476); token-sum does not divide; the seq-mean modes
    divide by `num_sequences` the sums, the means (arXiv:2402.03300), or the sums over `max_length`
    (arXiv:2503.20783) of the sequences. The counts are those of the whole optimizer step, over all
    micro-batches and ranks, so that the parts add up; without them, those of the given tokens.
    Raises ValueError for an unknown mode, or when seq-mean-token-sum-norm lacks `max_length`.
    """
    tokens = max(token_loss.numel() if num_tokens is None else num_tokens, 1)
    sequences = max(len(torch.unique_consecutive(seq)) if num_sequences is None else num_sequences, 1)
    match mode:
        case "token-sum":
            return token_loss.sum()
        case "token-mean":
            return token_loss.sum() / tokens
        case "seq-mean-token-sum":
            return token_loss.sum() / sequences
        case "seq-mean-token-sum-norm":
            if max_length is None:
                raise ValueError("mode = 'seq-mean-token-sum-norm' needs max_length, a constant of the run")
            return token_loss.sum() / (sequences * max_length)
        case "seq-mean-token-mean":
            return segment_mean(token_loss, seq, num_segments(seq)).sum() / sequences
    raise ValueError(f"mode = {mode!r}: not an aggregation")
