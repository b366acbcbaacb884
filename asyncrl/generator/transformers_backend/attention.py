"""Causal attention over the paged cache, registered with transformers under the name PAGED.

The model computes the tokens of all requests as one row. Keys and values of the row are written to the cache, then each
token attends to its request's tokens. A GPU in 16 bits has torch's kernel for variable lengths, which is tried on a
small batch before it is used: not every GPU and every size of heads has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from asyncrl.errors import ConfigError
from asyncrl.generator.transformers_backend.cache import HeadShape, PagedCache, Row, StepBatch, sort_rows

log = structlog.get_logger()

PAGED = "asyncrl_paged"
"""Value of `attn_implementation` that selects `paged_attention`."""
PAGE_TOKENS = 16
LARGE_PAGE_TOKENS = 256
"""Size of pages that torch's kernel reads through a table of pages."""
TOLERANCE = 0.05
"""Largest distance between the outputs of two kernels for a token, relative to its norm. Rounding in bfloat16 causes
0.01, another mask 0.3 and more."""


class Kernel(Protocol):
    """Computes the attention of a batch whose keys and values are in the cache."""

    def __call__(
        self, batch: StepBatch, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int | None
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
    paged: StepBatch,
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
    batch: StepBatch, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int | None
) -> Tensor:
    """The kernel of any device and dtype: one call for all decoding rows, padded to the longest, and one for each
    other row."""
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
    outputs += [_attend_row(batch, layer, index, (q, k, v), scale, window) for index in range(count, len(batch.rows))]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_row(
    batch: StepBatch,
    layer: int,
    index: int,
    fresh: tuple[Tensor, Tensor, Tensor],
    scale: float | None,
    window: int | None,
) -> Tensor:
    row, first = batch.rows[index], int(batch.offsets[index])
    q, k, v = (tensor[first : first + len(row.tokens)] for tensor in fresh)
    if row.start:
        assert batch.cache is not None
        k, v = (tensor.index_select(0, batch.sources[index]) for tensor in batch.cache.layers[layer])
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    mask = None
    if row.start or (window is not None and row.end > window):
        mask = torch.ones(len(row.tokens), row.end, dtype=torch.bool, device=q.device).tril_(row.start)
        if window is not None:
            mask = mask.triu_(row.start + 1 - window)
    share = q.shape[1] // k.shape[1]
    if share > 1 and q.is_cuda and (q.dtype is torch.float32 or mask is not None):
        # Only the kernel that writes all scores has grouped heads there.
        k, v = (tensor.repeat_interleave(share, dim=1) for tensor in (k, v))
        share = 1
    output = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=share > 1
    )
    return output[0].transpose(0, 1)


def table_attention(
    batch: StepBatch, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int | None
) -> Tensor:
    """Torch's kernel for variable lengths, which reads keys and values through the table of pages."""
    assert batch.cache is not None
    keys, values = (tensor.unflatten(0, (-1, batch.cache.page_tokens)) for tensor in batch.cache.layers[layer])
    return varlen_attn(
        q.contiguous(),
        keys,
        values,
        batch.query_ends,
        batch.key_ends,
        batch.max_query,
        batch.max_key,
        scale=scale,
        window_size=(-1, 0) if window is None else (window - 1, 0),
        enable_gqa=q.shape[1] != keys.shape[-2],
        seqused_k=batch.key_lengths,
        block_table=batch.page_table,
    )  # type: ignore[return-value]


def choose_kernel(
    shapes: Mapping[int, HeadShape], heads: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[Kernel, int]:
    """Returns the fastest kernel that computes what `padded_attention` does for a model with these keys and values and
    this number of query heads, and the tokens of a page."""
    if device.type != "cuda" or dtype is torch.float32:
        return padded_attention, PAGE_TOKENS
    if fault := table_fault(set(shapes.values()), heads, dtype=dtype, device=device):
        log.warning("torch's kernel for variable lengths cannot be used: decoding is slower", reason=fault)
        return padded_attention, PAGE_TOKENS
    return table_attention, LARGE_PAGE_TOKENS


def table_fault(shapes: set[HeadShape], heads: int, *, dtype: torch.dtype, device: torch.device) -> str:
    """Returns why `table_attention` cannot be used; "" if it can. Rows have other numbers of queries than of keys, to
    expose a mask that is aligned at the wrong end."""
    size = LARGE_PAGE_TOKENS
    for shape in shapes:
        if heads % shape.heads:
            return f"{heads} query heads are no multiple of {shape.heads}"
        cache = PagedCache({0: shape}, num_pages=8, page_tokens=size, dtype=dtype, device=device)
        rows: list[Row] = []
        for start, count in ((0, 5), (size + 7, 1), (9, 3), (size - 2, 4)):
            pages: list[int] = []
            cache.extend(pages, start + count)
            rows.append(Row([0] * count, start, pages))
        batch = StepBatch([rows[i] for i in sort_rows(rows)], cache, device)
        random = torch.Generator(device).manual_seed(0)
        for tensor in cache.layers[0]:
            tensor.normal_(generator=random)
        q = torch.randn(len(batch.places), heads, shape.key_size, dtype=dtype, device=device, generator=random)
        k, v = (tensor.index_select(0, batch.places) for tensor in cache.layers[0])
        for window in (None, 4):
            try:
                output = table_attention(batch, 0, q, k, v, scale=None, window=window)
            except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
                return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            expected = padded_attention(batch, 0, q, k, v, scale=None, window=window)
            distance = (output.float() - expected.float()).flatten(1).norm(dim=1)
            difference = float((distance / expected.float().flatten(1).norm(dim=1)).max())
            if not difference <= TOLERANCE:
                return f"its output differs by {difference:.2g} of its norm with window = {window}"
    return ""


AttentionInterface.register(PAGED, paged_attention)
