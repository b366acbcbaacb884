"""The transport chain: the right bytes pass through every member, and one that is gone costs a round."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from nccl_like import await_true
from structlog.testing import capture_logs
from weight_parts import (
    BUCKET_BYTES,
    NUM_BYTES,
    RawReceiver,
    described,
    joined,
    load_next,
    make_receiver,
    make_sender,
    member,
    on_each,
    receiver_process,
    weights,
)

from asyncrl.weights import chain
from asyncrl.weights.chain import (
    LEAST_PIECE_BYTES,
    MESSAGE_S,
    MOST_PIECE_BYTES,
    STREAM_BYTES_PER_S,
    ChainLink,
    best_piece_bytes,
)
from asyncrl.weights.transports import host_name
from asyncrl.weights.waits import Interrupted
from asyncrl.wire.store import Store
from asyncrl.wire.torch_store import TorchStore

SLACK_S = 8.0
"""Delay that a busy machine may add to a deadline."""


def members(size: int, cleanup: list, **options: Any) -> list[ChainLink]:
    store = TorchStore(Store(print), "", 20.0)
    links = on_each(lambda rank: ChainLink(member(rank, store, size=size, **options)), tuple(range(size)))
    cleanup += [link.close for link in links]
    return links


def random_bytes(count: int, seed: int) -> torch.Tensor:
    return torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("piece_bytes", [7_000, 65_536, 1 << 20])
@pytest.mark.parametrize("receivers", [1, 2, 5])
def test_every_receiver_has_the_bits_of_every_bucket_when_it_is_yielded(
    cleanup: list, monkeypatch: pytest.MonkeyPatch, receivers: int, piece_bytes: int
) -> None:
    """Buckets that are not a multiple of the pieces, and a last bucket that is smaller."""
    monkeypatch.setattr(chain, "best_piece_bytes", lambda *_: piece_bytes)
    links = members(receivers + 1, cleanup)

    def run(rank: int) -> int:
        num_equal = 0
        for version in range(2):
            expected = random_bytes(1_000_003, version)
            if rank == 0:
                links[0].send(version, iter(expected.split(65_536)))
                continue
            own = torch.zeros_like(expected)
            received = links[rank].receive(version, own.split(65_536))
            num_equal += sum(
                torch.equal(bucket, sent) for bucket, sent in zip(received, expected.split(65_536), strict=True)
            )
        return num_equal

    assert on_each(run, tuple(range(receivers + 1))) == [0] + [2 * 16] * receivers


def test_a_bucket_is_passed_on_while_the_next_ones_are_not_sent_yet(cleanup: list) -> None:
    links = members(4, cleanup)
    there = threading.Event()
    sent = random_bytes(100_000, 0)

    def slowly() -> Iterator[torch.Tensor]:
        yield sent[:50_000]
        assert there.wait(20.0), "the first bucket did not reach the last member"
        yield sent[50_000:]

    def run(rank: int) -> Any:
        if rank == 0:
            return links[0].send(0, slowly())
        own = torch.zeros_like(sent)
        for bucket in links[rank].receive(0, own.split(50_000)):
            if rank == 3 and torch.equal(bucket, sent[:50_000]):
                there.set()
        return torch.equal(own, sent)

    assert on_each(run, (0, 1, 2, 3)) == [None, True, True, True]


def test_the_sender_is_not_far_ahead_of_a_slow_link_between_two_receivers(
    cleanup: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is one of each piece: the version takes three times as long."""
    monkeypatch.setattr(chain, "best_piece_bytes", lambda *_: 1000)
    links = members(4, cleanup, timeout_s=1.0)
    start = links[2]._pairs[2].start

    def slowly(piece: torch.Tensor, **options: Any) -> None:
        time.sleep(0.05)
        start(piece, **options)

    monkeypatch.setattr(links[2]._pairs[2], "start", slowly)
    sent, started_s = random_bytes(60_000, 0), time.monotonic()

    def run(rank: int) -> float:
        if rank == 0:
            links[0].send(0, [sent])
        elif not all(torch.equal(one, sent) for one in links[rank].receive(0, [torch.zeros_like(sent)])):
            return 0.0
        return time.monotonic() - started_s

    assert min(on_each(run, (0, 1, 2, 3))) > 2.5


def outcomes(links: list[ChainLink], check: dict[int, Any]) -> list[tuple[str, float]]:
    """Name of the error with which each member ends a version that rank 0 begins and does not complete, and the
    seconds until then. Each member closes its link then, as roles do."""
    started_s = time.monotonic()

    def send_half() -> Iterator[torch.Tensor]:
        for number in range(16):
            if number == 8:
                time.sleep(0.5)
            yield torch.zeros(65_536, dtype=torch.uint8)

    def run(rank: int) -> tuple[str, float]:
        try:
            if rank == 0:
                links[0].send(0, send_half())
            else:
                for number, _ in enumerate(
                    links[rank].receive(0, torch.zeros(1 << 20, dtype=torch.uint8).split(65_536))
                ):
                    if number == 7:
                        check.get(rank, lambda: None)()
        except (Interrupted, RuntimeError, OSError) as error:
            links[rank].close()
            links[rank] = None  # type: ignore[call-overload]
            return type(error).__name__, time.monotonic() - started_s
        return "", time.monotonic() - started_s

    return on_each(run, tuple(range(len(links))))


def test_all_hear_of_one_that_gives_up_long_before_their_deadline(cleanup: list) -> None:
    def give_up() -> None:
        raise Interrupted

    links = members(5, [])
    found = outcomes(links, {2: give_up})
    assert [name for name, _ in found] == [
        "RuntimeError",
        "RuntimeError",
        "Interrupted",
        "RuntimeError",
        "RuntimeError",
    ]
    assert max(seconds for _, seconds in found) < 10.0, found


def test_a_link_is_closed_at_once_while_its_neighbours_are_silent() -> None:
    until_s = time.monotonic() + 20.0

    def interrupt() -> None:
        if time.monotonic() > until_s:
            raise Interrupted

    links = members(3, [], check=interrupt)
    until_s = time.monotonic() + 0.2
    with pytest.raises(Interrupted):
        list(links[1].receive(0, [torch.zeros(1000, dtype=torch.uint8)]))
    started_s = time.monotonic()
    for link in links:
        link.close()
    links.clear()
    assert time.monotonic() - started_s < SLACK_S


def test_one_that_stops_without_a_word_is_noticed_at_the_deadline(cleanup: list) -> None:
    links: list = members(4, [], timeout_s=1.0)

    def stop() -> None:
        await_true(lambda: [link is None for link in links] == [True, True, False, True], "the others wait")

    found = outcomes(links, {2: stop})
    assert all(name for name, _ in found), found
    for rank in (0, 1, 3):
        assert 0.5 < found[rank][1] < 5.5, found


def test_a_member_that_never_connects_holds_nobody_longer_than_the_deadline() -> None:
    store = TorchStore(Store(print), "", 2.0)
    started_s = time.monotonic()

    def run(rank: int) -> str:
        link = None
        try:
            link = ChainLink(member(rank, store, size=4, timeout_s=2.0))
            link.send(0, [torch.zeros(1000, dtype=torch.uint8)])
        except (RuntimeError, OSError) as error:
            return type(error).__name__
        finally:
            if link is not None:
                link.close()
        return ""

    found = on_each(run, (0, 1, 3))
    assert all(found[rank] for rank in (0, 1, 3)), found
    assert time.monotonic() - started_s < 2.0 + SLACK_S / 2


def test_one_that_is_killed_costs_one_round_and_not_the_deadline(address: str, cleanup: list) -> None:
    """In the second version, as in the first one the sender waits for a receiver to connect."""
    others = [receiver_process(address, cleanup, rank=rank, transport="chain") for rank in (1, 2, 4, 5)]
    hit = f"SIGKILL:{2 + -(-NUM_BYTES // BUCKET_BYTES)}"
    killed = receiver_process(address, cleanup, rank=3, transport="chain", hit=hit)
    sender = joined(make_sender(address, cleanup, transport="chain"), 5, up=True)
    with capture_logs() as logs:
        for version in range(2):
            started_s = time.monotonic()
            sender.send(version, weights(version))
            expected = {"version": version, "tensors": described(weights(version))}
            assert [other.next() for other in others] == [expected] * 4
            sender.wait()
    assert killed.next()["version"] == 0
    assert time.monotonic() - started_s < 5.0 + SLACK_S < 20.0, "the grace for an answer, not the deadline"
    assert [entry["event"] for entry in logs if entry["log_level"] != "info"] == ["a generator is dropped"]
    assert sum(entry["event"] == "a broadcast of weights failed" for entry in logs) == 1
    assert (sender.stats.count, sender.stats.dropped) == (2, 1)


def test_members_are_in_the_order_of_their_hosts_the_learners_first(address: str, cleanup: list) -> None:
    sender = make_sender(address, cleanup, transport="chain")
    for rank, host in enumerate(["b", "a", host_name(), "b", "a"], start=1):
        RawReceiver(address, cleanup).join(rank, host=host).say("up", {})
    joined(sender, 5, up=True)
    assert [peer.rank for peer in sender._delivery._behind(0)] == [3, 2, 5, 1, 4]  # type: ignore[union-attr]


def test_auto_waits_for_more_than_three_generators_and_asks_for_their_hosts(address: str, cleanup: list) -> None:
    sender = make_sender(address, cleanup)
    sender._expected_generators = 4
    for rank in range(1, 5):
        RawReceiver(address, cleanup).join(rank, host=f"host-{rank}")
    assert sender._choose_transport() == "chain"


def test_a_generator_with_auto_receives_by_the_chain_of_the_sender(address: str, cleanup: list) -> None:
    receivers = [make_receiver(address, cleanup, rank=rank) for rank in (1, 2)]
    sender = joined(make_sender(address, cleanup, transport="chain"), 2)
    for version in range(2):
        sender.send(version, weights(version))
        for receiver in receivers:
            load_next(receiver, version)
    sender.wait()


def test_pieces_take_the_least_time_within_their_limits() -> None:
    """Of a chain in which each piece takes the time of a message, and of its bytes in a stream."""

    def chain_s(size: float, num_bytes: float, receivers: int) -> float:
        return (num_bytes / size + receivers - 1) * (MESSAGE_S + size / STREAM_BYTES_PER_S)

    assert best_piece_bytes(1 << 20, 100) == 1 << 20
    assert best_piece_bytes(1 << 40, 1) == 64 << 20
    for num_bytes, receivers in ((64e6, 5), (15e9, 100), (15e9, 2400), (141e9, 34)):
        found = best_piece_bytes(round(num_bytes), receivers)
        taken_s = [chain_s(found * factor, num_bytes, receivers) for factor in (0.9, 1.0, 1.1)]
        assert min(taken_s) == taken_s[1] or found in (LEAST_PIECE_BYTES, MOST_PIECE_BYTES)
