"""Sender and receivers that share a store: nobody waits for a slow reader, and what cannot be read is written again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from nccl_like import await_true
from stored_parts import Model, make_publisher
from structlog.testing import capture_logs
from weight_parts import manifest_of, next_staged

from asyncrl.errors import ProtocolError, RunError
from asyncrl.replay.server import StoredVersions
from asyncrl.types import NO_VERSION
from asyncrl.weights import file_transport
from asyncrl.weights.file_transport import FileReceiver, FileSender
from asyncrl.weights.staging import StagedWeights
from asyncrl.weights.version_store import BadFileError, Folder
from asyncrl.wire.messages import Announced, Follower, Following

EXCHANGE_S = 0.005
"""Pause between two asks of all generators."""


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    """A step changes two of a hundred weights."""
    generator = torch.Generator().manual_seed(0)
    embed = torch.randn(400, 500, generator=generator).to(torch.bfloat16)
    embed.view(-1)[version::100] += version
    norm = torch.full((37,), float(version))
    return [("embed.weight", embed), ("norm.weight", norm)]


def assert_holds(receiver: FileReceiver, version: int) -> None:
    staged = next_staged(receiver)
    assert_is(staged, version)
    receiver.loaded(staged)


def assert_is(staged: StagedWeights, version: int) -> None:
    assert staged.version == version
    for (name, tensor), (expected_name, expected) in zip(staged.tensors, weights(version), strict=True):
        assert name == expected_name and torch.equal(tensor, expected)


class Queue:
    """Passes announcements and reports on as the replay queue and the loops of generators do."""

    def __init__(self) -> None:
        self.versions = StoredVersions(live_s=20.0)
        self.receivers: list[FileReceiver] = []
        self.count = 0
        """Announcements."""
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._exchange)
        self._thread.start()

    def announce(self, announced: Announced, check: Callable[[], None]) -> Sequence[Follower]:
        check()
        with self._lock:
            self.count += 1
            return self.versions.announce(announced)

    def _exchange(self) -> None:
        while not self._stop.wait(EXCHANGE_S):
            with self._lock:
                for generator, receiver in enumerate(self.receivers):
                    self.versions.report(generator, receiver.following())
                    if self.versions.newest is not None:
                        receiver.announce(self.versions.newest)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def queue() -> Iterator[Queue]:
    made = Queue()
    yield made
    made.close()


@pytest.fixture
def start(queue: Queue, cleanup: list, tmp_path: Path) -> Callable[..., FileSender]:
    def sender(*, timeout_s: float = 20.0, url: str | None = None, **options: Any) -> FileSender:
        made = FileSender(
            manifest_of(weights(0)),
            url or str(tmp_path / "store"),
            queue.announce,
            keep=2,
            run_id="run-0f",
            timeout_s=timeout_s,
            **options,
        )
        cleanup.append(made.close)
        return made

    return sender


@pytest.fixture
def join(queue: Queue, cleanup: list, tmp_path: Path) -> Callable[..., FileReceiver]:
    def receiver(*, engine_up: bool = True, **options: Any) -> FileReceiver:
        options = {"run_id": "run-0f", "timeout_s": 20.0, "max_bytes": 1 << 26} | options
        made = FileReceiver(str(tmp_path / "store"), **options)
        made.start()
        if engine_up:
            made.engine_is_up()
        cleanup.append(made.close)
        queue.receivers.append(made)
        return made

    return receiver


def test_versions_reach_all_receivers_and_one_that_joins_late(start, join, tmp_path: Path) -> None:
    sender, receivers = start(), [join(), join()]
    for version in range(4):
        sender.send(version, weights(version))
        for receiver in receivers:
            assert_holds(receiver, version)
        sender.wait()
    late = join()
    assert_holds(late, 3)
    await_true(lambda: [one.following().held for one in (*receivers, late)] == [3, 3, 3], "they have it")
    assert (sender.stats.count, sender.stats.dropped) == (4, 0)
    assert 400_000 < sender.stats.bytes < 600_000, "one full version, and what has changed"
    reader = receivers[0]._reader
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
    keeps = lambda version: version == 2  # noqa: E731
    sender, slow, fast = start(keeps=keeps), join(keeps=keeps), join(keeps=keeps)
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
    sender, receiver = start(), join()
    for version in range(3):
        sender.send(version, weights(version))
        assert_holds(receiver, version)
    sender.close()
    before = {path.name for path in (tmp_path / "store").iterdir()}
    again = start()
    again.send(1, weights(1))  # from a checkpoint
    assert_holds(receiver, 1)
    again.wait()
    after = {path.name for path in (tmp_path / "store").iterdir()}
    assert len(after) == 1 and not after & before
    again.send(2, weights(2))
    assert_holds(receiver, 2)


def test_a_restarted_queue_hears_of_the_newest_version(start, join, queue: Queue) -> None:
    sender = start()
    sender.send(0, weights(0))
    sender.wait()
    queue.versions = StoredVersions(live_s=20.0)
    assert_holds(join(), 0)


def test_a_version_that_cannot_be_read_is_written_again(start, join, tmp_path: Path) -> None:
    sender, receiver = start(), join(engine_up=False)
    sender.send(0, weights(0))
    sender.wait()
    files = list((tmp_path / "store").rglob("full-0.bin"))
    assert len(files) == 1
    files[0].write_bytes(b"damaged")
    with capture_logs() as logs:
        receiver.engine_is_up()
        assert_holds(receiver, 0)
    told = [entry for entry in logs if entry["event"] == "a generator cannot read weights"]
    assert len(told) == 1 and told[0]["generator"] == 0 and str(files[0]) in told[0]["reason"]
    await_true(lambda: receiver.following().unread is None, "it has read another one")
    sender.send(1, weights(1))
    assert_holds(receiver, 1)


def test_a_damaged_version_is_reported_even_if_it_takes_longer_to_read_than_the_deadline(
    start, join, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(file_transport, "_CHECK_INTERVAL_S", 0.1)
    read_into, slow = Folder.read_into, [1.3, 1.3]

    def slowly(self: Folder, *arguments: Any) -> None:
        time.sleep(slow.pop() if slow else 0.0)
        read_into(self, *arguments)

    monkeypatch.setattr(Folder, "read_into", slowly)
    sender, receiver = start(), join(engine_up=False, timeout_s=1.0)
    sender.send(0, weights(0))
    sender.wait()
    (file,) = (tmp_path / "store").rglob("full-0.bin")
    file.write_bytes(b"damaged")
    receiver.engine_is_up()
    assert_holds(receiver, 0)
    assert not slow


def test_a_receiver_that_can_read_nothing_ends_with_the_reason(start, join, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(self: Folder, name: str, file: Any, parts: Any) -> None:
        raise BadFileError(f"{name}: cannot be read: not mounted")

    monkeypatch.setattr(Folder, "read_into", unreadable)
    sender, receiver = start(), join(timeout_s=1.5)
    sender.send(0, weights(0))
    sender.wait()
    with pytest.raises(RunError, match=r"version 0 cannot be read within 1\.5 s: v000000-\w+/full-0\.bin"):
        next_staged(receiver)


@pytest.mark.parametrize("what", ["version", "folder", "epoch"])
def test_an_announcement_that_was_changed_loads_nothing(
    what: str, start, join, queue: Queue, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As by a relay that also writes to the store: it has a version of its own there, and names it."""
    sender, receiver = start(epoch=1), join(timeout_s=1.5)
    sender.send(0, weights(0))
    sender.wait()
    assert_holds(receiver, 0)
    sender.close()
    honest, layout = queue.versions.newest, manifest_of(weights(0))
    other = make_publisher(tmp_path / "store", key=b"of somebody").publish(1, Model().weights, needed=1)
    assert honest is not None
    changed = {
        "version": Announced(7, honest.folder),
        "folder": other,
        "epoch": make_publisher(tmp_path / "store", layout=layout).publish(1, Model(layout).weights, needed=1),
    }[what]
    queue.versions.announce(changed)
    await_true(lambda: receiver.following().unread == changed.folder, "it is refused")
    problem = receiver.following().problem
    assert changed.folder in problem and receiver.following().held == 0
    rule = {"version": "announced was 7", "folder": "was not written by this run"}
    assert rule.get(what, "start 0 of the learner ranks, which start 1 has superseded") in problem
    with pytest.raises(RunError, match=f"version {changed.version} cannot be read within"):
        next_staged(receiver)


def test_weights_that_do_not_fit_the_model_are_refused_before_there_is_memory_for_them(start, join) -> None:
    sender, receiver = start(), join(max_bytes=1 << 16)
    sender.send(0, weights(0))
    with pytest.raises(ProtocolError, match=r"bytes described, but the model of this generator has at most 65536"):
        next_staged(receiver)
    assert receiver._buffer.numel() == 0


def test_a_store_that_cannot_be_written_is_an_error_after_the_deadline(start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sender = start(timeout_s=1.5, url=str(tmp_path / "file" / "store"))
    sender.send(0, weights(0))
    with pytest.raises(RunError, match=r"weights\.url: version 0 cannot be written to .*/file/store within 1\.5 s"):
        sender.wait()


def test_a_sender_that_closes_does_not_wait_for_the_queue(start, queue: Queue) -> None:
    def silent(announced: Announced, check: Callable[[], None]) -> Sequence[Follower]:
        while True:
            check()

    queue.announce = silent  # type: ignore[method-assign]
    sender = start()
    sender.send(0, weights(0))
    sender.close()
    assert not sender._thread.is_alive()
    with pytest.raises(RunError, match="closed"):
        sender.wait()


def test_versions_stay_that_a_generator_reads_or_is_to_evaluate(start) -> None:
    def following(held: int, fetching: int = NO_VERSION) -> Follower:
        return Follower(0, Following(held=held, fetching=fetching, unread=None, problem=""))

    sender = start(keeps=lambda version: version == 3)
    for version in range(6):
        sender._followers = [following(0)]
        sender.send(version, weights(version))
        sender.wait()
    for followers, needed in [
        ([], 6),
        ([following(5)], 6),
        ([following(3)], 6),
        ([following(2)], 3),
        ([following(NO_VERSION)], 6),
        ([following(5), following(0, 1)], 1),
    ]:
        sender._followers = followers
        assert sender._needed(6) == needed
