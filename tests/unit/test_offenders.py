"""Peers are cut off after so many bad messages, and the table of them is bounded."""

from __future__ import annotations

from asyncrl.wire.bad_peers import MAX_BAD_MESSAGES, Offenders


def test_a_peer_is_cut_off_once_and_alone() -> None:
    offenders = Offenders()
    cut = [offenders.note(b"bad") for _ in range(MAX_BAD_MESSAGES + 3)]
    assert cut == [False] * MAX_BAD_MESSAGES + [True, False, False]
    assert offenders.note(b"good") is False
    assert (offenders.ignores(b"bad"), offenders.ignores(b"good"), offenders.ignores(b"new")) == (True, False, False)
    assert (offenders.cut_off, offenders.bad_messages) == (1, MAX_BAD_MESSAGES + 4)


def test_the_peer_longest_silent_is_forgotten_first() -> None:
    offenders = Offenders(max_bad_messages=0, max_peers=2)
    offenders.note(b"a")
    offenders.note(b"b")
    assert offenders.ignores(b"a"), "it spoke just now"
    offenders.note(b"c")
    assert [offenders.ignores(peer) for peer in (b"a", b"b", b"c")] == [True, False, True]
