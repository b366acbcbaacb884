"""Receivers before their engine is up, crashes of background threads, and the memory of a send."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator

import pytest
import torch
from nccl_like import await_true
from weight_parts import joined, load_next, make_receiver, make_sender, staging_of, weights

from asyncrl.errors import AsyncrlError
from asyncrl.weights import sender as delivery
from asyncrl.weights import staging as into_staging
from asyncrl.weights import transports
from asyncrl.weights.receiver import WeightReceiver


def test_a_receiver_joins_and_neither_answers_nor_allocates_before_its_engine_is_up(
    address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[torch.device] = []
    monkeypatch.setattr(transports, "use_own_stream", streams.append)
    others = [make_receiver(address, cleanup, rank=2)]
    starting = make_receiver(address, cleanup, engine_up=False)
    sender = joined(make_sender(address, cleanup), 2)
    for version in (0, 1):
        sender.send(version, weights(version))
        sender.wait()  # nobody waits for an engine that starts
        load_next(others[0], version)
    assert (starting.staged(), staging_of(starting).numel()) == (None, 0)
    assert len(streams) == 2, "of the sender, and of the receiver whose engine is up"
    starting.engine_is_up()
    load_next(starting, 1)
    assert (len(streams), sender.stats.dropped) == (3, 0)


def test_an_error_that_nobody_foresaw_is_no_run_error_and_the_others_get_their_weights(
    address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, failures = into_staging.empty_buffer, []

    def fail_once(*args: object, **options: bool) -> torch.Tensor:
        if not failures:
            failures.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return allocate(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(into_staging, "empty_buffer", fail_once)
    receivers = [make_receiver(address, cleanup, rank=rank) for rank in (1, 2)]
    sender = joined(make_sender(address, cleanup), 2)
    sender.send(0, weights(0))
    sender.wait()
    caught: list[Exception] = []

    def crashed(receiver: WeightReceiver) -> bool:
        try:
            return receiver.staged() is not None
        except torch.OutOfMemoryError as error:  # `role.main` makes of it a crash, which is restarted
            caught.append(error)
            return True

    for receiver in receivers:
        await_true(lambda receiver=receiver: crashed(receiver), "neither weights nor an error")
    assert [str(error) for error in caught] == ["CUDA out of memory"]
    assert not isinstance(caught[0], AsyncrlError)


def test_an_error_that_nobody_foresaw_in_the_sender_is_raised_as_it_is(
    address: str, cleanup: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise ValueError("a defect")

    monkeypatch.setattr(delivery.WeightSender, "_round", fail)
    make_receiver(address, cleanup)
    sender = joined(make_sender(address, cleanup), 1, up=True)
    sender.send(0, weights(0))
    for _ in range(2):
        with pytest.raises(ValueError, match="a defect"):
            sender.wait()


def test_a_send_holds_no_more_weights_than_it_is_given_at_once(address: str, cleanup: list) -> None:
    """ZeRO stage 3 gathers weights a part at a time; all of them together may not fit."""
    alive: dict[int, int] = {}
    most = 0

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name, source in weights(0):
            tensor = source.clone()
            storage = tensor.untyped_storage()
            alive[id(storage)] = tensor.nbytes
            weakref.finalize(storage, alive.pop, id(storage))
            most = max(most, sum(alive.values()))
            yield name, tensor
            del tensor, storage

    sender = make_sender(address, cleanup)
    sender.send(0, gathered())
    sender.wait()
    largest = max(tensor.nbytes for _, tensor in weights(0))
    assert largest <= most <= largest + 80, "the part and the tensor of 80 bytes before it"
    receiver = make_receiver(address, cleanup)
    load_next(receiver, 0)


def test_a_receiver_that_is_closed_before_its_engine_is_up_leaves(address: str, cleanup: list) -> None:
    sender = make_sender(address, cleanup)
    receiver = make_receiver(address, cleanup, engine_up=False)
    joined(sender, 1)
    started = time.monotonic()
    receiver.close()
    await_true(lambda: not sender._membership.present(), "it is still there")
    assert time.monotonic() - started < 5.0
