"""Causal attention over packed sequences: a flat row of tokens in which no sequence attends to another.

Registered with transformers under the name PACKED. Sequences of one group begin with the same tokens, which have the
same hidden states; all layers but the attention compute those tokens once. The attention is one call of torch's kernel
for sequences of all lengths where there is one. Elsewhere it uses padding: it gathers sequences of similar length into
[batch, length] buckets.

Ranks may share their sequences (Ulysses, arXiv:2309.14509): each computes a part of the tokens of every row. Only
attention sees all tokens, of a part of the heads: before it, the ranks exchange tokens for heads, and after it heads
for tokens. The results for the tokens of each are then collected, so that all ranks have the same losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from asyncrl.errors import ConfigError

Integers = NDArray[np.int64]
PACKED = "asyncrl_packed"
"""Value of `attn_implementation` that selects `packed_attention`."""
BUCKET_RANGE = 0.75
"""Minimum ratio of the shortest to the longest sequence in a bucket. The cost of attention is quadratic in the padded
length; a narrower range needs more calls."""
SMALL_TOKENS = 64
"""Maximum length of sequences that share a bucket regardless of their lengths: padding is cheaper than another call."""
LARGE_HEADS = ((8, 0), (9, 0), (10, 0))
"""Compute capabilities that have the backward pass for heads of more than 192 elements."""
_META_AS_GPU: ContextVar[bool] = ContextVar("meta tensors stand for tensors on a GPU", default=False)


@dataclass(frozen=True, slots=True)
class PaddedBucket:
    """Sequences of similar length, padded to [batch, length]."""

    batch: int
    length: int
    source: Tensor
    """int64 [batch * length], index of the computed token at each place; padding repeats the last token of its
    sequence."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Queries and keys of the S sequences with computed tokens that no other sequence has. These are the last
    tokens of their sequence, and attend to all of its tokens before them."""

    keys: Tensor | None
    """int64, index among the computed tokens of each key; None if the keys are the computed tokens in their order."""
    queries_before: Tensor
    """int32 [S + 1], number of queries before each sequence."""
    keys_before: Tensor
    """int32 [S + 1], number of keys before each sequence."""
    max_queries: int
    max_keys: int


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Index maps of a packed row of T tokens. The model computes D distinct tokens; each other token has the same
    hidden state as one of them."""

    computed: Tensor
    """int64 [D], positions in the row of the tokens that the model computes."""
    twins: Tensor
    """int64 [T], index among the D computed tokens of each token of the row."""
    buckets: list[PaddedBucket]
    restore: Tensor
    """int64 [D], position of each computed token in the concatenated buckets."""
    segments: Segments


def make_layout(lengths: Integers, firsts: Integers | None = None) -> PackedLayout:
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
    buckets: list[PaddedBucket] = []
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
        buckets.append(PaddedBucket(len(members), length, torch.from_numpy(twins[source.reshape(-1)])))
        offset += source.size
    computed_at, twins_at, restore_at = (torch.from_numpy(array) for array in (computed, twins, restore[computed]))
    return PackedLayout(computed_at, twins_at, buckets, restore_at, make_segments(lengths, computed, twins))


def make_segments(lengths: Integers, computed: Integers, twins: Integers) -> Segments:
    """Returns the segments of a packed row of sequences [S] from the positions `computed` of the computed tokens, and
    the index `twins` of the computed token that each token of the row has the hidden state of."""
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    num_own = np.bincount(sequence[computed], minlength=len(lengths))
    keys = None if len(computed) == len(sequence) else torch.from_numpy(twins[num_own[sequence] > 0])
    queries, keys_of = num_own[num_own > 0], lengths[num_own > 0]
    queries_before, keys_before = (
        torch.from_numpy(np.append(0, np.cumsum(counts)).astype(np.int32)) for counts in (queries, keys_of)
    )
    return Segments(keys, queries_before, keys_before, int(queries.max(initial=0)), int(keys_of.max(initial=0)))


def find_firsts(tokens: Integers, lengths: Integers, groups: Integers, members: Integers | None = None) -> Integers:
    """Returns, for each token of a packed row, the first position in the row of the same token after the same prefix:
    the token's own position, or one in the first sequence of its group or of its member of the group, whichever has
    more tokens in common with it. The sequences [S] of a group are adjacent, and so are a member's."""
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
    packing: PackedLayout,
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
    if has_varlen_kernel(q):
        output = attend_varlen(q, k, v, packing.segments, scaling=scaling, window=sliding_window)
    else:
        output = attend_in_buckets(q, k, v, packing, scaling=scaling, window=sliding_window)
    if parallel is not None:
        output = parallel.by_tokens(output)
    return output.unsqueeze(0), None


def has_varlen_kernel(query: Tensor) -> bool:
    """True if torch's kernel can compute the attention of queries [D, heads, size] on their device. A GPU that tensors
    stand for has the capability 8.0."""
    if not is_on_gpu(query) or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    capability = torch.cuda.get_device_capability(query.device) if query.is_cuda else (8, 0)
    size = query.shape[-1]
    return capability >= (8, 0) and size % 8 == 0 and size <= (256 if capability in LARGE_HEADS else 192)


def attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scaling: float | None, window: int | None
) -> Tensor:
    """Returns the attention output [D, heads, size] of query [D, heads, size], key and value [D, key heads, size].

    A token attends to the `window` last tokens up to itself, or to all if it is None.
    """
    if segments.keys is not None:
        key, value = key.index_select(0, segments.keys), value.index_select(0, segments.keys)
    output = varlen_attn(
        query,
        key,
        value,
        segments.queries_before,
        segments.keys_before,
        segments.max_queries,
        segments.max_keys,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] > key.shape[1],
    )
    assert isinstance(output, Tensor)
    return output


def attend_in_buckets(
    query: Tensor, key: Tensor, value: Tensor, packing: PackedLayout, *, scaling: float | None, window: int | None
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
        if groups > 1 and is_on_gpu(q):  # its kernels for grouped heads in float32 or with a mask store all scores
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
        local = torch.nonzero(places // size == self.rank).squeeze(-1)
        return local, places[local] - self.rank * size

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
        """Returns the output [part, heads, head size] of all heads and this rank's tokens, from the output of its heads
        and all tokens [D, heads / size, head size]."""
        size = self._part_size(len(output))
        padding = output.new_zeros(size * self.size - len(output), *output.shape[1:])
        parts = torch.cat([output, padding]).unflatten(0, (self.size, size))
        return _Exchange.apply(parts, self.group).transpose(0, 1).flatten(1, 2)  # pyright: ignore

    def collect(self, values: Tensor, local: Tensor, count: int) -> Tensor:
        """Returns what all ranks computed [..., count], from this rank's values [..., N] and their places. The gradient
        of each value goes to the rank that computed it."""
        return _Collect.apply(values, local, count, self.group)  # pyright: ignore[reportReturnType]

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
    def forward(ctx: Any, values: Tensor, local: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(local)
        everything = values.new_zeros(*values.shape[:-1], count)
        everything[..., local] = values
        dist.all_reduce(everything, group=group)
        return everything

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None, None, None]:
        (local,) = ctx.saved_tensors
        return slopes[..., local], None, None, None


@contextmanager
def meta_as_gpu(on_gpu: bool) -> Iterator[None]:
    """Tensors on the meta device stand for tensors on a GPU, or else on a CPU, while the context is open."""
    token = _META_AS_GPU.set(on_gpu)
    try:
        yield
    finally:
        _META_AS_GPU.reset(token)


def is_on_gpu(tensor: Tensor) -> bool:
    """True if the tensor is on a GPU, or stands for one that is."""
    return tensor.is_cuda or (tensor.is_meta and _META_AS_GPU.get())


AttentionInterface.register(PACKED, packed_attention)
