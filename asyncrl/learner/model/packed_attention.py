"""Causal attention over packed sequences: a flat row of tokens in which no sequence attends to another.

Registered with transformers under the name PACKED. Sequences of one group begin with the same tokens, which have the
same hidden states; all layers but the attention compute those tokens once. The attention is one call of torch's kernel
for sequences of all lengths where there is one (`varlen`). Elsewhere it uses padding: it gathers sequences of similar
length into [batch, length] buckets.
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
from asyncrl.learner.model import varlen
from asyncrl.learner.model.sequence_parallel import SequenceParallel
from asyncrl.learner.model.stand_in import is_on_gpu
from asyncrl.learner.model.varlen import Segments, make_segments

Integers = NDArray[np.int64]
PACKED = "asyncrl_packed"
"""Value of `attn_implementation` that selects `packed_attention`."""

BUCKET_RANGE = 0.75
"""Minimum ratio of the shortest to the longest sequence in a bucket. The cost of attention is quadratic in the padded
length; a narrower range needs more calls."""
SMALL_TOKENS = 64
"""Maximum length of sequences that share a bucket regardless of their lengths: padding is cheaper than another call."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar length, padded to [batch, length]."""

    batch: int
    length: int
    source: Tensor
    """int64 [batch * length], index of the computed token at each place; padding repeats the last token of its
    sequence."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Index maps of a packed row of T tokens. The model computes D distinct tokens; each other token has the same
    hidden state as one of them."""

    computed: Tensor
    """int64 [D], positions in the row of the tokens that the model computes."""
    twins: Tensor
    """int64 [T], index among the D computed tokens of each token of the row."""
    buckets: list[Bucket]
    restore: Tensor
    """int64 [D], position of each computed token in the concatenated buckets."""
    segments: Segments
    max_length: int

    def to(self, device: torch.device) -> Layout:
        buckets = [Bucket(b.batch, b.length, b.source.to(device)) for b in self.buckets]
        computed, twins, restore = (tensor.to(device) for tensor in (self.computed, self.twins, self.restore))
        return Layout(computed, twins, buckets, restore, self.segments.to(device), self.max_length)


def make_layout(lengths: Integers, firsts: Integers | None = None) -> Layout:
    """Returns the layout of packed sequences of these lengths.

    `firsts` is the result of `find_firsts`; if None, the model computes every token.
    """
    starts = np.cumsum(lengths) - lengths
    here = np.arange(lengths.sum())
    firsts = here if firsts is None else firsts
    computed = np.flatnonzero(firsts == here)
    twins = np.searchsorted(computed, firsts)
    restore = np.empty(len(here), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    buckets: list[Bucket] = []
    offset = 0
    while len(order):
        length = int(lengths[order[0]])
        fits = lengths[order] >= (0 if length <= SMALL_TOKENS else BUCKET_RANGE * length)
        members, order = order[fits], order[~fits]
        column = np.arange(length)
        real = column < lengths[members, None]
        source = starts[members, None] + np.minimum(column, lengths[members, None] - 1)
        places = offset + np.arange(source.size).reshape(source.shape)
        restore[source[real]] = places[real]
        buckets.append(Bucket(len(members), length, torch.from_numpy(twins[source.reshape(-1)])))
        offset += source.size
    tensors = [torch.from_numpy(array) for array in (computed, twins, restore[computed])]
    segments = make_segments(lengths, computed, twins)
    return Layout(tensors[0], tensors[1], buckets, tensors[2], segments, int(lengths.max(initial=0)))


def find_firsts(tokens: Integers, lengths: Integers, groups: Integers, members: Integers | None = None) -> Integers:
    """Returns, for each token of a packed row, the first position in the row of the same token after the same prefix:
    the token's own position, or one in the first sequence of its group, or in the first of its member of the group,
    whichever has more tokens in common with it. The sequences [S] of a group are adjacent, and those of a member."""
    firsts, common = _shared(tokens, lengths, groups)
    if members is None or len(np.unique(members)) == len(members):
        return firsts
    of_member, more = _shared(tokens, lengths, members)
    return np.where(np.repeat(more > common, lengths), firsts[of_member], firsts)


def _shared(tokens: Integers, lengths: Integers, owners: Integers) -> tuple[Integers, Integers]:
    """Returns for each token its position, or that in the first of the adjacent sequences of its owner where it comes
    after the same prefix; and for each sequence how many tokens it has in common with this first one."""
    starts = np.cumsum(lengths) - lengths
    here = np.arange(len(tokens))
    seq = np.repeat(np.arange(len(lengths)), lengths)
    positions = here - starts[seq]
    begins = np.append(True, owners[1:] != owners[:-1])
    leader = np.flatnonzero(begins)[np.cumsum(begins) - 1][seq]
    first = starts[leader] + np.minimum(positions, lengths[leader] - 1)
    same = (tokens[first] == tokens) & (positions < lengths[leader])
    common = np.minimum.reduceat(np.where(same, len(tokens), positions), starts)
    return np.where(positions < common[seq], first, here), common


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Layout,
    parallel: SequenceParallel | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Returns the attention output [1, D, heads, head size] of query [1, heads, D, head size], key and value.

    `packing` is the row's layout, passed as a keyword argument to the model's forward; with `parallel`, the D tokens
    are this rank's part. Dropout is not applied, as in the policy that sampled the tokens. With a `sliding_window`, a
    token attends to that many tokens, including itself.
    Raises ConfigError for unsupported kinds of attention.
    """
    if softcap is not None or s_aux is not None:
        raise ConfigError("model.path: models with capped attention scores or attention sinks cannot be trained")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if parallel is not None:
        q, k, v = parallel.by_heads(q, k, v, len(packing.computed))
    if varlen.has_kernel(q):
        output = varlen.attend(q, k, v, packing.segments, scaling=scaling, window=sliding_window)
    else:
        output = attend_in_buckets(q, k, v, packing, scaling=scaling, window=sliding_window)
    if parallel is not None:
        output = parallel.by_tokens(output)
    return output.unsqueeze(0), None


def attend_in_buckets(
    query: Tensor, key: Tensor, value: Tensor, packing: Layout, *, scaling: float | None, window: int | None
) -> Tensor:
    """Returns the attention output [D, heads, size] of query [D, heads, size], key and value [D, key heads, size]."""
    outputs: list[Tensor] = []
    for bucket in packing.buckets:
        q, k, v = (
            tensor.index_select(0, bucket.source).unflatten(0, (bucket.batch, bucket.length)).transpose(1, 2)
            for tensor in (query, key, value)
        )
        mask = None
        if window is not None and bucket.length > window:
            mask = window_mask(bucket.length, window, q.device)
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and lacks_grouped_kernel(q, mask):
            k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
            groups = 1
        output = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=groups > 1
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, packing.restore)


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Returns bool [length, length], true where a token (row) attends to another: itself and the `window` - 1 tokens
    before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril_().triu_(1 - window)


def lacks_grouped_kernel(query: Tensor, mask: Tensor | None) -> bool:
    """True if torch has no memory-efficient attention kernel for grouped key and value heads: on a GPU in float32 or
    with a mask, where only the kernel that writes all scores supports them. Not measured on a GPU yet."""
    return is_on_gpu(query) and (query.dtype is torch.float32 or mask is not None)


AttentionInterface.register(PACKED, packed_attention)
