"""Samples the next tokens, with their log-probs under the distribution that they were sampled from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncrl.config.mappings import Sampling


def sample(
    logits: Tensor, how: Sampling, generator: torch.Generator | None, histories: Sequence[tuple[list[int], int]]
) -> tuple[Tensor, Tensor]:
    """Returns tokens [rows] and their log-probs [rows] for logits [rows, vocabulary] in float32.

    `histories` has the tokens of each row so far, and how many of them are the prompt.
    """
    if how.repetition_penalty != 1.0 or how.presence_penalty or how.frequency_penalty:
        logits = _penalized(logits, how, histories)
    if how.temperature not in (0.0, 1.0):
        logits = logits / how.temperature
    if how.temperature and how.min_p:
        least = logits.max(dim=-1, keepdim=True).values + torch.log(torch.tensor(how.min_p)).item()
        logits = logits.masked_fill(logits < least, -torch.inf)
    if how.temperature and (how.top_k or how.top_p < 1.0):
        logits = _most_likely(logits, how)
    logprobs = logits.log_softmax(dim=-1)
    if how.temperature:
        tokens = torch.multinomial(logprobs.exp(), 1, generator=generator)
    else:
        tokens = logprobs.argmax(dim=-1, keepdim=True)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def _most_likely(logits: Tensor, how: Sampling) -> Tensor:
    """Excludes all but the `top_k` most likely tokens, and of those all behind the probability mass `top_p`."""
    ordered, tokens = logits.sort(dim=-1, descending=True)
    if 0 < how.top_k < ordered.shape[-1]:
        ordered = ordered.masked_fill(ordered < ordered[:, how.top_k - 1 : how.top_k], -torch.inf)
    if how.top_p < 1.0:
        probs = ordered.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs
        ordered = ordered.masked_fill(before >= how.top_p, -torch.inf)
    return torch.empty_like(logits).scatter_(1, tokens, ordered)


def _penalized(logits: Tensor, how: Sampling, histories: Sequence[tuple[list[int], int]]) -> Tensor:
    """Applies the penalties for tokens that a row has already."""
    logits = logits.clone()
    for row, (tokens, num_prompt) in zip(logits, histories, strict=True):
        seen = torch.tensor(tokens, device=logits.device).unique()
        old = row[seen]
        row[seen] = torch.where(old > 0, old / how.repetition_penalty, old * how.repetition_penalty)
        if len(tokens) > num_prompt:
            said, counts = torch.tensor(tokens[num_prompt:], device=logits.device).unique(return_counts=True)
            row[said] -= how.frequency_penalty * counts + how.presence_penalty
    return logits
