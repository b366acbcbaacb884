"""Clients continue when the replay process dies under them, and when its answers make no sense."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import pytest
import structlog
import zmq
from msgspec import structs

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError, PeerTimeoutError, RunError
from asyncrl.launch.machine import find_port
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay import client as client_module
from asyncrl.replay.client import GeneratorClient, LauncherClient, LearnerClient
from asyncrl.replay.codec import pack_group
from asyncrl.replay.journal import Journal
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.server import ReplayServer
from asyncrl.types import Lease
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.frames import Block, Message, encode
from asyncrl.wire.messages import Error, GeneratorStats, Leases, Ok, ShardHeader
from asyncrl.wire.sockets import bind_router
from tests.helpers.messages import raw_frames
from tests.helpers.replay import EndlessPrompts, kill_queue, loopback_endpoints, make_group, small_config

T = TypeVar("T")
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def endpoints(monkeypatch: pytest.MonkeyPatch) -> Endpoints:
    monkeypatch.setattr(client_module, "RESEND_S", 0.2)
    return loopback_endpoints(find_port())


def once_free(bind: Callable[[], T], timeout_s: float = 5.0) -> T:
    """Binds as soon as the socket closed before has let go of the port, which it does in the background."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return bind()
        except ConfigError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


class Replay:
    """The replay process as a thread that can be killed and started again."""

    def __init__(self, folder: Path, endpoints: Endpoints, config: Config) -> None:
        self.folder, self.endpoints, self.config = folder, endpoints, config
        self.start()

    def start(self) -> None:
        journal = Journal(self.folder / "journal", flush="os", segment_bytes=20_000)
        trace = TraceWriter(self.folder / "trace.parquet")
        run_id = self.endpoints.run_id
        self.queue = ReplayQueue(self.config, EndlessPrompts(), trace, journal=journal, run_id=run_id)
        server = once_free(lambda: ReplayServer(self.queue, self.endpoints))
        self._stop = threading.Event()

        def serve() -> None:
            try:
                server.serve(self._stop.is_set)
            finally:
                server.close()

        self._thread = threading.Thread(target=serve)
        self._thread.start()

    def kill(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()
        kill_queue(self.queue)


@pytest.fixture
def replay(tmp_path: Path, endpoints: Endpoints) -> Iterator[Replay]:
    replay = Replay(tmp_path, endpoints, small_config(steps=100))
    yield replay
    replay.kill()


def poll(client: GeneratorClient, until: Callable[[Leases | None], bool], timeout_s: float = 15.0) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        reply = client.poll(0.02)
        if until(reply):
            return reply
    raise AssertionError("what the client waits for did not come")


def leased(client: GeneratorClient) -> Leases:
    return poll(client, lambda reply: reply is not None)


def test_everything_is_asked_again_of_a_queue_that_was_dead(replay: Replay, endpoints: Endpoints) -> None:
    generator, learner = GeneratorClient(endpoints, 0), LearnerClient(endpoints, 0, timeout_s=20)
    assert learner.begin(0) == 0
    for step in range(1, 4):
        replay.kill()
        generator.ask(step - 1, 10, GeneratorStats.of(tokens=step))
        for _ in range(20):
            assert generator.poll(0.01) is None
        replay.start()
        leases = leased(generator).leases
        replay.kill()
        for lease in leases:
            generator.finish(make_group(lease, step - 1))
        replay.start()
        poll(generator, lambda _: generator.unacknowledged == 0)
        assert len((learner.take(step) or pytest.fail("no batch")).groups) == 2
        replay.kill()
        threading.Timer(0.5, replay.start).start()
        committed = learner.commit(step, {"learner/wait_s": 0.0}, saving=step == 2)
        assert bool(committed.state) == (step == 2)
        assert committed.metrics["reward/mean"] == 0.5
    assert replay.queue.ledger.steps == 3
    assert replay.queue.state.reported.duplicates == 0
    replay.queue.ledger.check()
    generator.close()
    learner.close()


def test_a_batch_taken_ahead_of_the_death_of_a_queue_is_served_again(replay: Replay, endpoints: Endpoints) -> None:
    generator, learner = GeneratorClient(endpoints, 0), LearnerClient(endpoints, 0, timeout_s=20)
    generator.ask(0, 10, GeneratorStats.of())
    *leases, last = leased(generator).leases
    for lease in leases:
        generator.finish(make_group(lease, 0))
    assert learner.take(1) is not None
    with ThreadPoolExecutor(1) as thread:
        taking = thread.submit(learner.take, 2)
        poll(generator, lambda _: generator.unacknowledged == 0)
        replay.kill()
        assert not taking.done()
        generator.finish(make_group(last, 0))
        replay.start()
        poll(generator, lambda _: generator.unacknowledged == 0)
        ahead = taking.result(timeout=20)
    assert ahead is not None and [group.ticket for group in ahead.groups] == [2, 3]
    replay.kill()
    replay.start()
    assert [batch.number for batch in replay.queue.state.taken] == [1, 2]
    learner.commit(1, {})
    again = learner.take(2)
    assert again is not None and [pack_group(g)[0] for g in again.groups] == [pack_group(g)[0] for g in ahead.groups]
    learner.commit(2, {})
    assert replay.queue.ledger.steps == 2
    generator.close()
    learner.close()


def test_a_take_in_another_thread_ends_when_its_client_is_closed(replay: Replay, endpoints: Endpoints) -> None:
    learner = LearnerClient(endpoints, 0, timeout_s=20)
    with ThreadPoolExecutor(1) as thread:
        taking = thread.submit(learner.take, 1)
        assert learner.begin(0) == 0
        assert not taking.done()
        learner.close()
        assert taking.result(timeout=5) is None


def test_an_answer_that_is_lost_is_given_again(tmp_path: Path, endpoints: Endpoints) -> None:
    replay = Replay(tmp_path, endpoints, small_config(steps=100))
    replay.kill()
    router = once_free(lambda: bind_router(endpoints.replay, "replay"))
    generator, learner = GeneratorClient(endpoints, 0), LearnerClient(endpoints, 0, timeout_s=20)
    generator.ask(0, 10, GeneratorStats.of())
    assert router.poll(5000)
    seen = router.recv_multipart()[1:]  # whoever had it died with it
    router.close()
    replay.start()
    first = leased(generator)
    assert len(first.leases) == 4
    for lease in first.leases:
        generator.finish(make_group(lease, 0))
    poll(generator, lambda _: generator.unacknowledged == 0)
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.connect(endpoints.replay)
    stranger.send_multipart(seen)
    assert stranger.poll(5000), "asked again it is answered"
    assert replay.queue.ledger.issued == 4, "and gets no leases of its own"
    stranger.close(linger=0)
    shard = learner.take(1)
    metrics = learner.commit(1, {}).metrics
    again = LearnerClient(endpoints, 0, timeout_s=20)
    assert again.begin(0) == 1
    assert LauncherClient(endpoints).status()["catching_up"] == {"step": 0, "of": 1}
    repeated = again.take(1)
    assert shard is not None
    assert repeated is not None
    assert [pack_group(g)[0] for g in repeated.groups] == [pack_group(g)[0] for g in shard.groups]
    assert again.commit(1, {}).metrics == metrics
    assert LauncherClient(endpoints).status()["catching_up"] is None
    with pytest.raises(RunError, match=r"checkpoint is of step 9, the journal ends at step 1"):
        again.begin(9)
    for client in (generator, learner, again):
        client.close()
    replay.kill()


def test_launcher_reports_a_lost_generator_and_scales(replay: Replay, endpoints: Endpoints) -> None:
    launcher, generator = LauncherClient(endpoints), GeneratorClient(endpoints, 1)
    generator.ask(0, 10, GeneratorStats.of())
    assert leased(generator).leave, "there is one generator, with index 0"
    launcher.scale(2)
    generator.ask(0, 10, GeneratorStats.of())
    reply = leased(generator)
    assert (len(reply.leases), reply.leave) == (2, False)
    status = launcher.status()
    assert (status["generators"]["1"]["leased"], status["generators_wanted"]) == (2, 2)
    assert status["generators"]["1"]["session"] == generator.session
    launcher.lost(1)
    status = launcher.status()
    assert (status["generators"], status["leased"]) == ({}, 0)
    assert status["journal"]["segments"] == 1
    generator.release([(reply.leases[0].ticket, 0, 3)])
    assert generator.unacknowledged == 1
    poll(generator, lambda _: generator.unacknowledged == 0)
    generator.close()
    launcher.close()


class Babbler:
    """A peer that answers with what it is told to."""

    def __init__(self, endpoints: Endpoints, answer: Callable[[int], list[bytes]]) -> None:
        self._socket = bind_router(endpoints.replay, "replay")
        self._answer = answer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(20):
                identity, header, *_ = self._socket.recv_multipart()
                self._socket.send_multipart([identity, *self._answer(msgpack.unpackb(header)["seq"])])
        self._socket.close()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)


def shard_without_its_last_array(seq: int) -> list[bytes]:
    return damaged_shard(seq, lambda headers, arrays: (headers, arrays[:-1]))


def shard_without_a_reward(seq: int) -> list[bytes]:
    return damaged_shard(
        seq, lambda headers, arrays: ([structs.replace(h, rewards=h.rewards[:-1]) for h in headers], arrays)
    )


def damaged_shard(seq: int, damage: Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]) -> list[bytes]:
    leases = [client_lease(ticket) for ticket in (0, 1)]
    packed = [pack_group(make_group(lease, 0)) for lease in leases]
    headers, arrays = damage([header for header, _ in packed], [array for _, group in packed for array in group])
    body = ShardHeader(1, "shard", headers)
    return [bytes(frame) for frame in encode("test", body, seq=seq, arrays=arrays)]


def client_lease(ticket: int) -> Lease:
    return Lease(ticket, 0, EndlessPrompts().prompt(ticket))


@pytest.mark.parametrize(
    "answer",
    [
        lambda seq: [b"rubbish"],
        lambda seq: [bytes(f) for f in encode("test", Ok({}), seq=seq)],
        lambda seq: raw_frames("test", "ShardHeader", {"step": 1}, seq=seq),
        shard_without_its_last_array,
        shard_without_a_reward,
    ],
)
def test_answers_without_sense_are_counted_and_end_at_the_deadline(
    endpoints: Endpoints, answer: Callable[[int], list[bytes]]
) -> None:
    peer = Babbler(endpoints, answer)
    try:
        learner = LearnerClient(endpoints, 0, timeout_s=1.0)
        with (
            structlog.testing.capture_logs() as logs,
            pytest.raises(PeerTimeoutError, match="did not answer 'Take' within 1 s"),
        ):
            learner.take(1)
        assert [log["event"] for log in logs].count("bad answer") >= 2, "the request was sent again"
        generator = GeneratorClient(endpoints, 0, timeout_s=1.0)
        generator.ask(0, 1, GeneratorStats.of())
        with pytest.raises(PeerTimeoutError, match="did not answer 'Ask' within 1 s"):
            leased(generator)
        learner.close()
        generator.close(linger_s=0.0)
    finally:
        peer.close()


@pytest.mark.parametrize("kind", ["Ask", "Take"])
def test_requests_without_an_answer_are_sent_again_less_and_less_often(
    endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(client_module, "RESEND_S", 0.1)
    router = bind_router(endpoints.replay, "replay")
    generator, learner = GeneratorClient(endpoints, 0, timeout_s=1.4), LearnerClient(endpoints, 0, timeout_s=1.4)
    try:
        with pytest.raises(PeerTimeoutError, match=f"did not answer '{kind}'"):
            if kind == "Take":
                learner.take(1)
            else:
                generator.ask(0, 1, GeneratorStats.of())
                poll(generator, lambda _: False)
        kinds: list[str] = []
        while router.poll(5000 if len(kinds) < 2 else 200):
            kinds.append(msgpack.unpackb(router.recv_multipart()[1])["kind"])
        assert set(kinds) == {kind}
        assert 2 <= len(kinds) <= 4, "at first, and 0.1, 0.3 and 0.7 s later, not yet 1.5 s; fewer on a busy machine"
    finally:
        generator.close(linger_s=0.0)
        learner.close()
        router.close()


def test_an_error_for_something_that_was_answered_is_left_aside(replay: Replay, endpoints: Endpoints) -> None:
    generator = GeneratorClient(endpoints, 0)
    text = Error("late")
    assert generator._take(Message(77, text, Block([], None))) is None
    with pytest.raises(RunError, match="refused a message: late"):
        generator._take(Message(0, text, Block([], None)))
    generator.close()
