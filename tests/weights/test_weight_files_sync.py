"""Sender and receivers that share a store: nobody waits for a slow reader, and what cannot be read is written again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nccl_like import await_true
from structlog.testing import capture_logs
from weight_parts import joined, make_receiver, manifest_of, next_staged

from asyncrl.errors import ConfigError, RunError
from asyncrl.weights.files.delivery import FileDelivery, StoreOptions
from asyncrl.weights.files.folder import BadFileError, Folder
from asyncrl.weights.membership import Peer
from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.sender import WeightSender
from asyncrl.weights.staging import StagedWeights


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    """A step changes two of a hundred weights."""
    generator = torch.Generator().manual_seed(0)
    embed = torch.randn(400, 500, generator=generator).to(torch.bfloat16)
    embed.view(-1)[version::100] += version
    norm = torch.full((37,), float(version))
    return [("embed.weight", embed), ("norm.weight", norm)]


def assert_holds(receiver: WeightReceiver, version: int) -> None:
    staged = next_staged(receiver)
    assert_is(staged, version)
    receiver.loaded(staged)


def assert_is(staged: StagedWeights, version: int) -> None:
    assert staged.version == version
    for (name, tensor), (expected_name, expected) in zip(staged.tensors, weights(version), strict=True):
        assert name == expected_name and torch.equal(tensor, expected)


@pytest.fixture
def start(address: str, cleanup: list, tmp_path: Path) -> Callable[..., WeightSender]:
    def sender(*, timeout_s: float = 20.0, url: str | None = None) -> WeightSender:
        made = WeightSender(
            address,
            manifest_of(weights(0)),
            expected_generators=1,
            transport="files",
            timeout_s=timeout_s,
            store=StoreOptions(url or str(tmp_path / "store"), full_every=32, keep=2),
        )
        cleanup.append(made.close)
        return made

    return sender


@pytest.fixture
def join(address: str, cleanup: list, tmp_path: Path) -> Callable[..., WeightReceiver]:
    def receiver(*, transport: str = "files", **options: Any) -> WeightReceiver:
        return make_receiver(address, cleanup, transport=transport, store_url=str(tmp_path / "store"), **options)

    return receiver


def test_versions_reach_all_receivers_and_one_that_joins_late(start, join, tmp_path: Path) -> None:
    sender, receivers = start(), [join(rank=1), join(rank=2)]
    joined(sender, 2, up=True)
    for version in range(4):
        sender.send(version, weights(version))
        for receiver in receivers:
            assert_holds(receiver, version)
        sender.wait()
    late = join(rank=3)
    assert_holds(late, 3)
    await_true(lambda: not any(peer.fetches for peer in sender._membership.present()), "they have confirmed all")
    assert (sender.stats.count, sender.stats.dropped) == (4, 0)
    assert 400_000 < sender.stats.bytes < 600_000, "one full version, and what has changed"
    reader = receivers[0]._fetcher._reader
    assert reader is not None and 400_000 < reader.num_bytes < 500_000
    assert len([path for path in (tmp_path / "store").iterdir() if path.is_dir()]) == 4


def test_a_slow_reader_holds_up_nobody_and_gets_the_newest_version(
    start, join, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, real = threading.Event(), Folder.read_into

    def slowly(self: Folder, *arguments: Any) -> None:
        if threading.current_thread() is slow._thread:
            assert goes_on.wait(20.0)
        real(self, *arguments)

    monkeypatch.setattr(Folder, "read_into", slowly)
    sender, slow, fast = start(), join(rank=1, keeps=lambda version: version == 2), join(rank=2)
    joined(sender, 2, up=True)
    goes_on.set()
    for version in range(6):
        sender.send(version, weights(version))
        assert_holds(fast, version)
        sender.wait()
        if version == 0:
            assert_holds(slow, 0)
            goes_on.clear()
    goes_on.set()
    loaded = []
    while not loaded or loaded[-1] < 5:
        staged = next_staged(slow)
        assert_is(staged, staged.version)
        slow.loaded(staged)
        loaded.append(staged.version)
    assert loaded in ([2, 5], [1, 2, 5]), "it was on its way to 1, and keeps 2"


def test_a_new_sender_begins_with_a_full_version(start, join, tmp_path: Path) -> None:
    sender, receiver = start(), join(rank=1)
    joined(sender, 1, up=True)
    for version in range(3):
        sender.send(version, weights(version))
        assert_holds(receiver, version)
    sender.close()
    before = {path.name for path in (tmp_path / "store").iterdir()} - {"NEWEST"}
    again = start()
    again.send(1, weights(1))  # from a checkpoint
    assert_holds(receiver, 1)
    again.wait()
    after = {path.name for path in (tmp_path / "store").iterdir()} - {"NEWEST"}
    assert len(after) == 1 and not after & before
    again.send(2, weights(2))
    assert_holds(receiver, 2)


def test_a_version_that_cannot_be_read_is_written_again(start, join, tmp_path: Path) -> None:
    sender, receiver = start(), join(rank=1, engine_up=False)
    joined(sender, 1)
    sender.send(0, weights(0))
    sender.wait()
    files = list((tmp_path / "store").rglob("*.safetensors"))
    assert len(files) == 1
    files[0].write_bytes(b"damaged")
    with capture_logs() as logs:
        receiver.engine_is_up()
        assert_holds(receiver, 0)
    told = [entry for entry in logs if entry["event"] == "a generator cannot read weights"]
    assert len(told) == 1 and told[0]["generator"] == 0 and str(files[0]) in told[0]["reason"]
    sender.send(1, weights(1))
    assert_holds(receiver, 1)


def test_a_receiver_that_can_read_nothing_ends_with_the_reason(start, join, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(self: Folder, folder: str, file: Any, parts: Any) -> None:
        raise BadFileError(f"{folder}/{file.name}: cannot be read: not mounted")

    monkeypatch.setattr(Folder, "read_into", unreadable)
    sender, receiver = start(), join(rank=1, timeout_s=1.5)
    joined(sender, 1, up=True)
    sender.send(0, weights(0))
    sender.wait()
    with pytest.raises(RunError, match=r"version 0 cannot be read within 1\.5 s: v000000-\w+/full-00000\.safetensors"):
        next_staged(receiver)


def test_a_store_that_cannot_be_written_is_an_error_after_the_deadline(start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sender = start(timeout_s=1.5, url=str(tmp_path / "file" / "store"))
    sender.send(0, weights(0))
    with pytest.raises(RunError, match=r"weights\.url: version 0 cannot be written to .*/file/store within 1\.5 s"):
        sender.wait()


def test_a_receiver_of_another_transport_is_told(start, join) -> None:
    sender, receiver = start(), join(rank=1, transport="gloo")
    joined(sender, 1, up=True)
    sender.send(0, weights(0))
    with pytest.raises(ConfigError, match=r"the learner sends by 'files', here it is 'gloo'"):
        next_staged(receiver)


def test_what_is_on_its_way_to_a_live_receiver_is_kept() -> None:
    class Present:
        def present(self) -> list[Peer]:
            return peers

    options = StoreOptions("memory://x", 1, 1)
    delivery = FileDelivery(options, membership=Present(), stats=None, timeout_s=10.0, check=lambda: None)  # type: ignore[arg-type]
    peers = [Peer(rank, b"", "cpu", "host-1", rank) for rank in (1, 2, 3)]
    assert delivery._oldest_on_its_way(9) == 9
    peers[0].fetches = {3: (7, 0), 4: (8, 0)}
    peers[1].fetches = {1: (2, 0)}
    assert delivery._oldest_on_its_way(9) == 2
    peers[1].heard_s = time.monotonic() - 20.1
    assert delivery._oldest_on_its_way(9) == 7
