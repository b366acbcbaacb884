"""A group of two in this process, a round that the sender leaves, and a transport of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nccl_like import await_true
from structlog.testing import capture_logs
from weight_parts import (
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

from asyncrl.errors import RunError
from asyncrl.weights.broadcast import GlooLink
from asyncrl.weights.receiver import SenderSession
from asyncrl.weights.transports import Interrupted, RoundAborted, host_name
from asyncrl.wire.rpc import ChannelServer
from asyncrl.wire.service_messages import Join, Offer, ReceiverMessage
from asyncrl.wire.store import KeyValueStore, TorchStore


def two(**options: Any) -> list[GlooLink]:
    store = TorchStore(KeyValueStore(print), "", 20.0)
    return on_each(lambda rank: GlooLink(member(rank, store, **options)))


def test_a_wait_for_the_others_can_be_given_up_and_has_a_deadline() -> None:
    interrupts = False

    def interrupt() -> None:
        if interrupts:
            raise Interrupted

    for_interrupt, for_deadline = two(check=interrupt), two()
    interrupts = True
    with pytest.raises(Interrupted):
        for_interrupt[0].meet()
    for_deadline[0]._member = member(0, TorchStore(KeyValueStore(print), "", 20.0), timeout_s=0.1)
    with pytest.raises(TimeoutError):
        for_deadline[0].meet()
    for link in (*for_interrupt, *for_deadline):
        link.close()


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
    server = ChannelServer(address, "weights", [ReceiverMessage])
    cleanup.append(server.close)
    joins: list[tuple[bytes, Join]] = []
    server.start(lambda peer, message: joins.append((peer, message)))
    session = SenderSession(address, run_id="", keys="", rank=1, device="cpu", timeout_s=20.0, check=lambda: None)
    cleanup.append(session.client.close)
    await_true(lambda: joins, "it has not joined")
    ((peer, join),) = joins
    assert join == Join(1, "cpu", host_name())
    for number in (1, 2):
        server.send(peer, Offer(number, 0, "gloo", 1 << 20, False))
        session.listen(10.0)
        if number == 1:
            assert session.next_offer() == Offer(1, 0, "gloo", 1 << 20, False)
            session.raise_if_over()
    with pytest.raises(RoundAborted, match="another offer"):
        session.raise_if_over()


FOLDER = """
import os, time
from pathlib import Path
from asyncrl.weights.transports import Link, Transport

class FolderLink(Link):
    def __init__(self, member):
        assert member.store is None
        self.member, self.folder = member, Path(os.environ["WEIGHTS_FOLDER"])
        (self.folder / f"link-{member.rank}-of-{member.size}").touch()

    def send(self, version, buckets):
        (self.folder / f"version-{version}").unlink(missing_ok=True)
        part = self.folder / "part"
        with part.open("wb") as file:
            for bucket in buckets:
                file.write(bucket.numpy())
        part.rename(self.folder / f"version-{version}")

    def receive(self, version, buckets):
        path, deadline_s = self.folder / f"version-{version}", time.monotonic() + self.member.timeout_s
        while not path.exists():
            self.member.check()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no {path.name} within {self.member.timeout_s:g} s")
            time.sleep(0.005)
        with path.open("rb", buffering=0) as file:
            for bucket in buckets:
                file.readinto(bucket.numpy())
                yield bucket

    def close(self):
        (self.folder / f"closed-{self.member.rank}-of-{self.member.size}").touch()

class Lazy(FolderLink):
    def send(self, version, buckets):
        next(iter(buckets))

class Lost(FolderLink):
    def send(self, version, buckets):
        if not list(self.folder.glob("closed-0*")):
            raise OSError("the share is gone")
        super().send(version, buckets)

class Late(FolderLink):
    def send(self, version, buckets):
        list(buckets) if version == 1 else super().send(version, buckets)

FOLDER = Transport(FolderLink, what="Through a folder.")
LAZY = Transport(Lazy, what="Takes one bucket.")
LOST = Transport(Lost, what="Fails once.")
LATE = Transport(Late, what="Does not write version 1.")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "folder.py").write_text(FOLDER)
    monkeypatch.setenv("WEIGHTS_FOLDER", str(tmp_path))
    return tmp_path


def test_versions_travel_through_a_folder_to_threads_and_processes(address: str, cleanup: list, folder: Path) -> None:
    transport = f"{folder}/folder.py:FOLDER"
    sender = make_sender(address, cleanup, transport=transport)
    receiver = make_receiver(address, cleanup, transport=transport)
    other = receiver_process(address, cleanup, rank=2, transport=transport)
    joined(sender, 2)
    for version in range(3):
        sender.send(version, weights(version))
        load_next(receiver, version)
        assert other.next() == {"version": version, "tensors": described(weights(version))}
        sender.wait()
    other.end()
    late = make_receiver(address, cleanup, rank=2, transport=transport)
    load_next(late, 2)
    late.close()
    sender.send(3, weights(3))
    load_next(receiver, 3)
    sender.wait()
    assert (sender.stats.count, sender.stats.dropped) == (4, 0)
    links = sorted(path.name for path in folder.glob("link-*"))
    assert links == ["link-0-of-2", "link-0-of-3", "link-1-of-2", "link-1-of-3", "link-2-of-3"]
    assert (folder / "closed-0-of-3").exists(), "the members have changed"


def test_a_transport_that_does_not_take_all_buckets_is_an_error(address: str, cleanup: list, folder: Path) -> None:
    sender = make_sender(address, cleanup, transport=f"{folder}/folder.py:LAZY")
    make_receiver(address, cleanup, transport=f"{folder}/folder.py:LAZY")
    joined(sender, 1, up=True).send(0, weights(0))
    with pytest.raises(RunError, match=r"the transport took 0 of 4097024 bytes; `send` has to take all buckets"):
        sender.wait()


@pytest.mark.parametrize("name", ["LOST", "LATE"])
def test_an_error_of_the_users_transport_on_one_side_is_a_failed_round(
    address: str, cleanup: list, folder: Path, name: str
) -> None:
    transport = f"{folder}/folder.py:{name}"
    sender = make_sender(address, cleanup, timeout_s=2.0, transport=transport)
    receiver = make_receiver(address, cleanup, timeout_s=0.5, transport=transport)
    joined(sender, 1)
    with capture_logs() as logs:
        sender.send(0, weights(0))
        load_next(receiver, 0)
        sender.wait()
        if name == "LATE":
            sender.send(1, weights(1))
            with pytest.raises(
                RunError, match=r"it failed 3 times \(no version-1 within 0\.5 s\); generator 0: no ver"
            ):
                sender.wait()
    failed = [entry["reason"] for entry in logs if entry["event"] == "a broadcast of weights failed"]
    assert failed == (["the share is gone"] if name == "LOST" else ["no version-1 within 0.5 s"] * 3)
    assert (sender.stats.count, sender.stats.dropped) == (1, 0)
