"""Server and clients over real sockets on loopback."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
import zmq

from asyncrl.errors import ConfigError, PeerTimeoutError, RunError
from asyncrl.launch.machine import find_port
from asyncrl.observe.samples import read_evaluated
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay import history as history_module
from asyncrl.replay import server as server_module
from asyncrl.replay.client import GeneratorClient, LauncherClient, LearnerClient
from asyncrl.replay.codec import FRAME_BYTES, pack_group
from asyncrl.replay.journal import Flush, Journal
from asyncrl.replay.ledger import State
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.server import ReplayServer, run_replay
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.frames import encode
from asyncrl.wire.messages import (
    MAX_REQUEST_HEADER_BYTES,
    Error,
    Evaluated,
    GeneratorStats,
    Leases,
    Lost,
    Memory,
    Ok,
    ReadStatus,
    Stop,
    Take,
)
from asyncrl.wire.rpc import Connection
from asyncrl.wire.sockets import connect_dealer, new_keys
from tests.helpers.replay import EndlessPrompts, ask_queue, loopback_endpoints, make_group, small_config


@pytest.fixture
def endpoints() -> Endpoints:
    return loopback_endpoints(find_port())


@pytest.fixture
def served(endpoints: Endpoints, tmp_path: Path) -> Iterator[ReplayQueue]:
    config = small_config(launch__learners=2)
    queue = ReplayQueue(config, EndlessPrompts(), TraceWriter(tmp_path / "trace.parquet"))
    stop = threading.Event()
    thread = threading.Thread(target=run_replay, args=(queue, endpoints, stop.is_set))
    thread.start()
    yield queue
    stop.set()
    thread.join(timeout=10)
    assert not thread.is_alive()


def wait_for(client: GeneratorClient, timeout_s: float = 5.0) -> Leases:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        reply = client.poll(0.05)
        if reply is not None:
            return reply
    raise AssertionError("no answer to the ask")


def test_the_memory_of_the_reward_model_is_in_metrics_and_summary(served: ReplayQueue, endpoints: Endpoints) -> None:
    reward_model, learner, launcher = Connection(endpoints), LearnerClient(endpoints, 0), LauncherClient(endpoints)
    for peak in (70, 50):
        assert reward_model.request(Memory("reward_model", peak), timeout_s=5.0).body == Ok({})
    generator = GeneratorClient(endpoints, 0)
    generator.ask(0, 2, GeneratorStats.of(working_s=1.0, peak_memory_bytes=90))
    for lease in wait_for(generator).leases:
        generator.finish(make_group(lease, 0))
    assert learner.take(1) is not None
    metrics = learner.commit(1, {"learner/peak_memory_bytes": 30.0}).metrics
    assert (metrics["reward_model/peak_memory_bytes"], metrics["generator/peak_memory_bytes"]) == (70.0, 90.0)
    assert "learner/peak_memory_bytes" not in metrics, "it is the learner's own"
    peaks = launcher.summary()["peak_memory_bytes"]
    assert peaks.pop("replay") > 10e6
    assert peaks == {"generator": 90, "learner": 30, "reward_model": 70}
    for client in (reward_model, generator, learner, launcher):
        client.close()


def test_generator_and_learners_through_a_step(served: ReplayQueue, endpoints: Endpoints) -> None:
    generator = GeneratorClient(endpoints, 0)
    learners = [LearnerClient(endpoints, rank) for rank in range(2)]
    launcher = LauncherClient(endpoints)
    with ThreadPoolExecutor(2) as pool:
        shards = [pool.submit(learner.take, 1) for learner in learners]
        generator.ask(0, 10, GeneratorStats.of(tokens=12, working_s=1.0, stall_ms=[2.0]))
        reply = wait_for(generator)
        assert (len(reply.leases), reply.reason, reply.done) == (4, "staleness", False)
        for lease in reply.leases:
            generator.finish(make_group(lease, 0))
        got = [shard.result(timeout=10) for shard in shards]
    assert sorted(group.ticket for shard in got if shard is not None for group in shard.groups) == [0, 1]
    metrics = learners[0].commit(1, {"learner/wait_s": 0.1}).metrics
    assert metrics["reward/mean"] == 0.5
    status = launcher.status()
    assert (status["step"], status["trained"], status["finished"]) == (1, 2, 2)
    assert set(status["heard"]) == {"generator-0", "learner-0", "learner-1"}
    generator.ask(1, 1, GeneratorStats.of())
    (lease,) = wait_for(generator).leases
    generator.release([(lease.ticket, lease.attempt, 3)])
    launcher.stop("enough")
    assert learners[0].take(2) is None
    assert learners[1].take(2) is None
    generator.ask(1, 1, GeneratorStats.of())
    assert wait_for(generator).done
    assert served.ledger.returned_tokens == 3
    generator.close()
    assert generator.unacknowledged == 0
    for client in (*learners, launcher):
        client.close()


class SlowDisk:
    """A disk that syncs only while it is let."""

    def __init__(self) -> None:
        self.lets, self.asked = threading.Event(), threading.Event()
        self.calls = 0

    def fdatasync(self, descriptor: int) -> None:
        self.calls += 1
        self.asked.set()
        assert self.lets.wait(20)


@pytest.mark.parametrize("flush", ["step", "group"])
def test_promises_of_the_disk_wait_for_their_sync_and_the_queue_works_on(
    endpoints: Endpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: Flush
) -> None:
    config, journal = small_config(journal__flush=flush), Journal(tmp_path / "journal", flush=flush)
    queue = ReplayQueue(config, EndlessPrompts(), TraceWriter(tmp_path / "trace.parquet"), journal=journal)
    disk, stop = SlowDisk(), threading.Event()
    generator, learner = GeneratorClient(endpoints, 0), LearnerClient(endpoints, 0)
    with ThreadPoolExecutor(2) as pool:
        served = pool.submit(run_replay, queue, endpoints, stop.is_set)
        try:
            generator.ask(0, 3, GeneratorStats.of())
            *leases, last = wait_for(generator).leases
            for lease in leases:
                generator.finish(make_group(lease, 0))
            assert learner.take(1) is not None
            deadline_s = time.monotonic() + 10
            while generator.unacknowledged:
                assert time.monotonic() < deadline_s, "groups are not acknowledged"
                generator.poll(0.02)
            monkeypatch.setattr(os, "fdatasync", disk.fdatasync)
            committed = pool.submit(learner.commit, 1, {"learner/wait_s": 0.1})
            assert disk.asked.wait(10)
            generator.finish(make_group(last, 0))
            deadline_s = time.monotonic() + 10
            while queue.ledger.count(State.FINISHED) < 1:
                assert time.monotonic() < deadline_s, "nothing is done while the journal is synced"
                generator.poll(0.02)
            generator.ask(1, 1, GeneratorStats.of())
            assert len(wait_for(generator).leases) == 1, "a lease promises nothing"
            generator.poll(0.2)
            assert not committed.done(), "answered before the disk had it"
            assert generator.unacknowledged == (flush == "group")
            disk.lets.set()
            assert committed.result(timeout=10).metrics["reward/mean"] == 0.5
            generator.close()
            assert generator.unacknowledged == 0
            syncs = 2 if flush == "group" else 1
            assert disk.calls == 2 * syncs, "what is written during a sync is safe with the next"
        finally:
            disk.lets.set()
            stop.set()
        served.result(timeout=10)
    learner.close()


def once() -> Callable[[], bool]:
    """Stops a server after one round."""
    answers = iter([False, True])
    return lambda: next(answers)


def test_learner_waiting_for_a_batch_outlives_its_timeout(
    served: ReplayQueue, endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "ANSWER_S", 0.2)
    learner, launcher = LearnerClient(endpoints, 0, timeout_s=2.0), LauncherClient(endpoints)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(learner.take, 1)
        time.sleep(3.0)
        assert not taking.done(), "the queue is alive, so the learner goes on waiting"
        launcher.stop("end of test")
        assert taking.result(timeout=5) is None
    learner.close()
    launcher.close()


@pytest.mark.timeout(60)
def test_others_are_answered_while_the_journal_is_read_for_a_learner(
    endpoints: Endpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "READ_AT_ONCE_BYTES", 1)
    config = small_config(steps=100, replay__groups_per_step=16)
    journal = Journal(tmp_path / "journal", flush="os")
    queue = ReplayQueue(config, EndlessPrompts(), TraceWriter(tmp_path / "trace.parquet"), journal=journal)
    for step in (1, 2):
        for lease in ask_queue(queue, 0, step - 1, 16)[0]:
            queue.finish(*pack_group(make_group(lease, step - 1)))
            queue.store.write()
        assert queue.take(0, step)[0] == "shard"
        queue.commit(step, {})
    queue.store.write()
    server, learner, launcher = ReplayServer(queue, endpoints), Connection(endpoints), Connection(endpoints)
    learner.send(Take(0, 0, 1))
    while queue.store._history is None:
        server.serve(once())
    launcher.send(ReadStatus())
    assert server._server.poll(10.0)
    server.serve(once())
    status, between = launcher.receive(10.0), learner.receive(0.0)
    assert status is not None and status.kind == "Ok"
    assert between is None or between.body.outcome == "wait"
    while (answer := learner.receive(0.0)) is None or answer.body.outcome == "wait":
        if answer is not None:
            learner.send(Take(0, 0, 1))
        server.serve(once())
    assert (answer.body.outcome, len(answer.body.groups)) == ("shard", 16)
    for end in (learner, launcher, server, queue.store):
        end.close()


def test_rubbish_is_counted_and_hurts_nobody(served: ReplayQueue, endpoints: Endpoints) -> None:
    rubbish = zmq.Context.instance().socket(zmq.DEALER)
    rubbish.setsockopt(zmq.LINGER, 0)
    rubbish.connect(endpoints.replay)
    for frames in ([b""], [b"\x00" * 100], [b"\x81\xa1v\x01", b"x" * 10]):
        rubbish.send_multipart(frames)
    rubbish.send_multipart(encode("another-run", Stop("now")))
    assert not rubbish.poll(300), "who does not know the run id gets no answer"
    told = [
        (Lost("first"), "Lost: Expected `int`, got `str`"),
        (Error("no"), "'Error' is not a request to the replay queue"),
    ]  # type: ignore[arg-type]
    for body, text in told:
        rubbish.send_multipart(encode(endpoints.run_id, body))
        assert rubbish.poll(10_000), "a bad message of the run is answered"
        assert text in msgpack.unpackb(rubbish.recv_multipart()[0])["body"]["text"]
    rubbish.close()
    launcher = LauncherClient(endpoints)
    status = launcher.status()
    assert (status["bad_messages"], status["done"]) == (6, False)
    launcher.close()


def test_an_unforeseen_error_of_a_handler_ends_the_process(endpoints: Endpoints, tmp_path: Path) -> None:
    queue = ReplayQueue(small_config(), EndlessPrompts(), TraceWriter(tmp_path / "trace.parquet"))
    with ThreadPoolExecutor(1) as pool:
        stop = threading.Event()
        served = pool.submit(run_replay, queue, endpoints, stop.is_set)
        try:
            queue.scale = lambda generators: {}[generators]  # type: ignore[method-assign]
            with pytest.raises(PeerTimeoutError):
                LauncherClient(endpoints, timeout_s=0.5).scale(2)
            with pytest.raises(KeyError):
                served.result(timeout=10)
        finally:
            stop.set()


def test_encrypted_queue_serves_who_has_the_keys(tmp_path: Path) -> None:
    bare = loopback_endpoints(find_port())
    secured = replace(bare, keys=new_keys())
    queue = ReplayQueue(small_config(), EndlessPrompts(), TraceWriter(tmp_path / "trace.parquet"))
    stop = threading.Event()
    thread = threading.Thread(target=run_replay, args=(queue, secured, stop.is_set))
    thread.start()
    friend, stranger = LauncherClient(secured), LauncherClient(bare, timeout_s=0.7)
    try:
        assert friend.status()["step"] == 0
        with pytest.raises(PeerTimeoutError, match="did not answer 'ReadStatus' within"):
            stranger.status()
        assert friend.status()["bad_messages"] == 0, "nothing of it came through"
    finally:
        friend.close()
        stranger.close()
        stop.set()
        thread.join(timeout=10)
    assert not thread.is_alive()


def test_a_frame_larger_than_any_group_ends_its_connection(endpoints: Endpoints, tmp_path: Path) -> None:
    queue = ReplayQueue(small_config(), EndlessPrompts(), TraceWriter(tmp_path / "trace.parquet"))
    stop, limits = threading.Event(), {"max_group_tokens": MAX_REQUEST_HEADER_BYTES}
    group_bytes = FRAME_BYTES * MAX_REQUEST_HEADER_BYTES
    thread = threading.Thread(target=run_replay, args=(queue, endpoints, stop.is_set), kwargs=limits)
    thread.start()
    try:
        for size, comes in ((group_bytes, True), (group_bytes + 1000, False)):
            peer = connect_dealer(endpoints.replay, linger_s=0.0)
            peer.send_multipart([bytes(frame) for frame in encode("test", Ok({}))] + [bytes(size)])
            assert bool(peer.poll(5000 if comes else 500)) is comes
            peer.close()
    finally:
        stop.set()
        thread.join(timeout=10)
    assert not thread.is_alive()


def test_refused_request_says_why(served: ReplayQueue, endpoints: Endpoints) -> None:
    learner = LearnerClient(endpoints, 0)
    with pytest.raises(RunError, match="commit of step 1, in progress is None"):
        learner.commit(1, {})
    learner.close()


def test_silent_queue_is_named_by_everybody(endpoints: Endpoints) -> None:
    learner = LearnerClient(endpoints, 0, timeout_s=0.3)
    with pytest.raises(PeerTimeoutError, match=f"the replay queue at {endpoints.replay} did not answer 'Take' within"):
        learner.take(1)
    generator = GeneratorClient(endpoints, 0, timeout_s=0.3)
    generator.ask(0, 1, GeneratorStats.of())
    with pytest.raises(PeerTimeoutError, match="did not answer 'Ask' within"):
        wait_for(generator)
    learner.close()
    generator.close(linger_s=0.0)


def test_port_taken(endpoints: Endpoints, tmp_path: Path) -> None:
    queue = ReplayQueue(small_config(), EndlessPrompts(), TraceWriter(tmp_path / "trace.parquet"))
    server = ReplayServer(queue, endpoints)
    with pytest.raises(ConfigError, match=r"Address already in use; choose another port in launch\.address"):
        ReplayServer(queue, endpoints)
    closing = threading.Timer(0.1, server.close)
    closing.start()
    ReplayServer(queue, endpoints).close()  # the port of a server that still closes is waited for
    closing.join()


def test_evaluation_over_the_wire(endpoints: Endpoints, tmp_path: Path) -> None:
    config = small_config(data__eval="eval.parquet", steps=1)
    prompts = [EndlessPrompts().prompt(row) for row in range(3)]
    queue = ReplayQueue(config, EndlessPrompts(), TraceWriter(tmp_path / "trace.parquet"), prompts)
    queue.clock.origin_s -= 100.0
    stop = threading.Event()
    recording = {"samples_dir": tmp_path}
    thread = threading.Thread(target=run_replay, args=(queue, endpoints, stop.is_set), kwargs=recording)
    thread.start()
    generator, learner = GeneratorClient(endpoints, 0), LearnerClient(endpoints, 0)
    try:
        generator.ask(0, 0, GeneratorStats.of(), num_evaluations=2)
        reply = wait_for(generator)
        assert ([lease.evaluation for lease in reply.leases], reply.evaluations_left) == ([True, True], True)
        generator.release([], evaluations=[(reply.leases[1].ticket, 0)])
        generator.ask(0, 0, GeneratorStats.of(), num_evaluations=9)
        again = wait_for(generator)
        assert ([lease.attempt for lease in again.leases], again.evaluations_left) == ([0, 1], False)
        for lease in (reply.leases[0], *again.leases):
            recorded = make_group(lease, 0, rewards=(1.0,), completion_tokens=(2,)) if lease.ticket != 1 else None
            if recorded is not None:
                recorded.started_s, recorded.finished_s = time.monotonic() - 0.2, time.monotonic() - 0.1
            result = Evaluated(lease.ticket, lease.attempt, 0, "test", [1.0], ["completed"], 3, None)
            generator.evaluated(result, recorded)
        results = learner.evaluations(lambda: False)
        step, metrics = next(results)
        assert (step, metrics["eval/pass@1"], metrics["eval/prompts"]) == (0, 1.0, 3.0)
        samples = read_evaluated(tmp_path, 0)
        assert [tokens.tolist() for tokens in samples["tokens"]] == [[0, 1, 2, 3, 4]] * 2
        rows = samples.table.select(["ticket", "reward", "end_version", "num_action_tokens", "outcome"]).to_pylist()
        assert [tuple(row.values()) for row in rows] == [(n, 1.0, 0, 2, "evaluated") for n in (0, 2)]
        assert samples["finished_s"] - samples["started_s"] == pytest.approx(0.1, abs=0.02), "seconds of the run"
        queue.stop("end of test")
        assert list(results) == []
    finally:
        generator.close()
        assert generator.unacknowledged == 0
        learner.close()
        stop.set()
        thread.join(timeout=10)
