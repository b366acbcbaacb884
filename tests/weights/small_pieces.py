"""Pieces so small that a model of some kilobytes has many."""

from __future__ import annotations

from collections.abc import Callable

import asyncrl.weights.deltas
import asyncrl.weights.version_store

PIECE_BYTES = 4096


def shrink_pieces(set_to: Callable[[object, str, int], None] = setattr) -> None:
    """Makes sums and blocks of deltas small in this process."""
    set_to(asyncrl.weights.deltas, "BLOCK_WORDS", PIECE_BYTES // 4)
    set_to(asyncrl.weights.version_store, "CHUNK_BYTES", PIECE_BYTES)
