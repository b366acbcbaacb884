"""Counters of the senders of weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class WeightSyncStats:
    """Counters of the sender, summed over the run of its process."""

    count: int = 0
    """Versions that were received by all generators present."""
    dropped: int = 0
    """Number of times a generator was dropped: it was late, or its answer or its bytes were wrong."""
    wait_s: float = 0.0
    """Time that `WeightSender.send` waited for the previous broadcast."""
    broadcast_s: float = 0.0
    """Time from the start of the copy until all generators have the version, summed."""
    bytes: int = 0
    """Bytes of weights sent, each version counted once."""
