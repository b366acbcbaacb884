"""Versions of which every rank writes its slices: the bits that come out, and ranks that fail."""

from __future__ import annotations

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
from stored_parts import KEY, files, make_publisher, no_wait, trained
from structlog.testing import capture_logs
from weight_parts import Process, manifest_of, sliced

from asyncrl.errors import PeerTimeoutError, ProtocolError
from asyncrl.types import NO_VERSION
from asyncrl.weights import deltas
from asyncrl.weights.file_transport import FileSender, RankFileSender, Written
from asyncrl.weights.layout import ROW_BYTES, WeightManifest, slices_of
from asyncrl.weights.ranks import RankCoordinator
from asyncrl.weights.version_store import BadFileError, Folder, Reader, sum_of
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.messages import Announced, Follower, Following
from asyncrl.wire.store import StoreServer
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
    st.tuples(st.sampled_from([torch.bfloat16, torch.float32]), st.integers(0, 3 * PIECE_BYTES)),
    min_size=1,
    max_size=9,
).filter(lambda tensors: any(size for _, size in tensors))


def filled(layout: WeightManifest, random: np.random.Generator) -> np.ndarray:
    whole = np.zeros(layout.num_bytes, np.uint8)
    for entry in layout.entries:
        whole[entry.offset : entry.offset + entry.num_bytes] = random.integers(0, 256, entry.num_bytes, np.uint8)
    return whole


@settings(max_examples=examples(100), deadline=None)
@given(TENSORS, st.integers(1, 9), st.sampled_from([0.0, 0.001, 0.5, 1.0]))
def test_sums_and_deltas_of_slices_are_those_of_the_weights(
    tensors: list[tuple[torch.dtype, int]], ranks: int, density: float
) -> None:
    layout = WeightManifest.of((f"{i}", dtype, (size,)) for i, (dtype, size) in enumerate(tensors))
    random = np.random.default_rng(0)
    old, new = filled(layout, random), filled(layout, random)
    kept = np.repeat(random.random(layout.num_bytes // 2) >= density, 2)
    new[kept] = old[kept]
    changed, times = old.copy(), np.zeros(layout.num_bytes, np.int64)
    with pytest.MonkeyPatch.context() as patch:
        shrink_pieces(patch.setattr)
        for rank in range(ranks):
            slices = slices_of(layout, rank, ranks)
            own_old, own_new = (np.zeros(slices.layout.num_bytes, np.uint8) for _ in range(2))
            for (own, num_bytes), (start, _) in zip(slices.own_spans, slices.spans, strict=True):
                own_old[own : own + num_bytes] = old[start : start + num_bytes]
                own_new[own : own + num_bytes] = new[start : start + num_bytes]
                times[start : start + num_bytes] += 1
            assert sum_of(own_new, slices.own_spans, no_wait) == sum_of(new, slices.spans, no_wait)
            blocks = deltas.encode(own_old.view(np.uint16), own_new.view(np.uint16), max_bytes=1 << 30)
            assert blocks is not None
            deltas.apply(b"".join(blocks), changed.view(np.uint16), slices)
    assert np.array_equal(changed, new)
    assert times.sum() == sum(entry.num_bytes for entry in layout.entries) and times.max() == 1


def test_a_change_between_two_slices_is_refused() -> None:
    slices = slices_of(WeightManifest.of([("a", torch.bfloat16, (3,)), ("b", torch.bfloat16, (8,))]), 0, 1)
    old = np.zeros(slices.layout.num_bytes // 2, np.uint16)
    for at, is_there in ((2, True), (3, False), (8, True), (15, True), (16, False)):
        new, words = old.copy(), old.copy()
        new[at] = 5
        blocks = deltas.encode(old, new, max_bytes=1 << 30)
        assert blocks is not None
        if is_there:
            deltas.apply(b"".join(blocks), words, slices)
            assert np.array_equal(words, new)
        else:
            with pytest.raises(ProtocolError, match="a change between two tensors"):
                deltas.apply(b"".join(blocks), words, slices)


@pytest.mark.parametrize(("dtype", "is_delta"), [(torch.float32, True), (torch.uint8, False)])
def test_weights_with_8_bit_numbers_are_always_full(dtype: torch.dtype, is_delta: bool, tmp_path: Path) -> None:
    """A slice of them may end within a word."""
    layout = WeightManifest.of([("a", torch.bfloat16, (4096,)), ("b", dtype, (5,))])
    publisher = make_publisher(tmp_path, layout=layout)
    for version in range(2):
        announced = publisher.publish(version, np.zeros(layout.num_bytes, np.uint8), needed=version)
    assert ("delta-0.bin" in {path.name for path in files(tmp_path / announced.folder)}) == is_delta


# --- senders of several ranks


class Learner:
    """The ranks of a learner, which send to one store."""

    def __init__(self, url: str, ranks: int, address: str, cleanup: list, *, timeout_s: float = 20.0) -> None:
        self.announced: list[Announced] = []
        self.followers: Sequence[Follower] = []
        self.store = StoreServer(address, "shares", run_id="run-0f")
        others = RankCoordinator(self.store, ranks - 1, Written, timeout_s=timeout_s) if ranks > 1 else None
        endpoints = Endpoints("run-0f", "", address, "")
        self.main = FileSender(
            MANIFEST, url, self._announce, full_every=4, keep=2, run_id="run-0f", timeout_s=timeout_s, others=others
        )
        self.others = [
            RankFileSender(MANIFEST, url, endpoints, rank=rank, ranks=ranks, timeout_s=timeout_s)
            for rank in range(1, ranks)
        ]
        self.senders = [self.main, *self.others]
        cleanup += [self.store.close, *(sender.close for sender in self.senders)]

    def _announce(self, announced: Announced, check: Callable[[], None]) -> Sequence[Follower]:
        check()
        if announced not in self.announced:
            self.announced.append(announced)
        return self.followers

    def send(self, rank: int, version: int) -> None:
        self.senders[rank].send(version, sliced(trained(version), rank, len(self.senders)))

    def publish(self, version: int) -> Announced:
        for rank in reversed(range(len(self.senders))):
            self.send(rank, version)
        for sender in self.senders:
            sender.wait()
        return self.announced[-1]


def test_the_bits_are_those_of_one_rank(address: str, cleanup: list, tmp_path: Path) -> None:
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
            if version == 0:
                fulls = [f"full-{rank}.bin" for rank in range(ranks)]
                assert {path.name for path in files(store / announced.folder)} == {*fulls, "manifest.json"}
            if version == 5:
                deltas = [f"delta-{rank}.bin" for rank in range(ranks)]
                assert {path.name for path in files(store / announced.folder)} == {*deltas, "manifest.json"}
        assert first.num_bytes < 4 * MANIFEST.num_bytes, "three full versions at most, and deltas"
        padding_bytes = ROW_BYTES * (len(MANIFEST.entries) + 1)
        for sender in learner.senders:
            assert sender._buffer is not None
            assert sender._buffer.data.numel() <= MANIFEST.num_bytes / ranks + padding_bytes, "its slices alone"
            sender.close()


def test_a_reader_follows_learners_of_other_numbers_of_ranks(address: str, cleanup: list, tmp_path: Path) -> None:
    reader = reader_of(tmp_path)
    for start, ranks in enumerate((2, 3, 1, 2)):
        learner = Learner(str(tmp_path), ranks, f"{address}-{start}", cleanup)
        for version in (2 * start, 2 * start + 1):
            reader.fetch(learner.publish(version), no_wait)
            assert_holds(reader, version)
            assert len(reader._slices) == ranks
        for sender in learner.senders:
            sender.close()


def test_a_version_that_cannot_be_read_is_written_again_by_all_ranks(
    address: str, cleanup: list, tmp_path: Path
) -> None:
    learner = Learner(str(tmp_path), 2, address, cleanup)
    announced = learner.publish(0)
    (tmp_path / announced.folder / "full-0.bin").write_bytes(b"damaged")
    with pytest.raises(BadFileError):
        reader_of(tmp_path).fetch(announced, no_wait)
    unread = Following(held=NO_VERSION, fetching=0, unread=announced.folder, problem="damaged")
    with capture_logs():
        learner.followers = [Follower(0, unread)]
        await_true(lambda: len(learner.announced) == 2, "it is written again")
    reader = reader_of(tmp_path)
    reader.fetch(learner.announced[-1], no_wait)
    assert_holds(reader, 0)
    reader.fetch(learner.publish(1), no_wait)
    assert_holds(reader, 1)


def test_a_rank_that_is_ahead_does_not_hold_up_the_rest(address: str, cleanup: list, tmp_path: Path) -> None:
    """Rank 0 wishes to write version 0 again, of which rank 1 already has version 1."""
    learner = Learner(str(tmp_path), 2, address, cleanup)
    announced = learner.publish(0)
    learner.send(1, 1)
    unread = Following(held=NO_VERSION, fetching=0, unread=announced.folder, problem="damaged")
    with capture_logs() as logs:
        learner.followers = [Follower(0, unread)]
        await_true(lambda: any("cannot be written" in entry["event"] for entry in logs), "it cannot be written")
    problems = [entry["reason"] for entry in logs if "cannot be written" in entry["event"]]
    assert "learner rank 1: already has version 1" in problems[0]
    learner.followers = []
    learner.send(0, 1)
    learner.main.wait()
    learner.others[0].wait()
    reader = reader_of(tmp_path)
    reader.fetch(learner.announced[-1], no_wait)
    assert_holds(reader, 1)


def test_a_rank_that_goes_on_before_a_repeated_version_is_published_does_not_end_the_run(
    address: str, cleanup: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have written version 0 again, and rank 1 takes version 1 before it knows that 0 is published."""
    learner, write = Learner(str(tmp_path), 2, address, cleanup), Folder.write
    announced = learner.publish(0)

    def late(self: Folder, name: str, chunks: Any) -> Any:
        if name.endswith("manifest.json") and learner.others[0]._version == 0:
            learner.send(1, 1)
        return write(self, name, chunks)

    monkeypatch.setattr(Folder, "write", late)
    unread = Following(held=NO_VERSION, fetching=0, unread=announced.folder, problem="damaged")
    with capture_logs() as logs:
        learner.followers = [Follower(0, unread)]
        await_true(lambda: any("cannot be written" in entry["event"] for entry in logs), "it is not published")
    learner.followers = []
    learner.send(0, 1)
    for sender in learner.senders:
        sender.wait()
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


def test_a_rank_without_rank_0_does_not_wait_for_ever(address: str, cleanup: list, tmp_path: Path) -> None:
    learner = Learner(str(tmp_path), 2, address, cleanup)
    learner.publish(0)
    learner.store.close()
    learner.send(1, 1)
    with pytest.raises(PeerTimeoutError, match="is gone"):
        learner.others[0].wait()


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


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("killed", "moment"),
    [
        (1, "write 1"), pytest.param(1, "write 2", marks=SLOW), pytest.param(1, "ordered", marks=SLOW),
        (1, "written"), (0, "write 2"), (0, "write 3"), pytest.param(0, "written", marks=SLOW),
        *(pytest.param(rank, "kept", marks=SLOW) for rank in range(2)),
    ],
)  # fmt: skip
def test_a_rank_that_is_killed_in_a_version_leaves_none(
    killed: int, moment: str, address: str, cleanup: list, tmp_path: Path
) -> None:
    """Each rank writes a delta and a full file; rank 0 also writes the manifest. A rank is killed half-way in a
    write, or between an order and the answer. One that is complete by then is announced to nobody."""
    ranks = ranks_in_processes(address, tmp_path, cleanup, timeout_s=3.0)
    for version in range(4):
        for rank in ranks:
            rank.say(f"send {version}", "wait")
        before = next_announced(ranks[0], version)
    ranks[killed].say(f"kill {moment}")
    for rank in ranks:
        rank.say("send 4", "wait")
    assert ranks[killed].process.wait(30.0) == KILLED
    if killed == 1:
        while "error" not in (said := ranks[0].next()):
            assert said.get("version") != 4
        assert said["error"].startswith("PeerTimeoutError: weights: learner rank 1 has not delivered its share")
    stored = {path.parent.name for path in tmp_path.rglob("manifest.json")}
    assert before.folder in stored and any(name.startswith("v000004") for name in stored) == (moment == "kept")
    reader = reader_of(tmp_path)
    reader.fetch(before, no_wait)
    assert_holds(reader, 3)
    for rank in ranks:
        rank.end()
    again = Learner(str(tmp_path), 2, f"{address}-again", cleanup).publish(4)
    reader.fetch(again, no_wait)
    assert_holds(reader, 4)
    assert [path.name for path in tmp_path.iterdir()] == [again.folder]
