"""Versions that several ranks write: the split, the bits that come out, and ranks that fail."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_like import await_true
from share_process import KILLED
from small_pieces import PIECE_BYTES, shrink_pieces
from stored_parts import KEY, files, no_wait, trained
from structlog.testing import capture_logs
from weight_parts import Process, manifest_of

from asyncrl.errors import PeerTimeoutError
from asyncrl.types import NO_VERSION
from asyncrl.weights.buckets import WeightManifest
from asyncrl.weights.files.folder import BadFileError, Folder
from asyncrl.weights.files.rank_sender import RankSender
from asyncrl.weights.files.reader import Reader
from asyncrl.weights.files.sender import FileSender, StoreOptions
from asyncrl.weights.files.shards import shares_of
from asyncrl.weights.files.share_writer import Written
from asyncrl.weights.other_ranks import OtherRanks
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.store import StoreServer
from asyncrl.wire.version_messages import Announced, Follower, Following
from tests.helpers.examples import examples

MANIFEST = manifest_of(trained(0))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_pieces(monkeypatch.setattr)


def reader_of(url: str | Path) -> Reader:
    return Reader(Folder(str(url)), MANIFEST, np.full(MANIFEST.num_bytes, 7, np.uint8), key=KEY)


def assert_holds(reader: Reader, version: int) -> None:
    found = MANIFEST.views(torch.from_numpy(reader._weights))
    for (name, tensor), (expected_name, expected) in zip(found, trained(version), strict=True):
        assert name == expected_name and torch.equal(tensor, expected), (version, name)


# --- the split


TENSORS = st.lists(
    st.tuples(st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]), st.integers(0, 5 * PIECE_BYTES)),
    min_size=1,
    max_size=12,
).filter(lambda tensors: any(size for _, size in tensors))


@settings(max_examples=examples(150), deadline=None)
@given(TENSORS, st.integers(1, 9))
def test_each_byte_and_each_tensor_has_one_rank(tensors: list[tuple[torch.dtype, int]], ranks: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        shrink_pieces(patch.setattr)
        layout = WeightManifest.of((f"{i}", dtype, (size,)) for i, (dtype, size) in enumerate(tensors))
        shares = shares_of(layout, ranks)
        assert shares == shares_of(WeightManifest.from_json(layout.to_json()), ranks)
    assert [share.rank for share in shares] == list(range(len(shares))) and len(shares) <= ranks
    assert (shares[0].start, shares[0].first) == (0, 0)
    assert (shares[-1].stop, shares[-1].last) == (layout.num_bytes, len(layout.entries))
    for one, following in itertools.pairwise(shares):
        assert (one.stop, one.last) == (following.start, following.first) and one.stop % PIECE_BYTES == 0
    sizes = [share.stop - share.start for share in shares]
    assert min(sizes) > 0 and max(sizes) - min(sizes) < 2 * PIECE_BYTES, "as equal as pieces can be"
    whole = np.random.default_rng(0).integers(0, 256, layout.num_bytes, np.uint8)
    for share in shares:
        buffer = np.zeros(share.layout.num_bytes, np.uint8)
        largest = max(entry.num_bytes for entry in layout.entries)
        assert len(buffer) <= share.stop - share.start + 2 * largest + PIECE_BYTES
        for entry in share.layout.entries:
            start = entry.offset + share.offset
            buffer[entry.offset : entry.offset + entry.num_bytes] = whole[start : start + entry.num_bytes]
        assert [entry.name for entry in share.entries] == [f"{i}" for i in range(share.first, share.last)]
        expected = np.zeros(layout.num_bytes, np.uint8)
        for entry in layout.entries:
            at = slice(entry.offset, entry.offset + entry.num_bytes)
            expected[at] = whole[at]
        assert np.array_equal(share.bytes_of(buffer), expected[share.start : share.stop])


def test_a_small_model_is_written_by_rank_0_alone() -> None:
    layout = WeightManifest.of([("norm.weight", torch.bfloat16, (37,))])
    assert [share.rank for share in shares_of(layout, 4)] == [0]


# --- senders of several ranks


class Learner:
    """The ranks of a learner, which send to one store."""

    def __init__(self, url: str, ranks: int, address: str, cleanup: list, *, timeout_s: float = 20.0) -> None:
        self.announced: list[Announced] = []
        self.followers: Sequence[Follower] = []
        self.shares = shares_of(MANIFEST, ranks)
        self.store = StoreServer(address, "shares", run_id="run-0f")
        others = OtherRanks(self.store, len(self.shares) - 1, Written, timeout_s=timeout_s) if ranks > 1 else None
        options, endpoints = StoreOptions(url, full_every=4, keep=2), Endpoints("run-0f", "", address, "")
        self.main = FileSender(MANIFEST, options, self._announce, run_id="run-0f", timeout_s=timeout_s, others=others)
        self.others = [RankSender(MANIFEST, share, url, endpoints, timeout_s=timeout_s) for share in self.shares[1:]]
        cleanup += [self.store.close, *(sender.close for sender in [self.main, *self.others])]

    def _announce(self, announced: Announced, check: Callable[[], None]) -> Sequence[Follower]:
        check()
        if announced not in self.announced:
            self.announced.append(announced)
        return self.followers

    def publish(self, version: int) -> Announced:
        for sender in [*reversed(self.others), self.main]:
            sender.send(version, trained(version))
        for sender in [self.main, *self.others]:
            sender.wait()
        return self.announced[-1]


def test_the_bits_are_those_of_one_rank(address: str, cleanup: list, tmp_path: Path) -> None:
    sums: dict[int, list[Any]] = {}
    for ranks in (1, 2, 3):
        learner, store = (
            Learner(str(tmp_path / f"{ranks}"), ranks, f"{address}-{ranks}", cleanup),
            tmp_path / f"{ranks}",
        )
        first, second = reader_of(store), reader_of(store)
        for version in range(9):
            announced = learner.publish(version)
            first.fetch(announced, no_wait)
            assert_holds(first, version)
            if version % 3 == 0:
                second.fetch(announced, no_wait)
                assert_holds(second, version)
            sums.setdefault(version, []).append(first._manifest_of(announced).sums)
            if version == 5:
                deltas = ["from-000004.delta", *(f"from-000004-{rank}.delta" for rank in range(1, ranks))]
                assert {path.name for path in files(store / announced.folder)} == {*deltas, "manifest.json"}
        assert first.num_bytes < 4 * MANIFEST.num_bytes, "three full versions at most, and deltas"
        held = sum(share.layout.num_bytes for share in learner.shares)
        assert learner.main._buffer is not None
        assert learner.main._buffer.data.numel() < 1.5 * held / ranks, "rank 0 holds what it sends"
        for sender in [learner.main, *learner.others]:
            sender.close()
    assert all(one == two == three for one, two, three in sums.values())


def test_a_version_that_cannot_be_read_is_written_again_by_all_ranks(
    address: str, cleanup: list, tmp_path: Path
) -> None:
    learner = Learner(str(tmp_path), 2, address, cleanup)
    announced = learner.publish(0)
    (tmp_path / announced.folder / "full-00000.safetensors").write_bytes(b"damaged")
    with pytest.raises(BadFileError):
        reader_of(tmp_path).fetch(announced, no_wait)
    unread = Following(held=NO_VERSION, fetching=0, unread=announced.folder, problem="damaged", link=None)
    with capture_logs():
        learner.followers = [Follower(0, unread)]
        await_true(lambda: len(learner.announced) == 2, "it is written again")
    reader = reader_of(tmp_path)
    reader.fetch(learner.announced[-1], no_wait)
    assert_holds(reader, 0)
    reader.fetch(learner.publish(1), no_wait)
    assert_holds(reader, 1)


def test_a_rank_that_is_ahead_does_not_hold_up_the_rest(address: str, cleanup: list, tmp_path: Path) -> None:
    """Rank 0 wishes to write version 0 again, of which rank 1 has version 1 by now."""
    learner = Learner(str(tmp_path), 2, address, cleanup)
    announced = learner.publish(0)
    learner.others[0].send(1, trained(1))
    unread = Following(held=NO_VERSION, fetching=0, unread=announced.folder, problem="damaged", link=None)
    with capture_logs() as logs:
        learner.followers = [Follower(0, unread)]
        await_true(lambda: any("again" in entry["event"] for entry in logs), "it cannot be written")
    assert "learner rank 1: has version 1 by now" in next(e["reason"] for e in logs if "again" in e["event"])
    learner.followers = []
    learner.main.send(1, trained(1))
    learner.main.wait()
    learner.others[0].wait()
    reader = reader_of(tmp_path)
    reader.fetch(learner.announced[-1], no_wait)
    assert_holds(reader, 1)


def test_a_rank_that_cannot_write_says_so_and_is_asked_again(
    address: str, cleanup: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, failures, write = Learner(str(tmp_path), 2, address, cleanup), 1, Folder.write

    def failing(self: Folder, name: str, chunks: Any) -> Any:
        nonlocal failures
        if self is learner.others[0]._writer._folder and failures:
            failures -= 1
            raise OSError(28, "No space left on device")
        return write(self, name, chunks)

    monkeypatch.setattr(Folder, "write", failing)
    with capture_logs() as logs:
        announced = learner.publish(0)
    reasons = [entry["reason"] for entry in logs if entry["event"] == "weights cannot be written to the store"]
    assert reasons == ["learner rank 1: [Errno 28] No space left on device"]
    reader = reader_of(tmp_path)
    reader.fetch(announced, no_wait)
    assert_holds(reader, 0)
    assert [path.name for path in tmp_path.iterdir()] == [announced.folder]


def test_a_rank_with_another_store_is_found(address: str, cleanup: list, tmp_path: Path) -> None:
    learner = Learner(str(tmp_path / "here"), 2, address, cleanup, timeout_s=1.0)
    learner.others[0]._writer._folder._path = str(tmp_path / "there")
    with capture_logs(), pytest.raises(Exception, match=r"all learner hosts must have the same store at weights\.url"):
        learner.publish(0)
    assert not list((tmp_path / "here").rglob("manifest.json"))


def test_a_slow_rank_is_waited_for_and_a_silent_one_is_named(
    address: str, cleanup: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, write, silent = Learner(str(tmp_path), 2, address, cleanup, timeout_s=2.0), Folder.write, threading.Event()

    def slowly(self: Folder, name: str, chunks: Any) -> Any:
        if self is learner.others[0]._writer._folder:
            deadline_s = time.monotonic() + 3.0
            while time.monotonic() < deadline_s:
                if not silent.is_set():
                    self.check()
                time.sleep(0.02)
        return write(self, name, chunks)

    learner.publish(0)
    monkeypatch.setattr(Folder, "write", slowly)
    learner.publish(1)
    silent.set()
    with pytest.raises(
        PeerTimeoutError, match=r"learner rank 1 has not delivered its share, and has been silent for 2 s"
    ):
        learner.publish(2)


def test_a_rank_without_rank_0_does_not_wait_for_ever(
    address: str, cleanup: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(str(tmp_path), 2, address, cleanup)
    learner.publish(0)
    rank = learner.others[0]
    monkeypatch.setattr(rank, "wait", lambda: rank._thread.join(20.0))  # as if it ended just behind the wait
    learner.store.close()
    with pytest.raises(PeerTimeoutError, match="is gone"):
        rank.send(1, trained(1))


# --- ranks in processes of their own


def ranks_in_processes(address: str, store: Path, cleanup: list, *, timeout_s: float = 30.0) -> list[Process]:
    return [Process(cleanup, "share_process.py", rank, 2, address, store, timeout_s) for rank in range(2)]


def test_two_processes_publish_and_two_readers_load(address: str, cleanup: list, tmp_path: Path) -> None:
    ranks, readers = ranks_in_processes(address, tmp_path, cleanup), [reader_of(tmp_path), reader_of(tmp_path)]
    for version in range(6):
        for rank in ranks:
            rank.say(f"send {version}", "wait")
        announced = next_announced(ranks[0], version)
        for reader in readers if version % 2 == 0 else readers[:1]:
            reader.fetch(announced, no_wait)
            assert_holds(reader, version)
        assert "bytes" in ranks[1].next()


def next_announced(rank: Process, version: int) -> Announced:
    """It repeats earlier ones."""
    while (said := rank.next()).get("version") != version:
        assert "error" not in said
    return msgspec.convert(said, Announced)


@pytest.mark.parametrize(("killed", "write"), [(1, 1), (1, 3), (0, 2), (0, 4)])
def test_a_rank_that_is_killed_in_a_write_leaves_no_version(
    killed: int, write: int, address: str, cleanup: list, tmp_path: Path
) -> None:
    """Each rank writes two deltas and a part of the full version; rank 0 also writes the manifest."""
    ranks = ranks_in_processes(address, tmp_path, cleanup, timeout_s=3.0)
    for version in range(4):
        for rank in ranks:
            rank.say(f"send {version}", "wait")
        before = next_announced(ranks[0], version)
    ranks[killed].say(f"kill {write}")
    for rank in ranks:
        rank.say("send 4", "wait")
    assert ranks[killed].process.wait(30.0) == KILLED
    if killed == 1:
        while "error" not in (said := ranks[0].next()):
            assert said.get("version") != 4
        assert said["error"].startswith("PeerTimeoutError: weights: learner rank 1 has not delivered its share")
    stored = {path.parent.name for path in tmp_path.rglob("manifest.json")}
    assert before.folder in stored and not [name for name in stored if name.startswith("v000004")]
    assert [path for path in tmp_path.iterdir() if path.name.startswith("v000004")], "it was being written"
    reader = reader_of(tmp_path)
    reader.fetch(before, no_wait)
    assert_holds(reader, 3)
    for rank in ranks:
        rank.end()
    again = Learner(str(tmp_path), 2, f"{address}-again", cleanup).publish(4)
    reader.fetch(again, no_wait)
    assert_holds(reader, 4)
    assert [path.name for path in tmp_path.iterdir()] == [again.folder]
