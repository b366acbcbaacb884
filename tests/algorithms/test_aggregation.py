"""Aggregation of token losses: against a plain loop, over parts of a batch, and in any order."""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest
import torch
from algorithm_batches import CLOSE, Batch, batches, double, reordered
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.losses import aggregate


def loop_aggregate(values: list[float], seq: list[int], mode: str, max_length: int) -> float:
    rows = [[v for v, s in zip(values, seq, strict=True) if s == number] for number in sorted(set(seq))]
    match mode:
        case "token-mean":
            return sum(values) / len(values)
        case "token-sum":
            return sum(values)
        case "seq-mean-token-sum":
            return mean(sum(row) for row in rows)
        case "seq-mean-token-mean":
            return mean(mean(row) for row in rows)
        case _:
            return mean(sum(row) / max_length for row in rows)


@pytest.mark.parametrize(
    "mode",
    ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"],
)
@given(batches({"loss": (-3, 3)}), st.integers(0, 5))
def test_aggregate_and_its_parts(mode: Any, batch: dict[str, Any], cut: int) -> None:
    loss, seq = double(batch["loss"]), torch.tensor(batch["seq"])
    whole = aggregate(loss, seq, mode=mode, max_length=7)
    expected = loop_aggregate(batch["loss"], batch["seq"], mode, 7)
    assert float(whole) == pytest.approx(expected, abs=1e-9)
    first = seq < cut
    counts = {"num_tokens": len(seq), "num_sequences": len(set(batch["seq"]))}
    parts = [aggregate(loss[part], seq[part], mode=mode, max_length=7, **counts) for part in (first, ~first)]
    torch.testing.assert_close(parts[0] + parts[1], whole, **CLOSE)


@given(batches({"loss": (-3, 3)}), st.randoms(use_true_random=False))
def test_aggregation_does_not_depend_on_order(batch: Batch, random: Any) -> None:
    order = sorted(set(batch["seq"]))
    random.shuffle(order)
    index = reordered(batch["seq"], order)
    loss, seq = double(batch["loss"]), torch.tensor(batch["seq"])
    rank = torch.tensor([order.index(number) for number in batch["seq"]])
    modes: list[Any] = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
    for mode in modes:
        moved = aggregate(loss[index], 2 * rank[index], mode=mode)
        torch.testing.assert_close(moved, aggregate(loss, seq, mode=mode), **CLOSE)
