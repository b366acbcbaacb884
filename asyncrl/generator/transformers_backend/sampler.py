"""Samples the next tokens, with their log-probs under the distribution that they were sampled from."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.config.sections import Sampling


def sample(logits: Tensor, how: Sampling, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Returns tokens [rows] and their log-probs [rows] for logits [rows, vocabulary] in float32."""
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
