"""Dealing groups to learner ranks."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.errors import InvariantError


def balance(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Deals indices into `parts` lists of equal length with nearly equal sums of cost (largest first).

    `parts` divides `len(costs)`.
    """
    if len(costs) % parts:
        raise InvariantError(f"balance: {parts} parts do not divide {len(costs)} items")
    size = len(costs) // parts
    bins: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        target = min((b for b in range(parts) if len(bins[b]) < size), key=lambda b: (sums[b], b))
        bins[target].append(index)
        sums[target] += costs[index]
    return [sorted(b) for b in bins]
