"""Batches are dealt to any number of learner ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.replay.history import balance, split_between_ranks
from tests.helpers.examples import examples


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], dict[int, int]]:
    """A batch as it was dealt to some ranks, in any order, and the costs of its tickets."""
    costs = draw(st.dictionaries(st.integers(0, 200), st.integers(1, 5_000), max_size=24))
    tickets = draw(st.permutations(sorted(costs)))
    ranks = draw(st.integers(1, 8))
    return [list(part) for part in np.array_split(np.array(tickets, dtype=int), ranks)], costs


@settings(max_examples=examples(100))
@given(batch=batches(), ranks=st.integers(1, 24), between=st.integers(1, 24))
def test_each_ticket_is_in_one_shard_whatever_launches_were_between(
    batch: tuple[list[list[int]], dict[int, int]], ranks: int, between: int
) -> None:
    shards, costs = batch
    shards = [[int(ticket) for ticket in shard] for shard in shards]
    dealt = split_between_ranks(ranks, shards, costs)
    assert len(dealt) == ranks
    assert sorted(ticket for shard in dealt for ticket in shard) == sorted(costs)
    assert dealt == split_between_ranks(ranks, shards, dict(reversed(costs.items())))
    if ranks == len(shards):
        assert dealt == shards
        return
    assert max(map(len, dealt)) <= -(-len(costs) // ranks)
    if len(costs) % ranks == 0:
        assert {len(shard) for shard in dealt} == {len(costs) // ranks}
    if between != ranks:
        assert split_between_ranks(ranks, split_between_ranks(between, shards, costs), costs) == dealt


@settings(max_examples=examples(100))
@given(costs=st.lists(st.integers(1, 5_000), max_size=24), ranks=st.integers(1, 8))
def test_no_rank_has_much_more_than_another(costs: list[int], ranks: int) -> None:
    sums = [sum(costs[index] for index in part) for part in balance(costs, ranks)]
    if len(costs) % ranks == 0:
        assert max(sums) - min(sums) <= max(costs, default=0) * max(1, len(costs) // ranks)
