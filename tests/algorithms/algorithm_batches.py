"""Random batches for the oracle and invariant tests, and ranks as threads."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algorithms.losses import LOSSES, PolicyTerms

CLOSE: dict[str, Any] = {"atol": 1e-9, "rtol": 1e-9}
Batch = dict[str, Any]


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32, allow_subnormal=False)


@st.composite
def batches(draw: st.DrawFn, columns: dict[str, tuple[float, float]]) -> Batch:
    """Draws `seq`, a list of ascending sequence numbers, and columns of the same length."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    seq = [i for i, length in enumerate(lengths) for _ in range(length)]
    return {"seq": seq} | {
        name: draw(st.lists(numbers(*bounds), min_size=len(seq), max_size=len(seq))) for name, bounds in columns.items()
    }


def _shuffled(batch: Batch) -> st.SearchStrategy[Batch]:
    count = len(batch["seq"])
    return st.tuples(st.permutations(range(count)), st.lists(st.integers(1, 9), min_size=count, max_size=count)).map(
        lambda drawn: {
            "rewards": [batch["rewards"][i] for i in drawn[0]],
            "group": [7 * batch["seq"][i] for i in drawn[0]],
            "lengths": drawn[1],
        }
    )


grouped = batches({"rewards": (-3, 3)}).flatmap(_shuffled)
"""Sequences with rewards, lengths, and group numbers in any order and with gaps."""
tokens = batches({"logprobs": (-4, 0), "proximal": (-4, 0), "behavior": (-4, 0), "advantages": (-2, 2)})
episodes = batches({"log_ratios": (-2, 2), "rewards": (-3, 3), "values": (-3, 3)})


def double(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gradient(loss: Tensor, logprobs: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), logprobs)[0]


def on_ranks(parts: Sequence[Any], call: Callable[[Any, Callable[[Tensor], Tensor]], Tensor]) -> list[Tensor]:
    """Returns `call(part, reduce)` of each part, computed in separate threads; `reduce` sums over them in order."""
    slots: list[Tensor] = [torch.empty(0)] * len(parts)
    barrier = threading.Barrier(len(parts), timeout=30)

    def run(rank: int) -> Tensor:
        def reduce(x: Tensor) -> Tensor:
            slots[rank] = x
            barrier.wait()
            total = torch.stack(slots).sum(dim=0)
            barrier.wait()
            return total

        return call(parts[rank], reduce)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(run, range(len(parts))))


def reordered(seq: list[int], order: list[int]) -> Tensor:
    """Returns the token indices that sort the sequences into `order`."""
    return torch.tensor([i for number in order for i, own in enumerate(seq) if own == number], dtype=torch.int64)


def terms(batch: Batch, dtype: torch.dtype = torch.float64) -> PolicyTerms:
    columns = (
        torch.tensor(batch[name], dtype=dtype, requires_grad=name == "logprobs")
        for name in ("logprobs", "proximal", "behavior", "advantages")
    )
    return PolicyTerms(*columns, seq=torch.tensor(batch["seq"]))


def call(name: str, given_terms: PolicyTerms) -> Tensor:
    """Returns the loss `name` with its default options and the terms that it takes."""
    parameters = inspect.signature(LOSSES[name]).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    return LOSSES[name](*(getattr(given_terms, key) for key in names))
