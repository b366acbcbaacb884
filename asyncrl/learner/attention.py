"""Causal attention over packed sequences: a flat row of tokens in which no sequence sees another.

Registered with transformers under the name PACKED. Only the attention itself sees padding: sequences of similar
length are gathered into [batch, length] buckets, and all other layers work on the flat row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from asyncrl.errors import ConfigError

PACKED = "asyncrl_packed"
"""Value of `attn_implementation` that selects `packed_attention`."""

SMALL_TOKENS = 64
"""Sequences up to this length share a bucket whatever their lengths: padding is cheaper than another call."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar length, padded to [batch, length]."""

    batch: int
    length: int
    source: Tensor
    """int64 [batch * length], the flat token of each place; padding points at some token of its sequence."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of a packed row of T go for attention, and back."""

    buckets: list[Bucket]
    restore: Tensor
    """int64 [T], place of each flat token in the concatenated buckets."""
    max_length: int

    def to(self, device: torch.device) -> Layout:
        buckets = [Bucket(b.batch, b.length, b.source.to(device)) for b in self.buckets]
        return Layout(buckets, self.restore.to(device), self.max_length)


def make_layout(lengths: NDArray[np.int64]) -> Layout:
    """Layout of packed sequences of these lengths. A bucket holds lengths down to half of its longest."""
    starts = np.cumsum(lengths) - lengths
    restore = np.empty(int(lengths.sum()), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    buckets: list[Bucket] = []
    offset = 0
    while len(order):
        length = int(lengths[order[0]])
        fits = lengths[order] > (0 if length <= SMALL_TOKENS else length // 2)
        members, order = order[fits], order[~fits]
        column = np.arange(length)
        real = column < lengths[members, None]
        source = starts[members, None] + np.minimum(column, lengths[members, None] - 1)
        places = offset + np.arange(source.size).reshape(source.shape)
        restore[source[real]] = places[real]
        buckets.append(Bucket(len(members), length, torch.from_numpy(source.reshape(-1))))
        offset += source.size
    return Layout(buckets, torch.from_numpy(restore), int(lengths.max(initial=0)))


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention output [1, T, heads, head size] of query [1, heads, T, head size], key and value.

    `packing` is the row's layout, passed as a keyword argument to the model's forward. Dropout is not applied: the
    policy that sampled the tokens had none. Raises ConfigError for kinds of attention that this is not.
    """
    if sliding_window is not None and packing.max_length > sliding_window:
        raise ConfigError(
            f"model.path: the model attends within a window of {sliding_window} tokens, but a trajectory has "
            f"{packing.max_length}; set generator.max_model_tokens to at most {sliding_window}"
        )
    if softcap is not None or s_aux is not None:
        raise ConfigError("model.path: models with capped attention scores or attention sinks cannot be trained")
    flat = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    outputs: list[Tensor] = []
    for bucket in packing.buckets:
        q, k, v = (
            tensor.index_select(0, bucket.source).unflatten(0, (bucket.batch, bucket.length)).transpose(1, 2)
            for tensor in flat
        )
        output = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, packing.restore).unsqueeze(0), None


AttentionInterface.register(PACKED, packed_attention)
