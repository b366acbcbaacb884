"""Receivers and senders that are stopped, killed, replaced or late: the others continue, and live ones come back."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from nccl_like import await_true
from structlog.testing import capture_logs
from weight_parts import (
    BUCKET_BYTES,
    Process,
    RawReceiver,
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

from asyncrl.errors import ProtocolError, RunError
from asyncrl.weights import broadcast as process_groups
from asyncrl.weights import membership as membership_module
from asyncrl.weights import sender as delivery
from asyncrl.weights import sender as sender_module
from asyncrl.weights import transports
from asyncrl.weights.broadcast import GlooLink
from asyncrl.weights.membership import Membership
from asyncrl.weights.receiver import PING_S, WeightReceiver
from asyncrl.weights.sender import WeightSender
from asyncrl.weights.transports import TRANSPORTS, Member
from asyncrl.wire import rpc as channel
from asyncrl.wire.frames import Buffer, decode
from asyncrl.wire.messages import Body
from asyncrl.wire.service_messages import Holding, Join, Offer, Ping, Ready, Welcome
from tests.helpers.messages import raw_frames

SLACK_S = 8.0
"""Delay that a busy machine may add to a deadline."""


def drops(logs: list) -> list[str]:
    return [entry["reason"] for entry in logs if entry["event"] == "a generator is dropped"]


def versions(peers: list[Process]) -> list[int]:
    return [peer.next()["version"] for peer in peers]


@pytest.mark.parametrize("hit", ["SIGSTOP", "SIGKILL"])
def test_the_others_go_on_without_one_that_stops_or_ends_inside_the_broadcast(
    address: str, cleanup: list, hit: str
) -> None:
    options: dict[str, Any] = {"timeout_s": 2.0}
    others = [receiver_process(address, cleanup, rank=rank, **options) for rank in (1, 3)]
    lost = receiver_process(address, cleanup, rank=2, hit=hit, **options)
    sender = joined(make_sender(address, cleanup, **options), 3)
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
        lost = receiver_process(address, cleanup, rank=2, **options)
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


def test_a_silent_one_is_dropped_long_before_the_deadline_of_a_transfer(
    address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "SILENT_S", PING_S + 1.0)
    peers = [receiver_process(address, cleanup, rank=rank, timeout_s=60.0) for rank in (1, 2)]
    sender = joined(make_sender(address, cleanup, timeout_s=60.0), 2)
    sender.send(0, weights(0))
    assert versions(peers) == [0, 0]
    first = sender._membership.present()[0]
    # It is waited for in the transfer then.
    await_true(lambda: getattr(first.answers.get(Ready), "round", 0) == 2, "ready for the next version")
    peers[0].signal("SIGSTOP")
    started = time.monotonic()
    with capture_logs() as logs:
        sender.send(1, weights(1))
        assert peers[1].next()["version"] == 1
    assert time.monotonic() - started < 30
    (reason,) = drops(logs)
    assert reason.startswith("generator 0 ") and "said nothing for 4 s" in reason
    peers[0].signal("SIGCONT")
    assert peers[0].next()["version"] == 1


def seconds_with_one_that_never_connects(address: str, cleanup: list, *, timeout_s: float) -> float:
    """Returns the seconds after which a receiver has a version, where another one was ready and does not connect."""
    sender = make_sender(address, cleanup, timeout_s=timeout_s)
    gone = RawReceiver(address, cleanup).join(1)
    gone.say("Up", {})
    receiver = make_receiver(address, cleanup, rank=2, timeout_s=timeout_s)
    joined(sender, 2, up=True)
    started_s = time.monotonic()
    sender.send(0, weights(0))
    assert gone.next()[0] == "Offer"
    gone.say("Ready", {"round": 1})
    load_next(receiver, 0)
    return time.monotonic() - started_s


def test_a_new_one_that_never_connects_does_not_hold_the_others_for_a_deadline(
    address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert transports.CONNECT_S < membership_module.SILENT_S
    monkeypatch.setattr(transports, "CONNECT_S", 2.0)
    monkeypatch.setattr(membership_module, "SILENT_S", PING_S + 1.0)
    with capture_logs() as logs:
        assert seconds_with_one_that_never_connects(address, cleanup, timeout_s=60.0) < 30
    (reason,) = drops(logs)
    assert reason.startswith("generator 0 did not survive the broadcast of version 0 of the weights")


def test_an_answer_to_an_abort_is_awaited_no_longer_than_a_receiver_may_connect(
    address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "CONNECT_S", 1.0)
    monkeypatch.setattr(process_groups, "GLOO", replace(process_groups.GLOO, connect_s=1.0))
    assert seconds_with_one_that_never_connects(address, cleanup, timeout_s=12.0) < 9.0


def test_only_a_silent_one_that_was_ready_fails_before_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was not may still allocate its memory."""
    monkeypatch.setattr(membership_module, "SILENT_S", 0.3)
    membership = Membership(lambda *_: None, Welcome("", 1, False), threading.Condition(), lambda: None)
    for rank in (1, 2, 3):
        membership.handle(bytes([rank]), Join(rank, "cpu", "host"))
    lively, silent, new = membership.present()
    lively.was_ready = silent.was_ready = True
    membership.offer([lively, silent, new], version=1, transport="gloo", bucket_bytes=BUCKET_BYTES, urgent=False)

    def talk() -> None:
        for _ in range(12):
            time.sleep(0.05)
            membership.handle(lively.id, Ping())
        membership.handle(lively.id, Ready(1))

    talking = threading.Thread(target=talk)
    talking.start()
    answers, failed = membership.collect([lively, silent, new], Ready, 1.0)
    talking.join()
    assert [peer for peer, _ in answers] == [lively]
    assert failed == [(silent, "and said nothing for 0.3 s"), (new, "within 1 s")]


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
    sender.say("send 2")  # staging is in use: the round has begun and cannot continue
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
    go, held, free = WeightSender._go, threading.Event(), threading.Event()

    def stuck(self: WeightSender, peers: list) -> None:
        held.set()
        free.wait(20.0)
        go(self, peers)

    monkeypatch.setattr(WeightSender, "_go", stuck)
    receiver = make_receiver(address, cleanup, timeout_s=0.2)
    sender = joined(make_sender(address, cleanup, timeout_s=1.0), 1)
    with capture_logs() as logs:
        sender.send(0, weights(0))
        assert held.wait(10.0)
        watch(receiver, 1.0)
        monkeypatch.setattr(WeightSender, "_go", go)
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
    assert sender.process.wait(10.0) == 0


@pytest.mark.parametrize("slow_s", [0.0, 1.2])
def test_a_transport_that_never_works_is_an_error(
    address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch, slow_s: float
) -> None:
    """Also when the receiver is still connecting while the sender fails."""
    connect = GlooLink.__init__

    def connect_slowly(self: GlooLink, member: Member) -> None:
        connect(self, member)
        time.sleep(slow_s if member.rank else 0.0)

    def fail(*_: object, **__: object) -> int:
        raise RuntimeError("no route")

    monkeypatch.setattr(GlooLink, "__init__", connect_slowly)
    monkeypatch.setattr(GlooLink, "send", fail)
    make_receiver(address, cleanup, timeout_s=4.0)
    sender = joined(make_sender(address, cleanup, timeout_s=4.0), 1, up=True)
    sender.send(0, weights(0))
    with pytest.raises(RunError, match=r"failed 3 times \(no route\); generator 0: "):
        sender.wait()


MEMBER = {"rank": 1, "device": "cpu", "host": "host-1"}
RUBBISH = ["", b"\xff", 1, None, [], {}, {"loaded": {}}, {"round": 1, "more": 1}, {"round": -1}]
RUBBISH_MEMBERS = [
    *({name: value for name, value in MEMBER.items() if name != left_out} for left_out in MEMBER),
    *({**MEMBER, "rank": rank} for rank in (0, -1, "1", 1.5, None, True, 1 << 63)),
    *({**MEMBER, name: value} for name in ("device", "host") for value in (1, "", [], "x" * 9999)),
    {**MEMBER, "more": 1},
]


@pytest.mark.parametrize("message", [*RUBBISH, *RUBBISH_MEMBERS])
def test_a_rubbish_announcement_is_counted_and_left_aside(address: str, cleanup: list, message: object) -> None:
    sender = make_sender(address, cleanup)
    stranger = RawReceiver(address, cleanup)
    with capture_logs() as logs:
        stranger.say("Join", message)
        RawReceiver(address, cleanup).join(1)
        assert [peer.rank for peer in joined(sender, 1)._membership.present()] == [1]
        await_true(lambda: logs, "it is not logged")
    assert [entry["event"] for entry in logs] == ["bad message to the weights"]
    assert logs[0]["error"].startswith("Join: ")
    assert (sender._channel.errors.total(), len(sender._membership._ids)) == (1, 1)
    assert stranger.hears_nothing(0.05)


def test_announcements_without_end_take_neither_memory_nor_time(address: str, cleanup: list) -> None:
    sender = make_sender(address, cleanup)
    started = time.monotonic()
    many = RawReceiver(address, cleanup)
    for number in range(300):
        many.say("Join", {**MEMBER, "rank": 1 + number % 3})
    RawReceiver(address, cleanup).join(7)
    await_true(lambda: 7 in sender._membership._peers, "it is not there")
    assert len(sender._membership._ids) == len(sender._membership._peers) <= 4
    assert time.monotonic() - started < 5.0


@pytest.mark.parametrize("frames", [[b""], [b"\xc1"], [b"\x93" * 5000], [b"a", b"b"]])
def test_a_stranger_gets_nothing_and_changes_nothing(address: str, cleanup: list, frames: list[bytes]) -> None:
    sender, stranger = make_sender(address, cleanup), RawReceiver(address, cleanup)
    stranger.say("Join", MEMBER, run_id="of another run")
    stranger.say_raw(*frames)
    await_true(lambda: sender._channel.errors.total() == 2, "they are not counted")
    assert stranger.hears_nothing()
    assert sender._membership.present() == []


def test_messages_outside_a_session_change_nothing_and_a_ping_is_told_that_it_has_ended(
    address: str, cleanup: list
) -> None:
    sender, peer = make_sender(address, cleanup), RawReceiver(address, cleanup)
    peer.say("Up", {})
    peer.say("Ready", {"round": 1})
    peer.say("Ping", {})
    assert peer.next() == ("Dropped", {"reason": "the session has ended"})
    peer.join(1).say("Ping", {})
    assert peer.next() == ("Pong", {})
    assert [peer.up for peer in sender._membership.present()] == [False]


@pytest.mark.parametrize("message", RUBBISH)
def test_a_rubbish_answer_is_told_apart_from_none(message: object) -> None:
    membership = Membership(
        lambda peer, message: None, Welcome("", 1, False), threading.Condition(), check=lambda: None
    )
    for rank in (1, 2, 3):
        membership.handle(bytes([rank]), Join(rank, "cpu", "host-1"))
    peers = membership.present()
    membership.offer(peers, version=0, transport="gloo", bucket_bytes=1 << 20, urgent=False)
    with pytest.raises(ProtocolError) as problem:
        decode("", raw_frames("", "Ready", message))
    membership.refuse(b"\1", Ready, str(problem.value))
    membership.refuse(b"\2", Holding, "Holding: rubbish")
    membership.handle(b"\3", Ready(1))
    answers, failed = membership.collect(peers, Ready, 0.05)
    assert answers == [(peers[2], Ready(1))]
    (bad, why), (late, time_out) = failed
    assert (bad, late, time_out) == (peers[0], peers[1], "within 0.05 s")
    assert why.startswith("(Ready: ")


def test_an_answer_of_another_round_is_none_and_holding_extends_the_deadline_once() -> None:
    sent: list = []
    membership = Membership(
        lambda peer, message: sent.append((peer, message)),
        Welcome("", 1, False),
        threading.Condition(),
        check=lambda: None,
    )
    for rank in (1, 2):
        membership.handle(bytes([rank]), Join(rank, "cpu", "host-1"))
    peers = membership.present()
    membership.offer(peers, version=0, transport="gloo", bucket_bytes=1 << 20, urgent=False)
    assert isinstance(sent[-1][1], Offer)
    membership.handle(b"\1", Ready(2))
    membership.handle(b"\2", Ready(1))
    membership.handle(b"\1", Holding(1))
    started = time.monotonic()
    answers, failed = membership.collect(peers, Ready, 0.2)
    assert time.monotonic() - started > 0.4
    assert (answers, failed) == ([(peers[1], Ready(1))], [(peers[0], "within 0.2 s")])
    assert [(peer, type(message).__name__) for peer, message in sent[4:]] == [(b"\2", "Patience")] * 2


def test_a_generator_that_answers_rubbish_is_dropped_and_the_others_go_on(address: str, cleanup: list) -> None:
    sender = make_sender(address, cleanup)
    rubbish = RawReceiver(address, cleanup).join(2)
    rubbish.say("Up", {})
    rubbish.say("Ready", {"round": "1"})
    receiver = make_receiver(address, cleanup)
    with capture_logs() as logs:
        joined(sender, 2).send(0, weights(0))
        load_next(receiver, 0)
        sender.wait()
    (reason,) = drops(logs)
    text = "generator 1 did not become ready to receive version 0 of the weights (Ready: "
    assert reason.startswith(text) and "round" in reason
    assert (sender.stats.count, sender.stats.dropped) == (1, 1)
    assert [rubbish.next()[0] for _ in range(2)] == ["Offer", "Dropped"]


@pytest.mark.parametrize("what", ["Offer", "Go"])
def test_one_rubbish_message_ends_neither_side(
    address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    encode, spoilt = channel.encode, []

    def spoil(run_id: str, body: Body) -> list[Buffer]:
        frames = encode(run_id, body)
        if type(body).__name__ != what or spoilt:
            return frames
        spoilt.append(what)
        return [msgspec.msgpack.encode({**msgspec.msgpack.decode(frames[0]), "body": {"checksum": "1"}})]

    monkeypatch.setattr(channel, "encode", spoil)
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
    one_device_each = transports.Transport(GlooLink, what="", needs_own_gpu=True, needs_store=True)
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
