"""The buckets in which versions come into engines, as arithmetic."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.weights.layout import ALIGN_BYTES, WeightManifest, plan_buckets, shares_of_ranks

SHAPES = st.lists(
    st.one_of(st.just(()), st.tuples(st.integers(0, 400)), st.tuples(st.integers(1, 90), st.integers(1, 30))),
    min_size=1,
    max_size=8,
)


@given(SHAPES, st.integers(1, 4), st.integers(64, 4096), st.data())
def test_every_byte_of_every_parameter_comes_once_into_its_place(
    shapes: list[tuple[int, ...]], ranks: int, bucket_bytes: int, data: st.DataObject
) -> None:
    dtypes = [data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8])) for _ in shapes]
    layout = WeightManifest.of(
        (str(i), dtype, shape) for i, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True))
    )
    in_rows = data.draw(st.sets(st.sampled_from([str(i) for i in range(len(shapes))])))
    shares = shares_of_ranks(layout, ranks, bucket_bytes, by_parameter=True)
    plan = plan_buckets(layout, shares, bucket_bytes, in_rows.__contains__)
    whole = torch.randint(0, 255, (layout.num_bytes,), dtype=torch.uint8)
    found = {name: torch.zeros_like(tensor) for name, tensor in layout.views(whole)}
    counts = [0] * ranks
    for bucket in plan:
        memory = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        for piece in bucket.pieces:
            cut = shares[piece.sender].cuts[counts[piece.sender]]
            assert (cut.start, cut.num_bytes) == (piece.start, piece.num_bytes), "in the order of its sender"
            counts[piece.sender] += 1
            memory[piece.at : piece.at + piece.num_bytes] = whole[piece.start : piece.start + piece.num_bytes]
        for part in bucket.parts(memory):
            assert part.first_row is None or part.name in in_rows
            target = found[part.name]
            if part.first_row is not None:
                target = target[part.first_row : part.first_row + len(part.tensor)]
            target.copy_(part.tensor)
        largest = max(
            entry.num_bytes if row is None else entry.num_bytes // entry.shape[0] for entry, row in bucket.entries
        )
        assert bucket.num_bytes <= max(bucket_bytes, largest) + ALIGN_BYTES
    assert counts == [len(share.cuts) for share in shares]
    for name, tensor in layout.views(whole):
        assert bytes(found[name].reshape(-1).view(torch.uint8).tolist()) == bytes(
            tensor.reshape(-1).view(torch.uint8).tolist()
        )


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_receivers_take_the_pieces_in_one_order(ranks: int) -> None:
    layout = WeightManifest.of(
        [("a", torch.float32, (100, 8)), ("b", torch.float32, (5,)), ("c", torch.bfloat16, (64, 9))]
    )
    shares = shares_of_ranks(layout, ranks, 256, by_parameter=True)
    orders = [
        [(piece.sender, piece.start) for bucket in plan_buckets(layout, shares, 256, rows) for piece in bucket.pieces]
        for rows in (lambda name: False, lambda name: True, lambda name: name == "c")
    ]
    assert orders[0] == orders[1] == orders[2]
    assert len(plan_buckets(layout, shares, 256, lambda name: True)) > len(plan_buckets(layout, shares, 256))
