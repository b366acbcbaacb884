"""Versions that are announced through the replay queue: a generator needs no connection to the learner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs
from weight_parts import manifest_of, next_staged

from asyncrl.errors import PeerTimeoutError, RunError
from asyncrl.generator import role
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.client import Announcer, GeneratorClient, LauncherClient, LearnerClient
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.server import run_replay
from asyncrl.types import NO_VERSION
from asyncrl.weights.file_transport import FileSender, store_url
from asyncrl.weights.receiver import BackgroundReceiver
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.messages import Announced, Following, GeneratorStats, Leases
from tests.helpers.replay import EndlessPrompts, loopback_endpoints, make_group, small_config
from tests.helpers.sockets import free_port

ANNOUNCED = Announced(3, "v000003-0123abcd")
HOLDS = Following(held=2, fetching=NO_VERSION, unread=None, problem="")


@pytest.fixture
def endpoints() -> Endpoints:
    """The learner's address of weights is one at which nobody listens."""
    queue, nobody = free_port(), free_port()
    return replace(loopback_endpoints(queue), weights=f"tcp://127.0.0.1:{nobody}")


@pytest.fixture
def serve(endpoints: Endpoints, tmp_path: Path) -> Iterator[Callable[[], Callable[[], None]]]:
    """Starts a replay queue; returns what ends it."""
    ends: list[Callable[[], None]] = []

    def start() -> Callable[[], None]:
        config = small_config(weights__transport="files", launch__heartbeat_timeout_s=2.0)
        queue = ReplayQueue(config, EndlessPrompts(), TraceWriter(tmp_path / f"trace-{len(ends)}.parquet"))
        stop = threading.Event()
        thread = threading.Thread(target=run_replay, args=(queue, endpoints, stop.is_set))
        thread.start()

        def end() -> None:
            stop.set()
            thread.join(timeout=10)
            assert not thread.is_alive()

        ends.append(end)
        return end

    yield start
    for end in ends:
        end()


def ask(client: GeneratorClient, version: int, following: Following | None, num_groups: int = 0) -> Leases:
    client.ask(version, num_groups, GeneratorStats.of(weights=following))
    deadline_s = time.monotonic() + 60.0
    while (reply := client.poll(0.05)) is None:
        assert time.monotonic() < deadline_s
    return reply


def test_announcements_go_to_generators_and_what_they_have_to_the_learner(serve, endpoints: Endpoints) -> None:
    serve()
    announcer, clients = Announcer(endpoints, timeout_s=10.0), [GeneratorClient(endpoints, index) for index in (0, 1)]
    launcher = LauncherClient(endpoints)
    assert ask(clients[0], NO_VERSION, None).stored is None
    assert announcer.announce(ANNOUNCED, lambda: None) == [], "a generator without a store is no follower"
    fetches = structs.replace(HOLDS, fetching=3)
    assert ask(clients[0], NO_VERSION, HOLDS).stored == ANNOUNCED
    assert ask(clients[1], NO_VERSION, fetches).stored == ANNOUNCED
    told = announcer.announce(ANNOUNCED, lambda: None)
    assert [(one.generator, one.following) for one in told] == [(0, HOLDS), (1, fetches)]
    launcher.lost(1)
    assert [one.generator for one in announcer.announce(ANNOUNCED, lambda: None)] == [0]
    former = clients.pop()
    again = GeneratorClient(endpoints, 1)
    ask(again, NO_VERSION, HOLDS)
    ask(former, NO_VERSION, structs.replace(HOLDS, held=0))
    assert [one.following.held for one in announcer.announce(ANNOUNCED, lambda: None)] == [2, 2], "not of a former one"
    time.sleep(2.1)
    assert announcer.announce(ANNOUNCED, lambda: None) == [], "nobody was heard for long"
    for client in (*clients, former, again, announcer, launcher):
        client.close()


def test_an_announcement_waits_for_a_queue_that_restarts(serve, endpoints: Endpoints) -> None:
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks == 5:
            serve()

    announcer = Announcer(endpoints, timeout_s=20.0)
    assert announcer.announce(ANNOUNCED, check) == [] and looks >= 5
    announcer.close()


def test_a_silent_queue_is_an_error_after_the_deadline(endpoints: Endpoints) -> None:
    announcer = Announcer(endpoints, timeout_s=0.5)
    with pytest.raises(PeerTimeoutError, match="replay queue"):
        announcer.announce(ANNOUNCED, lambda: None)
    announcer.close()


def test_a_refused_announcement_is_an_error(serve, endpoints: Endpoints) -> None:
    serve()
    announcer = Announcer(endpoints, timeout_s=10.0)
    with pytest.raises(RunError, match="refused a message"):
        announcer.announce(structs.replace(ANNOUNCED, folder="../../etc"), lambda: None)
    announcer.close()


def test_a_learner_that_was_replaced_publishes_nothing(serve, endpoints: Endpoints) -> None:
    """Its host could not be reached for a while, and the launcher has started another one."""
    serve()
    old, new = (Announcer(replace(endpoints, epoch=epoch), timeout_s=10.0) for epoch in (0, 1))
    learner = LearnerClient(replace(endpoints, epoch=1), 0)
    learner.begin(0)
    assert new.announce(ANNOUNCED, lambda: None) == []
    with pytest.raises(RunError, match="superseded: start 1 of the learner ranks trains, and this one is 0"):
        old.announce(structs.replace(ANNOUNCED, version=9), lambda: None)
    client = GeneratorClient(endpoints, 0)
    assert ask(client, NO_VERSION, None).stored == ANNOUNCED
    for one in (old, new, learner, client):
        one.close()


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    return [("embed.weight", torch.full((400, 500), float(version), dtype=torch.bfloat16))]


class Generator:
    """The loop of a generator: asks, hears of versions, and loads what is staged."""

    def __init__(self, receiver: BackgroundReceiver, client: GeneratorClient) -> None:
        self.receiver, self.client = receiver, client
        self.version = NO_VERSION

    def until(self, version: int) -> None:
        """Returns when it has loaded this version, and the queue knows."""
        deadline_s = time.monotonic() + 30.0
        while self.version != version:
            assert time.monotonic() < deadline_s, f"it has {self.version}, not {version}"
            reply = ask(self.client, self.version, self.receiver.following())
            if reply.stored is not None:
                self.receiver.announce(reply.stored)
            if (staged := self.receiver.staged()) is not None:
                assert torch.equal(staged.tensors[0][1], weights(staged.version)[0][1])
                self.receiver.loaded(staged)
                self.version = staged.version
            time.sleep(0.01)
        ask(self.client, self.version, self.receiver.following())


def test_a_generator_that_cannot_reach_the_learner_gets_versions(
    serve, endpoints: Endpoints, tmp_path: Path, cleanup: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = serve()
    config = small_config(weights__transport="files", weights__url=str(tmp_path / "store"))
    announcer, learner = Announcer(endpoints, timeout_s=30.0), LearnerClient(endpoints, 0)
    sender = FileSender(
        manifest_of(weights(0)),
        store_url(config, tmp_path / "run"),
        announcer.announce,
        run_id=endpoints.run_id,
        timeout_s=20.0,
    )
    monkeypatch.setattr(role, "max_weight_bytes", lambda path: 1 << 20)
    receiver = role.make_receiver(config, 0, endpoints, tmp_path / "run", device="cpu")
    client = GeneratorClient(endpoints, 0)
    generator = Generator(receiver, client)
    for close in (announcer.close, learner.close, sender.close, client.close, receiver.close):
        cleanup.append(close)
    receiver.start()
    receiver.engine_is_up()
    sender.send(0, weights(0))
    generator.until(0)
    for version in (1, 2):
        for lease in ask(client, version - 1, receiver.following(), num_groups=2).leases:
            client.finish(make_group(lease, version - 1))
        assert learner.take(version) is not None
        learner.commit(version, {})
        sender.send(version, weights(version))
        generator.until(version)
    end()
    serve()  # it has no journal here, and knows nothing
    sender.wait()
    late = role.make_receiver(config, 1, endpoints, tmp_path / "run", device="cpu")
    cleanup.append(late.close)
    late.start()
    late.engine_is_up()
    deadline_s = time.monotonic() + 60.0
    joiner = GeneratorClient(endpoints, 1)
    cleanup.append(joiner.close)
    while (announced := ask(joiner, NO_VERSION, late.following()).stored) is None:
        assert time.monotonic() < deadline_s, "the learner does not announce again"
        time.sleep(0.05)
    late.announce(announced)
    assert next_staged(late).version == 2
