"""A group of two in this process: everyone's checksum, and a round that the sender leaves."""

from __future__ import annotations

import pytest
import torch
from nccl_like import await_true
from weight_parts import on_each

from asyncrl.weights.messages import TO_SENDER, Join, Offer
from asyncrl.weights.session import Session
from asyncrl.weights.transports import TRANSPORTS, Member, ProcessGroup, share
from asyncrl.weights.waits import Interrupted, RoundAborted
from asyncrl.wire.channel import Server
from asyncrl.wire.store import Store
from asyncrl.wire.torch_store import TorchStore

CPU = torch.device("cpu")


def two() -> list[ProcessGroup]:
    store = TorchStore(Store(print), "", 20.0)
    return on_each(lambda rank: TRANSPORTS["gloo"].connect(store, Member(rank, 2, CPU, 20.0)))


def test_everyone_gets_everyones_number_of_64_bits() -> None:
    groups, numbers = two(), [(1 << 64) - 1, 1 << 63]

    def shared(rank: int) -> list[int]:
        return share(groups[rank], numbers[rank], device=CPU, timeout_s=20.0, check=lambda: None)

    assert on_each(shared) == [numbers, numbers]


def test_a_wait_for_the_others_can_be_given_up_and_has_a_deadline() -> None:
    def interrupt() -> None:
        raise Interrupted

    for_interrupt, for_deadline = two(), two()
    with pytest.raises(Interrupted):
        share(for_interrupt[0], 1, device=CPU, timeout_s=20.0, check=interrupt)
    with pytest.raises(TimeoutError):
        share(for_deadline[0], 1, device=CPU, timeout_s=0.1, check=lambda: None)


def test_work_that_ends_just_after_the_time_is_over_has_not_failed() -> None:
    class Late:
        waits = 0

        def wait(self, timeout: object = None) -> bool:
            self.waits += 1
            if self.waits == 1:
                raise RuntimeError("Operation timed out!")
            return True

        def is_completed(self) -> bool:
            return True

    assert two()[0].ends(Late(), 0.1)  # type: ignore[arg-type]


def test_a_round_is_over_when_the_next_offer_is_there(address: str, cleanup: list) -> None:
    server = Server(address, "weights", TO_SENDER)
    cleanup.append(server.close)
    joins: list[tuple[bytes, Join]] = []
    server.start(lambda peer, message: joins.append((peer, message)))
    session = Session(address, run_id="", keys="", rank=1, device="cpu", timeout_s=20.0, check=lambda: None)
    cleanup.append(session.client.close)
    await_true(lambda: joins, "it has not joined")
    ((peer, join),) = joins
    assert join == Join(1, "cpu")
    for number in (1, 2):
        server.send(peer, Offer(number, 0, "gloo", 1 << 20))
        session.listen(10.0)
        if number == 1:
            assert session.next_offer() == Offer(1, 0, "gloo", 1 << 20)
            session.raise_if_over()
    with pytest.raises(RoundAborted, match="another offer"):
        session.raise_if_over()
