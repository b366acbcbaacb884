"""The key-value cache: pages of tokens, which requests own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class HeadShape(NamedTuple):
    """The keys and values of one token in a layer."""

    heads: int
    key_size: int
    value_size: int


def token_bytes(shapes: Mapping[int, HeadShape], dtype: torch.dtype) -> int:
    """Returns the bytes of the keys and values of one token in all layers."""
    return sum(one.heads * (one.key_size + one.value_size) for one in shapes.values()) * dtype.itemsize


class PagedCache:
    """Keys and values of all layers. A page is the same tokens in every layer."""

    def __init__(
        self,
        shapes: Mapping[int, HeadShape],
        *,
        num_pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_tokens = page_tokens
        places = num_pages * page_tokens
        # Zeros, since padding is read with weight 0, and 0 times what was never written could be NaN.
        self.layers: dict[int, tuple[Tensor, Tensor]] = {
            layer: (
                torch.zeros(places, one.heads, one.key_size, dtype=dtype, device=device),
                torch.zeros(places, one.heads, one.value_size, dtype=dtype, device=device),
            )
            for layer, one in shapes.items()
        }
        self._free = list(range(num_pages - 1, -1, -1))

    def free(self) -> None:
        """Gives up the memory; no request may own pages."""
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Takes the memory back."""
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(tensor.nbytes)
            tensor.zero_()

    def _tensors(self) -> list[Tensor]:
        return [tensor for pair in self.layers.values() for tensor in pair]

    @property
    def num_free(self) -> int:
        """Number of pages that no request owns."""
        return len(self._free)

    def extend(self, pages: list[int], tokens: int) -> bool:
        """Adds pages to those of a request until they hold `tokens` tokens. Returns False, and adds none, if there are
        too few."""
        missing = -(-tokens // self.page_tokens) - len(pages)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            pages.append(self._free.pop())
        return True

    def give_back(self, pages: Sequence[int]) -> None:
        """Takes the pages of a request back."""
        self._free.extend(pages)
