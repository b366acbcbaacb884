"""Attention of sequences of all lengths in one call of torch's kernel, on GPUs and in torch versions that have it."""

from __future__ import annotations

from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.learner.model.stand_in import is_on_gpu

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

PARAMETERS = frozenset() if varlen_attn is None else frozenset(signature(varlen_attn).parameters)
"""Names of the parameters of torch's kernel, which differ between versions: 2.11 takes no `enable_gqa`."""
HALF = (torch.bfloat16, torch.float16)
LARGE_HEADS = ((8, 0), (9, 0), (10, 0))
"""Compute capabilities that have the backward pass for heads of more than 192 elements."""


class Segments(NamedTuple):
    """Queries and keys of the S sequences that have computed tokens of their own. These are the last tokens of their
    sequence, and attend to all of its tokens before them."""

    keys: Tensor | None
    """int64, index among the computed tokens of each key; None if the keys are the computed tokens in their order."""
    queries_before: Tensor
    """int32 [S + 1], number of queries before each sequence."""
    keys_before: Tensor
    """int32 [S + 1], number of keys before each sequence."""
    max_queries: int
    max_keys: int

    def to(self, device: torch.device) -> Segments:
        keys = None if self.keys is None else self.keys.to(device)
        queries_before, keys_before = self.queries_before.to(device), self.keys_before.to(device)
        return Segments(keys, queries_before, keys_before, self.max_queries, self.max_keys)


def make_segments(lengths: NDArray[np.int64], computed: NDArray[np.int64], twins: NDArray[np.int64]) -> Segments:
    """Returns the segments of a packed row of sequences [S] from the positions `computed` of the computed tokens, and
    the index `twins` of the computed token that each token of the row has the hidden state of."""
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    own = np.bincount(sequence[computed], minlength=len(lengths))
    keys = None if len(computed) == len(sequence) else torch.from_numpy(twins[own[sequence] > 0])
    queries, keys_of = own[own > 0], lengths[own > 0]
    queries_before, keys_before = (
        torch.from_numpy(np.append(0, np.cumsum(counts)).astype(np.int32)) for counts in (queries, keys_of)
    )
    return Segments(keys, queries_before, keys_before, int(queries.max(initial=0)), int(keys_of.max(initial=0)))


def has_kernel(query: Tensor) -> bool:
    """True if torch's kernel can compute the attention of queries [D, heads, size] on their device. A GPU that tensors
    stand for has the capability 8.0."""
    if not is_on_gpu(query) or query.dtype not in HALF or not {"scale", "window_size"} <= PARAMETERS:
        return False
    capability = torch.cuda.get_device_capability(query.device) if query.is_cuda else (8, 0)
    size = query.shape[-1]
    return capability >= (8, 0) and size % 8 == 0 and size <= (256 if capability in LARGE_HEADS else 192)


def attend(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scaling: float | None, window: int | None
) -> Tensor:
    """Returns the attention output [D, heads, size] of query [D, heads, size], key and value [D, key heads, size].

    A token attends to the `window` last tokens up to itself, or to all if it is None.
    """
    if segments.keys is not None:
        key, value = key.index_select(0, segments.keys), value.index_select(0, segments.keys)
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    groups = query.shape[1] // key.shape[1]
    if "enable_gqa" in PARAMETERS:
        options["enable_gqa"] = groups > 1
    elif groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    assert varlen_attn is not None
    before = (segments.queries_before, segments.keys_before)
    output = varlen_attn(query, key, value, *before, segments.max_queries, segments.max_keys, **options)
    assert isinstance(output, Tensor)
    return output
