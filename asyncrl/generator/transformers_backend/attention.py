"""Causal attention over the paged cache, registered with transformers under the name PAGED.

The model computes the tokens of all requests as one row. Keys and values of the row are written to the cache, then each
token attends to those of its own request.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from asyncrl.errors import ConfigError
from asyncrl.generator.transformers_backend.batch import Batch, Group
from asyncrl.generator.transformers_backend.cache import HeadShape

PAGED = "asyncrl_paged"
"""Value of `attn_implementation` that selects `paged_attention`."""


class Kernel(Protocol):
    """Computes the attention of a batch whose keys and values are in the cache."""

    def __call__(
        self, batch: Batch, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """Returns [tokens, heads, value size] for the queries, keys and values [tokens, heads, size] of the batch. With
        a `window` a token attends to that many tokens, including itself."""
        ...


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: Batch,
    kernel: Kernel,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Returns the attention output [1, tokens, heads, value size] of query, key and value [1, heads, tokens, size].

    `paged` and `kernel` are keyword arguments of the model's forward. Raises ConfigError for unsupported kinds of
    attention, and AttributeError for a module without a layer index.
    """
    if softcap is not None or s_aux is not None:
        raise ConfigError("model.path: models with capped attention scores or attention sinks cannot be trained")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    layer: int = module.layer_idx  # type: ignore[assignment]
    if paged.cache is None:
        paged.shapes[layer] = HeadShape(k.shape[1], k.shape[2], v.shape[2])
    else:
        keys, values = paged.cache.layers[layer]
        keys.index_copy_(0, paged.places, k)
        values.index_copy_(0, paged.places, v)
    return kernel(paged, layer, q, k, v, scale=scaling, window=sliding_window).unsqueeze(0), None


def padded_attention(
    batch: Batch, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int | None
) -> Tensor:
    """The kernel of any device and dtype: one call for all decoding rows, padded to the longest, and one for each
    group of other rows."""
    outputs: list[Tensor] = []
    count = batch.num_decoding
    if count:
        assert batch.cache is not None
        keys, values = (
            tensor.index_select(0, batch.decode_source).view(count, batch.decode_length, *tensor.shape[1:])
            for tensor in batch.cache.layers[layer]
        )
        # The query heads that share a head of keys are rows of one matrix.
        queries = q[:count].unflatten(1, (k.shape[1], -1))
        output = scaled_dot_product_attention(
            queries, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=batch.decode_mask(window), scale=scale
        )
        outputs.append(output.flatten(1, 2))
    outputs += [_attend_group(batch, layer, group, (q, k, v), scale, window) for group in batch.groups]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_group(
    batch: Batch,
    layer: int,
    group: Group,
    fresh: tuple[Tensor, Tensor, Tensor],
    scale: float | None,
    window: int | None,
) -> Tensor:
    part = slice(group.first, group.first + group.rows * group.tokens)
    length = group.start + group.tokens
    q, k, v = (tensor[part] for tensor in fresh)
    if group.source is not None:
        assert batch.cache is not None
        k, v = (tensor.index_select(0, group.source) for tensor in batch.cache.layers[layer])
    q = q.unflatten(0, (group.rows, group.tokens)).transpose(1, 2)
    k, v = (tensor.unflatten(0, (group.rows, length)).transpose(1, 2) for tensor in (k, v))
    mask = None
    if group.start or (window is not None and length > window):
        mask = torch.ones(group.tokens, length, dtype=torch.bool, device=q.device).tril_(group.start)
        if window is not None:
            mask = mask.triu_(group.start + 1 - window)
    share = q.shape[1] // k.shape[1]
    if share > 1 and q.is_cuda and (q.dtype is torch.float32 or mask is not None):
        # Only the kernel that writes all scores has grouped heads there.
        k, v = (tensor.repeat_interleave(share, dim=1) for tensor in (k, v))
        share = 1
    output = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=share > 1
    )
    return output.transpose(1, 2).flatten(0, 1)


AttentionInterface.register(PAGED, paged_attention)
