"""Packing of groups into rows loses no data and mixes no sequences, with padded buckets and with torch's kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from worlds import make_groups, make_trajectory

from asyncrl.algorithms.advantages import grpo
from asyncrl.errors import ConfigError, InvariantError
from asyncrl.learner.batch import check_staleness, empty_micro_batch, make_batch, pack, pack_groups
from asyncrl.learner.model import attention
from asyncrl.learner.model.attention import find_firsts, make_layout, packed_attention
from asyncrl.types import Group
from tests.helpers.examples import examples

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=40).map(lambda values: np.array(values, dtype=np.int64))

quick = settings(max_examples=examples(60))


@quick
@given(lengths, st.integers(1, 400))
def test_pack_keeps_every_sequence_within_the_budget(sizes: np.ndarray, capacity: int) -> None:
    members = pack(sizes, capacity)
    assert sorted(np.concatenate(members).tolist()) == list(range(len(sizes)))
    for chosen in members:
        assert len(chosen) == 1 or sizes[chosen].sum() <= capacity
    if len(members) > 1:
        loads = sorted(int(sizes[chosen].sum()) for chosen in members)
        assert loads[0] + loads[1] > capacity


@quick
@given(lengths, st.integers(1, 400), st.integers(1, 9))
def test_groups_that_fit_stay_in_one_micro_batch(sizes: np.ndarray, capacity: int, group_size: int) -> None:
    groups = np.arange(len(sizes)) // group_size
    members = pack_groups(sizes, groups, capacity)
    assert sorted(np.concatenate(members).tolist()) == list(range(len(sizes)))
    for chosen in members:
        assert len(chosen) == 1 or sizes[chosen].sum() <= capacity
    for group in np.unique(groups):
        homes = [chosen for chosen in members if group in groups[chosen]]
        assert len(homes) == 1 or sizes[groups == group].sum() > capacity


def attend(query: Tensor, key: Tensor, value: Tensor, sizes: np.ndarray) -> Tensor:
    """Returns the attention output of each sequence computed alone."""
    parts = [t.split(sizes.tolist(), dim=2) for t in (query, key, value)]
    outputs = [scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True) for qkv in zip(*parts, strict=True)]
    return torch.cat(outputs, dim=2).transpose(1, 2)


@pytest.mark.parametrize(("common", "grouped"), [(0, True), (2, True), (2, False)])
def test_packed_attention_is_attention_of_each_sequence(
    common: int, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Includes sequences with a common prefix (the last four), and a GPU, where key heads are repeated."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, **options: Any) -> Tensor:
        assert enable_gqa is grouped and (q.shape[1] == k.shape[1] == v.shape[1]) is not grouped
        return scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", kernel)
    monkeypatch.setattr(attention, "is_on_gpu", lambda tensor: not grouped)
    torch.manual_seed(0)
    sizes = np.array([3, 70, 1, 33, 200, 64, 90])
    total = int(sizes.sum())
    tokens, groups = np.arange(total), np.array([0, 1, 2, 3, 3, 3, 3])
    for start in (np.cumsum(sizes) - sizes)[3:]:
        tokens[start : start + common] = np.arange(common)
    layout = make_layout(sizes, find_firsts(tokens, sizes, groups))
    assert len(layout.computed) == total - 3 * common
    inputs = [torch.randn(1, heads, len(layout.computed), 8, dtype=torch.float64) for heads in (4, 2, 2)]
    packed, alone = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    q, k, v = packed
    output, _ = packed_attention(torch.nn.Module(), q, k, v, None, packing=layout)
    output = output[:, layout.twins]
    q, k, v = (t[:, :, layout.twins] for t in alone)
    expected = attend(q, k, v, sizes)
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-9)
    weights = torch.randn_like(output)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    for one, other in zip(packed, alone, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("window", [1, 2, 64, 65, 199, 200, None])
def test_a_token_attends_to_its_window(window: int | None) -> None:
    torch.manual_seed(0)
    sizes = [3, 70, 200, 64]
    layout = make_layout(np.array(sizes))
    query, key, value = (torch.randn(1, heads, sum(sizes), 8, dtype=torch.float64) for heads in (4, 2, 2))
    output, _ = packed_attention(torch.nn.Module(), query, key, value, None, packing=layout, sliding_window=window)
    start = 0
    for size in sizes:
        for place in (0, size // 2, size - 1):
            seen = slice(start + max(0, place + 1 - (window or size)), start + place + 1)
            one = query[:, :, start + place : start + place + 1]
            expected = scaled_dot_product_attention(one, key[:, :, seen], value[:, :, seen], enable_gqa=True)
            torch.testing.assert_close(output[:, start + place], expected[:, :, 0], atol=1e-12, rtol=1e-9)
        start += size


def test_kinds_of_attention_that_would_be_wrong_are_refused() -> None:
    row = torch.zeros(1, 1, 5, 4)
    layout = make_layout(np.array([5]))
    with pytest.raises(ConfigError, match="capped attention"):
        packed_attention(torch.nn.Module(), row, row, row, None, packing=layout, softcap=30.0)


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_every_action_token_keeps_what_belongs_to_it(budget: int) -> None:
    groups = make_groups(5, version=4)
    groups[1].trajectories[2].action_mask[:] = False  # not trained, but its reward counts in the baseline
    batch = make_batch(groups, tokens_per_microbatch=budget)
    advantages = grpo(batch.rewards, batch.group).float()
    seen: dict[tuple[int, int], list[tuple[float, ...]]] = {}
    for micro in batch.micro_batches:
        assert len(micro.input_ids) <= budget or len(micro.names) == 1
        starts = torch.nonzero(micro.position_ids == 0).flatten()
        for n in range(len(micro.seq)):
            at = int(micro.logit_index[n]) + 1
            position = int(micro.position_ids[at])
            assert at - position == starts[micro.seq[n]] and micro.input_ids[at] == micro.targets[n]
            columns = (micro.targets, micro.behavior_logprobs, micro.versions, advantages[batch.seq[micro.span]])
            name = micro.names[int(micro.seq[n])]
            seen.setdefault(name, []).append((position, *(float(column[n]) for column in columns)))
    expected: dict[tuple[int, int], list[tuple[float, ...]]] = {}
    for group in groups:
        rewards = torch.tensor([t.reward for t in group.trajectories], dtype=torch.float64)
        advantages = grpo(rewards, torch.zeros(4, dtype=torch.int64)).float().tolist()
        for number, trajectory in enumerate(group.trajectories):
            for t in np.flatnonzero(trajectory.action_mask):
                expected.setdefault((group.ticket, number), []).append(
                    (
                        float(t),
                        float(trajectory.tokens[t]),
                        float(trajectory.behavior_logprobs[t]),
                        float(trajectory.versions[t]),
                        advantages[number],
                    )
                )
    assert seen == expected
    assert batch.num_tokens == sum(map(len, expected.values()))
    assert batch.num_sequences == len(expected) == 19


def test_a_rank_without_groups_gets_an_empty_batch() -> None:
    batch = make_batch([], tokens_per_microbatch=10)
    assert batch.micro_batches == [] and batch.num_tokens == batch.num_sequences == 0
    empty = empty_micro_batch()
    assert len(empty.input_ids) == 1 and len(empty.targets) == 0


def one_group(version: int) -> Group:
    groups = make_groups(1)
    groups[0].trajectories = [make_trajectory(np.random.default_rng(0), version)]
    return groups[0]


def test_staleness_is_bound_and_never_negative() -> None:
    group = one_group(3)
    trajectory = group.trajectories[0]
    trajectory.versions[trajectory.action_mask] = 3
    check_staleness([group], version=5, max_staleness=2)
    check_staleness([group], version=3, max_staleness=0)
    with pytest.raises(InvariantError, match="10: a token of version 3 reached the learner at version 6, 3 steps"):
        check_staleness([group], version=6, max_staleness=2)
    with pytest.raises(InvariantError, match="10: a token of version 3 reached the learner at version 2, before its"):
        check_staleness([group], version=2, max_staleness=2)


def test_trajectories_that_cannot_be_trained_are_refused() -> None:
    group = one_group(0)
    group.trajectories[0].action_mask[0] = True
    with pytest.raises(InvariantError, match="ticket 10, trajectory 0: its first token is an action"):
        make_batch([group], tokens_per_microbatch=10)
    group = one_group(0)
    for trajectory in group.trajectories:
        trajectory.status, trajectory.error = "failed", "timed out"
    with pytest.raises(InvariantError, match=r"ticket 10: no member has a reward \(timed out\)"):
        make_batch([group], tokens_per_microbatch=10)


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


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("common", [0, 40])
def test_outputs_and_gradients_are_those_of_padded_buckets(
    common: int, window: int | None, monkeypatch: pytest.MonkeyPatch
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
    monkeypatch.setattr(attention, "varlen_attn", plain_kernel)
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
