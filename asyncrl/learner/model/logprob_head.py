"""Computes log-probs of target tokens from hidden states in chunks, so that memory never contains the logits of all
tokens at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from asyncrl.learner.model.attention import is_on_gpu

CHUNK_BYTES = 128 << 20
"""Size of the float32 logits of a chunk of tokens. The peak memory on any device is twice this size, plus half of it
for gradients in bfloat16 on a GPU, or a float32 copy of bfloat16 weights on a CPU. Every chunk reads the output layer's
weights and their gradient."""
CUDA_CHUNK_BYTES = 1 << 30
"""Size of the float32 logits of a chunk on a GPU, where small chunks would be limited by memory bandwidth."""


class LogprobHead(nn.Module):
    """The model's output layer, returning log-probs of target tokens.

    The module shares the layer's parameters, so that ZeRO stage 3 gathers them once for all chunks.
    """

    def __init__(self, output: nn.Linear, temperature: float, *, entropy_gradient: bool = False) -> None:
        """With `entropy_gradient` the entropies have a gradient, at the cost of more work in the backward pass."""
        super().__init__()
        self.weight, self.bias = output.weight, output.bias
        self.temperature = temperature
        self.entropy_gradient = entropy_gradient
        self.vocabulary = output.out_features

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probs [N] of targets [N] and entropies [N], float32 in nats, from hidden states [N, size]."""
        chunk_tokens = max(1, (CUDA_CHUNK_BYTES if is_on_gpu(hidden) else CHUNK_BYTES) // (4 * self.vocabulary))
        settings = _HeadSettings(self.temperature, chunk_tokens, self.entropy_gradient)
        return _Score.apply(hidden, self.weight, self.bias, targets, settings)  # pyright: ignore[reportReturnType]


class _HeadSettings(NamedTuple):
    temperature: float
    chunk_tokens: int
    entropy_gradient: bool


class _Score(torch.autograd.Function):
    """Scores tokens chunk by chunk. Backward recomputes the logits; with a single chunk it uses what forward saved: the
    probabilities, or with a gradient of the entropies the log-probs, of all tokens of the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: _HeadSettings
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies = (torch.empty(len(targets), device=hidden.device) for _ in range(2))
        factor = _factor(weight)
        saved: Tensor | None = None
        for part in _parts(len(targets), settings.chunk_tokens):
            scores = _logits(hidden[part], factor, bias, settings.temperature).log_softmax(dim=-1)
            logprobs[part] = scores.gather(-1, targets[part].unsqueeze(-1)).squeeze(-1)
            probs = scores.exp()
            if settings.entropy_gradient:
                saved = scores
                entropies[part] = -probs.mul_(scores).sum(dim=-1)
            else:
                saved = probs
                entropies[part] = -scores.mul_(probs).sum(dim=-1)
        saved = saved if len(targets) <= settings.chunk_tokens else None
        ctx.save_for_backward(hidden, weight, bias, targets, saved, entropies if settings.entropy_gradient else None)
        ctx.settings = settings
        if not settings.entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor, entropy_slopes: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, saved, entropies = ctx.saved_tensors
        settings: _HeadSettings = ctx.settings
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        # The sum over chunks is in float32 and rounded once: in bfloat16 every chunk would round it.
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        factor = _factor(weight)
        for part in _parts(len(targets), settings.chunk_tokens):
            slope = (slopes[part] / settings.temperature).unsqueeze(-1)
            if saved is not None:
                table = saved
            else:
                logits = _logits(hidden[part], factor, bias, settings.temperature)
                table = logits.softmax(dim=-1) if entropies is None else logits.log_softmax(dim=-1)
                del logits
            if entropies is None:
                precise = table.mul_(-slope)
            else:
                entropy_slope = (entropy_slopes[part] / settings.temperature).unsqueeze(-1)
                precise = _of_distribution(table, slope, entropy_slope, entropies[part].unsqueeze(-1))
            precise.scatter_add_(-1, targets[part].unsqueeze(-1), slope)
            if of_bias is not None:
                of_bias += precise.sum(dim=0)
            of_logits = precise.to(factor.dtype)
            if of_hidden is not None:
                of_hidden[part] = of_logits @ factor
            if of_weight is not None:
                _add_product(of_weight, of_logits.t(), hidden[part])
            del table, precise, of_logits  # before the logits of the next chunk
        return of_hidden, _rounded(of_weight, weight), _rounded(of_bias, bias), None, None


def _of_distribution(scores: Tensor, slope: Tensor, entropy_slope: Tensor, entropies: Tensor) -> Tensor:
    """Returns the part of the gradient of the logits [N, vocabulary] that all tokens of the vocabulary get,
    -p (slope + entropy_slope (log p + H)), from log-probs `scores`, whose memory it uses."""
    probs = scores.exp()
    return scores.add_(entropies).mul_(entropy_slope).add_(slope).mul_(probs).neg_()


def _parts(count: int, size: int) -> Iterator[slice]:
    return (slice(begin, begin + size) for begin in range(0, count, size))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Returns float32 logits [N, vocabulary] of one chunk at the temperature."""
    logits = _product(hidden, weight.t())
    if bias is not None:
        logits += bias
    logits /= temperature
    return logits


def _factor(weight: Tensor) -> Tensor:
    """Returns the weight as products take it: a float32 copy where torch has no product of bfloat16 matrices with a
    float32 result, on a CPU."""
    return weight if is_on_gpu(weight) else weight.float()


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Returns the product of two matrices in float32, also if they are in bfloat16."""
    if is_on_gpu(left) and left.dtype is not torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the product of two matrices to `total`, in float32."""
    if is_on_gpu(left) and left.dtype is not torch.float32:
        total += torch.mm(left, right, out_dtype=torch.float32)
    else:
        total.addmm_(left.float(), right.float())


def _rounded(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return None if gradient is None or parameter is None else gradient.to(parameter.dtype)
