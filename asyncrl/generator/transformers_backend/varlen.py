"""The kernels of a GPU in 16 bits, on torch's attention for variable lengths.

Each is tried on a small batch before it is used: which of its options work depends on the release of torch and on the
GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from inspect import signature
from typing import Any

import structlog
import torch
from torch import Tensor

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

from asyncrl.generator.transformers_backend.attention import Kernel, padded_attention
from asyncrl.generator.transformers_backend.batch import Batch, Row, sort_rows
from asyncrl.generator.transformers_backend.cache import HeadShape, PagedCache

log = structlog.get_logger()

PAGE_TOKENS = 16
LARGE_PAGE_TOKENS = 256
"""Size of pages that torch's kernel reads through a table of pages."""
TOLERANCE = 0.05
"""Largest distance between the outputs of two kernels for a token, relative to its norm. Rounding in bfloat16 causes
0.01, another mask 0.3 and more."""


def _attend(
    batch: Batch, q: Tensor, keys: Tensor, values: Tensor, *, scale: float | None, window: int | None, **paged: Any
) -> Tensor:
    """Calls torch's kernel with keys and values [..., heads, size]."""
    assert varlen_attn is not None
    return varlen_attn(
        q.contiguous(),
        keys,
        values,
        batch.query_ends,
        batch.key_ends,
        batch.max_query,
        batch.max_key,
        scale=scale,
        window_size=_window(window),
        **_grouped(varlen_attn, q.shape[1] != keys.shape[-2]),
        **paged,
    )  # type: ignore[return-value]


def table_attention(
    batch: Batch, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int | None
) -> Tensor:
    """Reads keys and values through the table of pages."""
    assert batch.cache is not None
    keys, values = (tensor.unflatten(0, (-1, batch.cache.page_tokens)) for tensor in batch.cache.layers[layer])
    paged = {"seqused_k": batch.key_lengths, "block_table": batch.page_table}
    return _attend(batch, q, keys, values, scale=scale, window=window, **paged)


def gathered_attention(
    batch: Batch, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int | None
) -> Tensor:
    """Copies keys and values of all rows from the cache first."""
    assert batch.cache is not None
    keys, values = (tensor.index_select(0, batch.key_source) for tensor in batch.cache.layers[layer])
    return _attend(batch, q, keys, values, scale=scale, window=window)


@cache
def _grouped(function: Callable[..., Any], grouped: bool) -> dict[str, Any]:
    """The option for several query heads for a head of keys, which releases before 2.12 accept without it."""
    return {"enable_gqa": grouped} if "enable_gqa" in signature(function).parameters else {}


def _window(window: int | None) -> tuple[int, int]:
    return (-1, 0) if window is None else (window - 1, 0)


def choose_kernel(
    shapes: Mapping[int, HeadShape], heads: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[Kernel, int]:
    """Returns the fastest kernel that computes what `padded_attention` does for a model with these keys and values and
    this number of query heads, and the tokens of a page."""
    if device.type != "cuda" or dtype is torch.float32 or varlen_attn is None:
        return padded_attention, PAGE_TOKENS
    for kernel, page_tokens in ((table_attention, LARGE_PAGE_TOKENS), (gathered_attention, PAGE_TOKENS)):
        fault = _fault(kernel, page_tokens, set(shapes.values()), heads, dtype=dtype, device=device)
        if not fault:
            log.info("attention kernel", kernel=kernel.__name__)
            return kernel, page_tokens
        log.warning("attention kernel cannot be used: decoding is slower", kernel=kernel.__name__, reason=fault)
    return padded_attention, PAGE_TOKENS


def _fault(
    kernel: Kernel, page_tokens: int, shapes: set[HeadShape], heads: int, *, dtype: torch.dtype, device: torch.device
) -> str:
    """Why the kernel cannot be used; "" if it can. Rows have other numbers of queries than of keys, so that a mask that
    is aligned at the wrong end shows."""
    lengths = ((0, 5), (page_tokens + 7, 1), (9, 3), (page_tokens - 2, 4))
    for shape in shapes:
        if heads % shape.heads:
            return f"{heads} query heads are no multiple of {shape.heads}"
        cache = PagedCache({0: shape}, num_pages=8, page_tokens=page_tokens, dtype=dtype, device=device)
        rows: list[Row] = []
        for start, count in lengths:
            pages: list[int] = []
            cache.extend(pages, start + count)
            rows.append(Row([0] * count, start, pages))
        batch = Batch([rows[i] for i in sort_rows(rows)], cache, device)
        random = torch.Generator(device).manual_seed(0)
        for tensor in cache.layers[0]:
            tensor.normal_(generator=random)
        tokens = sum(count for _, count in lengths)
        q = torch.randn(tokens, heads, shape.key_size, dtype=dtype, device=device, generator=random)
        k, v = (tensor.index_select(0, batch.places) for tensor in cache.layers[0])
        for window in (None, 4):
            try:
                found = kernel(batch, 0, q, k, v, scale=None, window=window)
            except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
                return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            expected = padded_attention(batch, 0, q, k, v, scale=None, window=window)
            distance = (found.float() - expected.float()).flatten(1).norm(dim=1)
            difference = float((distance / expected.float().flatten(1).norm(dim=1)).max())
            if not difference <= TOLERANCE:
                return f"its output differs by {difference:.2g} of its norm with window = {window}"
    return ""
