"""Deals the groups of a batch to the learner ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def balance(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Deals indices into `parts` lists with nearly equal total cost (greedy, largest first). The lists have equal
    lengths if `parts` divides `len(costs)`, and otherwise at most that many items, rounded up."""
    size = -(-len(costs) // parts)
    bins: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        target = min((b for b in range(parts) if len(bins[b]) < size), key=lambda b: (sums[b], b))
        bins[target].append(index)
        sums[target] += costs[index]
    return [sorted(b) for b in bins]


def shards_for(ranks: int, shards: list[list[int]], costs: Mapping[int, int]) -> list[list[int]]:
    """The tickets of each of `ranks` learner ranks, for a batch that was recorded with these shards; `costs` are the
    tokens of each ticket's group.

    With the recorded number of ranks the shards are the recorded ones, in their order, so that training again gives the
    same bits. With another number they depend on the tickets and their costs alone: each launch with that number deals
    the batch the same way, whatever the launches between did.
    """
    if len(shards) == ranks:
        return shards
    tickets = sorted(ticket for shard in shards for ticket in shard)
    return [[tickets[index] for index in part] for part in balance([costs[ticket] for ticket in tickets], ranks)]
