"""Ranks that share their sequences (Ulysses, arXiv:2309.14509): each computes a part of the tokens of every row.

Only attention sees all tokens, of a part of the heads: before it, the ranks exchange tokens for heads, and after it
heads for tokens. What a rank computes of its own tokens is then collected, so that all of them have the same losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SequenceParallel:
    """This rank's place among the ranks that have the same sequences. Every method but `part` and `own` is a
    collective."""

    rank: int
    size: int
    group: dist.ProcessGroup

    def part(self, tokens: Tensor) -> Tensor:
        """Returns this rank's part of the tokens [D]; the last one is repeated, so that all parts are of one size."""
        size = self._part_size(len(tokens))
        places = torch.arange(self.rank * size, (self.rank + 1) * size, device=tokens.device)
        return tokens[places.clamp_(max=len(tokens) - 1)]

    def own(self, places: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Returns which of the places [N], in `count` tokens, are in this rank's part, and these places in the part."""
        size = self._part_size(count)
        own = torch.nonzero(places // size == self.rank).squeeze(-1)
        return own, places[own] - self.rank * size

    def by_heads(self, query: Tensor, key: Tensor, value: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns query, key and value [count, heads / size, head size] of this rank's heads and all tokens, from those
        of all heads [part, heads, head size] and this rank's tokens. Key heads are repeated if the ranks are more."""
        repeats = max(self.size // key.shape[1], 1)
        heads = [t.repeat_interleave(n, dim=1) for t, n in ((query, 1), (key, repeats), (value, repeats))]
        parts = torch.cat([t.unflatten(1, (self.size, -1)) for t in heads], dim=2)
        everything = _Exchange.apply(parts.transpose(0, 1), self.group).flatten(0, 1)[:count]  # pyright: ignore
        query, key, value = everything.split([t.shape[1] // self.size for t in heads], dim=1)
        return query, key, value

    def by_tokens(self, output: Tensor) -> Tensor:
        """Returns the output [part, heads, head size] of all heads and this rank's tokens, from that of its heads and
        all tokens [D, heads / size, head size]."""
        size = self._part_size(len(output))
        padding = output.new_zeros(size * self.size - len(output), *output.shape[1:])
        parts = torch.cat([output, padding]).unflatten(0, (self.size, size))
        return _Exchange.apply(parts, self.group).transpose(0, 1).flatten(1, 2)  # pyright: ignore

    def collect(self, values: Tensor, own: Tensor, count: int) -> Tensor:
        """Returns what all ranks computed [..., count], from this rank's values [..., N] and their places. The gradient
        of each value goes to the rank that computed it."""
        return _Collect.apply(values, own, count, self.group)  # pyright: ignore[reportReturnType]

    def _part_size(self, count: int) -> int:
        return -(-count // self.size)


def checked(parallel: SequenceParallel | None, model: PreTrainedModel, name: str) -> SequenceParallel | None:
    """Returns `parallel`. Raises ConfigError if the heads of the model, which has this name in the error, cannot be
    divided among its ranks."""
    if parallel is None:
        return None
    settings = model.config.get_text_config()
    heads = settings.num_attention_heads
    key_heads = getattr(settings, "num_key_value_heads", None) or heads
    if heads % parallel.size or (key_heads % parallel.size and parallel.size % key_heads):
        raise ConfigError(
            f"learner.sequence_parallel = {parallel.size}: {name} has {heads} attention heads and {key_heads} "
            "key-value heads; it must divide the former, and divide the latter or be a multiple of them"
        )
    return parallel


class _Exchange(torch.autograd.Function):
    """Sends the i-th of the values [size, ...] to the i-th rank."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(values, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None]:
        return _exchange(slopes, ctx.group), None


def _exchange(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    values = values.contiguous()
    received = torch.empty_like(values)
    if not values.is_meta:  # `memory_trace` has no other ranks
        dist.all_to_all_single(received, values, group=group)
    return received


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, own: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(own)
        everything = values.new_zeros(*values.shape[:-1], count)
        everything[..., own] = values
        dist.all_reduce(everything, group=group)
        return everything

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        return slopes[..., own], None, None, None
