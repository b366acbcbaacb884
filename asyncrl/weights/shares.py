"""Which part of the weights each learner rank has: arithmetic on shapes and the number of ranks."""

from __future__ import annotations


def slice_of(num_elements: int, rank: int, ranks: int) -> tuple[int, int]:
    """Returns the elements of a flat parameter, from the first to before the last, that this rank of ZeRO stage 3 has.
    Its own tensor is longer in the last ranks, padded to the size of the others."""
    size = -(-num_elements // ranks)
    return min(rank * size, num_elements), min((rank + 1) * size, num_elements)
