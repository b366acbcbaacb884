"""Peers are cut off after MAX_BAD_MESSAGES bad messages, and the table of them is bounded."""

from __future__ import annotations

from asyncrl.wire.rpc import MAX_BAD_MESSAGES, MisbehavingPeers


def test_a_peer_is_cut_off_once_and_alone() -> None:
    bad_peers = MisbehavingPeers()
    cut = [bad_peers.note(b"bad") for _ in range(MAX_BAD_MESSAGES + 3)]
    assert cut == [False] * MAX_BAD_MESSAGES + [True, False, False]
    assert bad_peers.note(b"good") is False
    assert (bad_peers.ignores(b"bad"), bad_peers.ignores(b"good"), bad_peers.ignores(b"new")) == (True, False, False)
    assert (bad_peers.cut_off, bad_peers.bad_messages) == (1, MAX_BAD_MESSAGES + 4)


def test_the_peer_longest_silent_is_forgotten_first() -> None:
    bad_peers = MisbehavingPeers(max_bad_messages=0, max_peers=2)
    bad_peers.note(b"a")
    bad_peers.note(b"b")
    assert bad_peers.ignores(b"a"), "it spoke just now"
    bad_peers.note(b"c")
    assert [bad_peers.ignores(peer) for peer in (b"a", b"b", b"c")] == [True, False, True]
