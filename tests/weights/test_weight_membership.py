"""Receivers and senders that are stopped, killed, replaced or late: the others go on, and who lives comes back."""

from __future__ import annotations

import json
import threading
import time

import pytest
from structlog.testing import capture_logs
from weight_parts import (
    Process,
    assert_holds,
    joined,
    load_next,
    make_receiver,
    make_sender,
    next_staged,
    receiver_process,
    sender_process,
    weights,
)

from asyncrl.errors import RunError
from asyncrl.weights import broadcast as delivery
from asyncrl.weights import sender as sender_module
from asyncrl.weights import transports
from asyncrl.weights.broadcast import Delivery
from asyncrl.weights.mailbox import Mailbox
from asyncrl.weights.membership import MAX_UNREAD, Membership, Peer
from asyncrl.weights.messages import READY
from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.transports import TRANSPORTS
from asyncrl.wire.store import Values

SLACK_S = 8.0
"""What a busy machine may add to a deadline."""


def drops(logs: list) -> list[str]:
    return [entry["reason"] for entry in logs if entry["event"] == "a generator is dropped"]


def versions(peers: list[Process]) -> list[int]:
    return [peer.next()["version"] for peer in peers]


@pytest.mark.parametrize("hit", ["SIGSTOP", "SIGKILL"])
def test_the_others_go_on_without_one_that_stops_or_ends_inside_the_broadcast(
    address: str, cleanup: list, hit: str
) -> None:
    others = [receiver_process(address, cleanup, rank=rank, timeout_s=2.0) for rank in (1, 3)]
    lost = receiver_process(address, cleanup, rank=2, timeout_s=2.0, hit=hit)
    sender = joined(make_sender(address, cleanup, timeout_s=2.0), 3)
    started = time.monotonic()
    with capture_logs() as logs:
        sender.send(0, weights(0))
        assert versions(others) == [0, 0]
        assert time.monotonic() - started < 2 * 2.0 + SLACK_S
        sender.wait()
    assert len(drops(logs)) == sender.stats.dropped == sender.stats.count == 1
    assert drops(logs)[0].startswith("generator 1 did not survive the broadcast of version 0 of the weights")
    lost.await_stop()
    if hit == "SIGSTOP":
        lost.signal("SIGCONT")
    else:
        lost = receiver_process(address, cleanup, rank=2, timeout_s=2.0)
    assert lost.next()["version"] == 0  # without a new send
    sender.send(1, weights(1))
    assert versions([*others, lost]) == [1, 1, 1]
    sender.wait()
    assert (sender.stats.count, sender.stats.dropped) == (2, 1)


@pytest.mark.parametrize("hit", ["SIGSTOP", "SIGKILL"])
def test_the_others_go_on_without_one_that_stopped_or_ended_before_a_version(
    address: str, cleanup: list, hit: str
) -> None:
    peers = [receiver_process(address, cleanup, rank=rank, timeout_s=2.0) for rank in (1, 2)]
    sender = joined(make_sender(address, cleanup, timeout_s=2.0), 2)
    sender.send(0, weights(0))
    assert versions(peers) == [0, 0]
    peers[0].signal(hit)
    started = time.monotonic()
    with capture_logs() as logs:
        sender.send(1, weights(1))
        assert peers[1].next()["version"] == 1
        assert time.monotonic() - started < 2 * 2.0 + SLACK_S
        sender.wait()
    (reason,) = drops(logs)  # a receiver says that it is ready for the next version as soon as it is
    phases = ("become ready to receive", "survive the broadcast of")
    assert reason.startswith(tuple(f"generator 0 did not {phase} version 1 of the weights" for phase in phases))
    sender.send(2, weights(2))
    sender.wait()
    assert sender.stats.dropped == 1, "a generator that was dropped is not waited for again"
    assert peers[1].next()["version"] == 2
    if hit == "SIGSTOP":
        peers[0].signal("SIGCONT")
        assert peers[0].next()["version"] == 2


def test_receivers_outlive_a_sender_that_is_killed_and_load_the_same_version_again(address: str, cleanup: list) -> None:
    peers = [receiver_process(address, cleanup, rank=rank) for rank in (1, 2)]
    for _ in range(2):
        sender = sender_process(address, cleanup)
        sender.say("send 3", "wait")
        assert versions(peers) == [3, 3]
        sender.next()
        sender.say("send 4")
        sender.end()  # maybe inside the broadcast
    assert all(peer.process.poll() is None for peer in peers)


def test_a_stopped_sender_is_named_and_nobody_fails(address: str, cleanup: list) -> None:
    receiver = make_receiver(address, cleanup, timeout_s=1.6)
    sender = sender_process(address, cleanup, timeout_s=1.6)
    sender.say("send 0")
    load_next(receiver, 0)
    with capture_logs() as logs:
        sender.signal("SIGSTOP")
        watch(receiver, 2.6)
        sender.signal("SIGCONT")
        sender.say("send 1")
        staged = next_staged(receiver)
    silent = [entry for entry in logs if entry["event"] == "learner rank 0 is silent"]
    assert [entry["phase"] for entry in silent] == ["announce a version"]
    assert_holds(staged, 1)
    sender.say("send 2")  # staging is in use: the round has begun and cannot go on
    watch(receiver, 0.2)
    sender.signal("SIGSTOP")
    receiver.loaded(staged)
    watch(receiver, 2.6)
    sender.signal("SIGCONT")
    load_next(receiver, 2)
    sender.say("wait")
    assert sender.next()["dropped"] == 0


def watch(receiver: WeightReceiver, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert receiver.staged() is None
        time.sleep(0.01)


def test_a_receiver_leaves_a_sender_that_answers_nothing_and_joins_again(
    address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, held, free = Delivery._go, threading.Event(), threading.Event()

    def stuck(self: Delivery, peers: list) -> None:
        held.set()
        free.wait(20.0)
        go(self, peers)

    monkeypatch.setattr(Delivery, "_go", stuck)
    receiver = make_receiver(address, cleanup, timeout_s=0.2)
    sender = joined(make_sender(address, cleanup, timeout_s=1.0), 1)
    with capture_logs() as logs:
        sender.send(0, weights(0))
        assert held.wait(10.0)
        watch(receiver, 1.0)
        monkeypatch.setattr(Delivery, "_go", go)
        free.set()
        load_next(receiver, 0)
    reasons = [entry["reason"] for entry in logs if entry["event"] == "joins the weights again"]
    assert "learner rank 0 did not start to send version 0 within 0.4 s" in reasons


def test_nobody_is_waited_for_and_who_comes_late_is_served(address: str, cleanup: list) -> None:
    sender = make_sender(address, cleanup)
    started = time.monotonic()
    for version in (0, 1):
        sender.send(version, weights(version))
        sender.wait()
    assert time.monotonic() - started < 10.0, "half of the deadline"
    assert sender.stats.count == 0
    receivers = [make_receiver(address, cleanup, rank=rank) for rank in (1, 5)]
    for receiver in receivers:
        load_next(receiver, 1)
    sender.send(2, weights(2))
    for receiver in receivers:
        load_next(receiver, 2)
    sender.wait()
    assert (sender.stats.count, sender.stats.dropped) == (2, 0)


def test_a_process_ends_at_once_while_a_generator_is_stopped(address: str, cleanup: list) -> None:
    stopped = receiver_process(address, cleanup, rank=1, hit="SIGSTOP")
    sender = sender_process(address, cleanup)
    sender.say("send 0")
    stopped.await_stop()
    sender.say("close")
    assert sender.process.wait(timeout=10.0) == 0


def test_a_transport_that_never_works_is_an_error(address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> int:
        raise RuntimeError("no route")

    monkeypatch.setattr(delivery, "broadcast", fail)
    make_receiver(address, cleanup, timeout_s=0.5)
    sender = joined(make_sender(address, cleanup, timeout_s=0.5), 1)
    sender.send(0, weights(0))
    with pytest.raises(RunError, match=r"failed 3 times \(no route\); generator 0: no route"):
        sender.wait()


def announce(mail: Mailbox, message: object) -> int:
    number = mail.count("members", 1)
    mail.store.set(f"member/{number}", message if isinstance(message, str) else json.dumps(message))
    return number


def make_roster() -> tuple[Mailbox, Membership]:
    mail = Mailbox(Values())
    return mail, Membership(mail, check=lambda: None, ring=lambda: None)


MEMBER = {"id": "ab", "rank": 1, "device": "cpu"}
RUBBISH = ["", "{", "\xff", "[" * 9999, 1, None, [], {}, {"loaded": {}}, {"loaded": {"version": 1}}]
RUBBISH_MEMBERS = [
    {name: MEMBER[name] for name in MEMBER if name != "rank"},
    *({**MEMBER, "rank": rank} for rank in (0, -1, "1", 1.5, None, True, 1 << 70)),
    *({**MEMBER, name: value} for name in ("id", "device") for value in (1, "", [], "x" * 9999)),
    {**MEMBER, "more": 1},
]


@pytest.mark.parametrize("message", [*RUBBISH, *RUBBISH_MEMBERS])
def test_a_rubbish_announcement_is_counted_and_left_aside(message: object) -> None:
    mail, membership = make_roster()
    number = announce(mail, message)
    announce(mail, MEMBER)
    with capture_logs() as logs:
        assert [peer.id for peer in membership.present()] == [peer.id for peer in membership.present()] == ["ab"]
    assert [entry["event"] for entry in logs] == ["bad announcement of a generator"]
    assert logs[0]["error"].startswith("member/1")
    assert (membership.bad_messages, mail.has(f"member/{number}")) == (1, False)


def test_a_rubbish_counter_of_announcements_takes_neither_memory_nor_time() -> None:
    mail, membership = make_roster()
    started = time.monotonic()
    with capture_logs() as logs:
        for more in (1 << 33, MAX_UNREAD // 2 + 1, MAX_UNREAD // 2 + 1, -(1 << 34), 1 << 35):
            mail.count("members", more)
            assert membership.present() == []
            assert len(membership._unread) <= MAX_UNREAD
        announce(mail, MEMBER)
        assert [peer.id for peer in membership.present()] == ["ab"]
    assert time.monotonic() - started < 5.0
    assert [entry["event"] for entry in logs] == ["the counter of generators in the weights' store is implausible"]


@pytest.mark.parametrize("message", RUBBISH)
def test_a_rubbish_answer_is_told_apart_from_none(message: object) -> None:
    mail, membership = make_roster()
    peers = [Peer(rank, str(rank), "cpu", rank) for rank in (1, 2, 3)]
    for peer in peers:
        announce(mail, {"id": peer.id, "rank": peer.rank, "device": peer.device})
    mail.store.set(peers[0].key("ready"), message if isinstance(message, str) else json.dumps(message))
    mail.store.set(peers[1].key("holding"), "rubbish")
    mail.put(peers[2].key("ready"), {"loaded": None})
    answers, failed = membership.collect(peers, "ready", READY, 0.05)
    assert answers == [(peers[2], {"loaded": None})]
    (bad, why), (late, time_out) = failed
    assert (bad, late, time_out) == (peers[0], peers[1], "within 0.05 s")
    assert why.startswith("(ready/1/0")


def test_a_generator_that_answers_rubbish_is_dropped_and_the_others_go_on(address: str, cleanup: list) -> None:
    sender = make_sender(address, cleanup)
    announce(sender._mail, {**MEMBER, "rank": 2})
    sender._mail.put("up/ab", {})
    sender._mail.put("ready/ab/1", {"loaded": {"version": 0}})
    receiver = make_receiver(address, cleanup)
    with capture_logs() as logs:
        joined(sender, 2).send(0, weights(0))
        load_next(receiver, 0)
        sender.wait()
    (reason,) = drops(logs)
    assert reason.startswith("generator 1 did not become ready to receive version 0 of the weights (ready/ab/1.loaded")
    assert (sender.stats.count, sender.stats.dropped) == (1, 1)


@pytest.mark.parametrize("what", ["offer", "go"])
def test_one_rubbish_message_ends_neither_side(
    address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    put, spoilt = Mailbox.put, []

    def spoil(self: Mailbox, name: str, message: dict) -> None:
        first = name.startswith(f"{what}/") and not spoilt
        spoilt.extend([name] if first else [])
        put(self, name, {"checksum": "1"} if first else message)

    monkeypatch.setattr(Mailbox, "put", spoil)
    receiver = make_receiver(address, cleanup, timeout_s=1.0)
    with capture_logs() as logs:
        sender = joined(make_sender(address, cleanup, timeout_s=1.0), 1)
        sender.send(0, weights(0))
        load_next(receiver, 0)
        deadline = time.monotonic() + 10.0
        while not (joins := [entry["reason"] for entry in logs if entry["event"] == "joins the weights again"]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        joined(sender, 1).send(1, weights(1))
        load_next(receiver, 1)
        sender.wait()
    assert spoilt[0] in joins[0]


def test_a_generator_on_the_device_of_another_is_dropped_where_each_needs_its_own(
    address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_device_each = transports.Transport(TRANSPORTS["gloo"].connect, on_device=True, what="")
    monkeypatch.setitem(TRANSPORTS, "gloo", one_device_each)
    monkeypatch.setattr(sender_module, "choose_transport", lambda name, devices: "gloo")
    monkeypatch.setattr(delivery, "device_name", lambda device: "cuda 0")
    names = iter(["cuda 1", "cuda 1", "cuda 0"])
    monkeypatch.setattr(transports, "device_name", lambda device: next(names, "cuda 1"))
    sender = make_sender(address, cleanup)
    receivers = []
    for count in (1, 2, 3):
        receivers.append(make_receiver(address, cleanup, rank=count))
        joined(sender, count)
    with capture_logs() as logs:
        sender.send(0, weights(0))
        load_next(receivers[0], 0)
        sender.wait()
        sender.send(1, weights(1))
        load_next(receivers[0], 1)
        sender.wait()
    told = drops(logs)
    assert any(text.startswith("generator 1 is on the device of generator 0 (cuda 1)") for text in told)
    assert any(text.startswith("generator 2 is on the device of learner rank 0 (cuda 0)") for text in told)
    assert [receiver.staged() for receiver in receivers[1:]] == [None, None]
