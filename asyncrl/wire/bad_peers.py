"""Counts the bad messages of each peer and cuts off peers that send too many."""

from __future__ import annotations

from collections import OrderedDict

MAX_BAD_MESSAGES = 16
"""A peer that sends more is cut off: it has a defect or is an attacker, and decoding its messages costs time."""
MAX_PEERS = 4096
"""Peers remembered; the one silent for the longest time is forgotten first."""


class BadPeers:
    """Counts the bad messages of each peer, in bounded memory."""

    def __init__(self, *, max_bad_messages: int = MAX_BAD_MESSAGES, max_peers: int = MAX_PEERS) -> None:
        self.bad_messages = 0
        """Bad messages of all peers."""
        self.cut_off = 0
        """Peers cut off so far."""
        self._max_bad_messages = max_bad_messages
        self._max_peers = max_peers
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def note(self, peer: bytes) -> bool:
        """Counts a bad message; True when the peer is cut off by it."""
        self.bad_messages += 1
        count = self._counts.pop(peer, 0) + 1
        self._counts[peer] = count
        if len(self._counts) > self._max_peers:
            self._counts.popitem(last=False)
        if count != self._max_bad_messages + 1:
            return False
        self.cut_off += 1
        return True

    def ignores(self, peer: bytes) -> bool:
        """True if the peer is cut off: its messages are dropped without decoding."""
        if self._counts.get(peer, 0) <= self._max_bad_messages:
            return False
        self._counts.move_to_end(peer)
        return True
