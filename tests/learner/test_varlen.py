"""The inputs of torch's kernel for sequences of all lengths, with a plain kernel instead, against padded buckets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.learner.model import attention
from asyncrl.learner.model.attention import attend_in_buckets, find_firsts, make_layout, packed_attention
from tests.helpers.examples import examples

groups_of_tokens = st.lists(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=4), min_size=1, max_size=6
)


def plain_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """Computes what torch documents of `varlen_attn`: queries are the last tokens of their keys, and see `window_size`
    tokens to the left, or all for -1, and none to the right."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and window_size[1] == 0
    query_counts, key_counts = cu_seq_q.diff(), cu_seq_k.diff()
    assert max_q == query_counts.max() and max_k == key_counts.max() and query_counts.min() > 0
    assert len(query) == cu_seq_q[-1] and len(key) == len(value) == cu_seq_k[-1]
    groups = query.shape[1] // key.shape[1]
    assert enable_gqa is (groups > 1)
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    outputs: list[Tensor] = []
    for q, k, v in zip(
        query.split(query_counts.tolist()),
        key.split(key_counts.tolist()),
        value.split(key_counts.tolist()),
        strict=True,
    ):
        scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
        distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        seen = (distance >= 0) & ((distance <= window_size[0]) if window_size[0] >= 0 else True)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(outputs)


def ungrouped_kernel(*tensors: Any, scale: float | None, window_size: tuple[int, int]) -> Tensor:
    """The kernel of torch 2.11, which takes equal numbers of heads only."""
    assert tensors[0].shape[1] == tensors[1].shape[1]
    return plain_kernel(*tensors, scale=scale, window_size=window_size)


@pytest.fixture(params=[plain_kernel, ungrouped_kernel])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = set(attention.signature(request.param).parameters)
    monkeypatch.setattr(attention, "varlen_attn", request.param)
    monkeypatch.setattr(attention, "PARAMETERS", parameters)


def row_of(groups: list[list[list[int]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, lengths of sequences, and their groups."""
    rows = [(number, tokens) for number, group in enumerate(groups) for tokens in group]
    sizes = np.array([len(tokens) for _, tokens in rows])
    return np.array([token for _, tokens in rows for token in tokens]), sizes, np.array([n for n, _ in rows])


@settings(max_examples=examples(40))
@given(groups_of_tokens, st.booleans(), st.sampled_from([None, 1, 3, 100]))
def test_the_kernel_gets_each_sequence_with_its_shared_tokens(
    groups: list[list[list[int]]], shared: bool, window: int | None
) -> None:
    tokens, sizes, owners = row_of(groups)
    layout = make_layout(sizes, find_firsts(tokens, sizes, owners) if shared else None)
    generator = torch.Generator().manual_seed(0)
    size = (len(layout.computed), 2, 4)
    q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "varlen_attn", plain_kernel)
        output = attention.attend_varlen(q, k, v, layout.segments, scaling=None, window=window)
    expected = attend_in_buckets(q, k, v, layout, scaling=None, window=window)
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("common", [0, 40])
def test_outputs_and_gradients_are_those_of_padded_buckets(
    common: int, window: int | None, kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With grouped heads, and one sequence that is another's beginning and so has no token of its own."""
    torch.manual_seed(0)
    sizes = np.array([3, 70, 1, 43, 200, common or 40, 90])
    tokens, owners = np.arange(sizes.sum()), np.array([0, 1, 2, 3, 3, 3, 3])
    for start in (np.cumsum(sizes) - sizes)[3:]:
        tokens[start : start + common] = np.arange(common)
    layout = make_layout(sizes, find_firsts(tokens, sizes, owners))
    assert len(layout.segments.queries_before) - 1 == (6 if common else 7)
    inputs = [torch.randn(1, heads, len(layout.computed), 8, dtype=torch.float64) for heads in (4, 2, 2)]
    results: list[list[Tensor]] = []
    for available in (True, False):
        monkeypatch.setattr(attention, "has_varlen_kernel", lambda query, available=available: available)
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        q, k, v = leaves
        output, _ = packed_attention(
            torch.nn.Module(), q, k, v, None, packing=layout, scaling=0.3, sliding_window=window
        )
        (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
        results.append([output, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)


def test_a_layout_is_moved_with_its_segments() -> None:
    sizes = np.array([4, 4])
    layout = make_layout(sizes, find_firsts(np.array([1, 2, 3, 4, 1, 2, 5, 6]), sizes, np.array([0, 0])))
    moved = layout.to(torch.device("meta")).segments
    assert moved.keys is not None
    assert {tensor.device.type for tensor in (moved.keys, moved.queries_before, moved.keys_before)} == {"meta"}
    assert (moved.max_queries, moved.max_keys) == (4, 4)


@pytest.mark.parametrize(
    ("is_cuda", "dtype", "size", "capability", "parameters", "expected"),
    [
        (True, torch.bfloat16, 128, (9, 0), {"scale", "window_size"}, True),
        (True, torch.float16, 256, (8, 0), {"scale", "window_size"}, True),
        (True, torch.bfloat16, 256, (8, 9), {"scale", "window_size"}, False),
        (True, torch.bfloat16, 128, (7, 5), {"scale", "window_size"}, False),
        (True, torch.bfloat16, 100, (9, 0), {"scale", "window_size"}, False),
        (True, torch.bfloat16, 128, (9, 0), {"is_causal"}, False),
        (True, torch.float32, 128, (9, 0), {"scale", "window_size"}, False),
        (False, torch.bfloat16, 128, (9, 0), {"scale", "window_size"}, False),
    ],
)
def test_the_kernel_is_used_where_it_exists(
    is_cuda: bool,
    dtype: torch.dtype,
    size: int,
    capability: tuple[int, int],
    parameters: set[str],
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Query:
        device = None
        shape = (7, 4, size)
        is_meta = False

    Query.is_cuda, Query.dtype = is_cuda, dtype  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(attention, "PARAMETERS", parameters)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert attention.has_varlen_kernel(Query()) is expected  # pyright: ignore[reportArgumentType]
