"""The replay process and its disk: who waits for it, for how long, and what happens when it is slow or fails."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from asyncrl.errors import JournalError
from asyncrl.launch.machine import find_port
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay import journal as journal_module
from asyncrl.replay import queue_store as store_module
from asyncrl.replay.client import GeneratorClient, LearnerClient
from asyncrl.replay.codec import pack_group
from asyncrl.replay.journal import Journal
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.server import run_replay
from asyncrl.types import Lease
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.frames import Block
from asyncrl.wire.messages import GeneratorStats, GroupHeader
from tests.helpers.replay import EndlessPrompts, ask_queue, loopback_endpoints, make_group, small_config

SERVING = "serving"


@dataclass
class SlowDisk:
    """Syncs of the journal take a while, and as long as they would at a rate."""

    seek_s: float = 0.0
    bytes_per_s: float = 1e12
    threads: set[str] = field(default_factory=set)
    longest_s: float = 0.0
    """The longest time of a sync of a stream and its sums."""
    _sizes: dict[str, int] = field(default_factory=dict)
    _began_s: float = 0.0

    def sync(self, descriptor: int) -> None:
        path, size = os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size
        self.threads.add(threading.current_thread().name)
        if not path.endswith(".sums"):
            self._began_s = time.monotonic()
        time.sleep(self.seek_s + (size - self._sizes.get(path, 0)) / self.bytes_per_s)
        self._sizes[path] = size
        self.longest_s = max(self.longest_s, time.monotonic() - self._began_s)


@contextmanager
def serving(queue: ReplayQueue, endpoints: Endpoints) -> Iterator[None]:
    """Serves the queue in the thread SERVING."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:

        def run() -> None:
            threading.current_thread().name = SERVING
            run_replay(queue, endpoints, stop.is_set)

        served = pool.submit(run)
        try:
            yield
        finally:
            stop.set()
        served.result(timeout=20)


def steps(queue: ReplayQueue, count: int, *, tokens: int, pause_s: float = 0.0) -> list[float]:
    """Generates and trains that many steps through the sockets; returns how long each commit took."""
    endpoints = loopback_endpoints(find_port())
    waits_s: list[float] = []
    with serving(queue, endpoints):
        generator, learner = GeneratorClient(endpoints, 0), LearnerClient(endpoints, 0)
        for step in range(1, count + 1):
            left = queue.config.replay.groups_per_step
            while left:
                generator.ask(step - 1, left, GeneratorStats.of())
                reply = generator.poll(5.0)
                assert reply is not None
                for lease in reply.leases:
                    time.sleep(pause_s)
                    generator.finish(make_group(lease, step - 1, completion_tokens=(tokens, tokens)))
                    left -= 1
            assert learner.take(step) is not None
            began_s = time.monotonic()
            learner.commit(step, {}, checkpoints=[step])
            waits_s.append(time.monotonic() - began_s)
        generator.close()
        learner.close()
    return waits_s


def make_queue(folder: Path, journal: Journal, **settings: object) -> ReplayQueue:
    return ReplayQueue(
        small_config(steps=100, **settings), EndlessPrompts(), TraceWriter(folder / "trace.parquet"), journal=journal
    )


@pytest.mark.parametrize("flush", ["group", "step", "os"])
def test_the_thread_that_serves_never_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: journal_module.Flush
) -> None:
    journal = Journal(tmp_path / "journal", flush=flush, segment_bytes=20_000)
    queue, disk = make_queue(tmp_path, journal, journal__flush=flush), SlowDisk()
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, disk.sync)
    steps(queue, 16, tokens=100)
    assert journal.current > 4, "segments were started"
    assert journal.segments[0] > 1, "and dropped"
    assert disk.threads == {"journal_0"}


def test_a_commit_is_answered_within_two_syncs_whatever_the_bytes_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "WRITE_BACK_BYTES", 100_000)
    journal = Journal(tmp_path / "journal", flush="step", segment_bytes=500_000)
    queue = make_queue(tmp_path, journal, replay__groups_per_step=10)
    disk = SlowDisk(seek_s=0.025, bytes_per_s=2e6)
    monkeypatch.setattr(os, "fdatasync", disk.sync)
    waits_s = steps(queue, 3, tokens=4000, pause_s=0.15)  # 1 MB a step at 0.7 MB/s: its sync alone takes 0.55 s
    assert disk.longest_s < 0.4, "much was left to write, or the machine is too busy for this test"
    assert max(waits_s) < 2 * disk.longest_s + 0.1


def test_a_disk_that_is_too_slow_holds_the_generators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store_module, "MAX_UNSYNCED_BYTES", 10_000)
    journal = Journal(tmp_path / "journal", flush="group")
    queue, free = make_queue(tmp_path, journal, replay__groups_per_step=8), threading.Event()
    journal._background.submit(free.wait, 20)
    first, second = ask_queue(queue, 0, 0, 2)[0]
    queue.finish(*packed(first))
    queue.store.write(wait=False)
    assert ask_queue(queue, 0, 0, 2) == ([], "disk")
    assert ask_queue(queue, 0, 0, 0) == ([], ""), "a heartbeat"
    queue.finish(*packed(second))
    queue.store.write(wait=False)
    assert ask_queue(queue, 0, 0, 2) == ([], "disk")
    assert queue.status()["journal"]["unsynced_bytes"] > 20_000
    assert capsys.readouterr().out.count("the journal's disk is slower than the run: generators wait") == 1
    free.set()
    queue.store.write()
    assert len(ask_queue(queue, 0, 0, 2)[0]) == 2
    queue.store.close()


@pytest.mark.parametrize("flush", ["group", "os"])
def test_a_disk_that_fails_in_the_background_is_an_error_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: journal_module.Flush
) -> None:
    journal = Journal(tmp_path / "journal", flush=flush, segment_bytes=10_000)
    queue = make_queue(tmp_path, journal, journal__flush=flush)

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fail)
    text = r"00000001.arrow: cannot sync it: Input/output error; make room for it or repair the disk"
    (lease,) = ask_queue(queue, 0, 0, 1)[0]
    queue.finish(*packed(lease))
    with pytest.raises(JournalError, match=text):
        queue.store.write()
    for use in (lambda: queue.store.synced, queue.store.write, lambda: ask_queue(queue, 0, 0, 1)):
        with pytest.raises(JournalError, match=text):
            use()
    queue.store.close()


def packed(lease: Lease, tokens: int = 500) -> tuple[GroupHeader, Block]:
    return pack_group(make_group(lease, 0, completion_tokens=(tokens, tokens)))
