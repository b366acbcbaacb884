"""Servers announce their addresses to the replay queue; learner ranks that were given up change nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.errors import PeerTimeoutError, ProtocolError, RunError
from asyncrl.launch.machine import find_port
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.client import GeneratorClient, LearnerClient
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.server import MAX_NAMES, Directory, run_replay
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.messages import GeneratorStats, Leases, Ok, Stop
from asyncrl.wire.rpc import Reply, Server, announce, located
from tests.helpers.replay import EndlessPrompts, loopback_endpoints, make_group, small_config

NAMES = {"weights": "run:weights", "learners": "run:learners"}


@pytest.fixture
def endpoints() -> Endpoints:
    return replace(loopback_endpoints(find_port()), **NAMES)


@contextmanager
def serving(endpoints: Endpoints, folder: Path) -> Iterator[ReplayQueue]:
    queue = ReplayQueue(small_config(), EndlessPrompts(), TraceWriter(folder / f"{time.monotonic()}.parquet"))
    directory, stop = Directory(folder / "addresses.json", endpoints.run_id), threading.Event()
    thread = threading.Thread(target=run_replay, args=(queue, endpoints, stop.is_set), kwargs={"directory": directory})
    thread.start()
    try:
        yield queue
    finally:
        stop.set()
        thread.join(timeout=10)
    assert not thread.is_alive()


def start(endpoints: Endpoints, epoch: int) -> Endpoints:
    """The endpoints of this start of the learner ranks."""
    return replace(endpoints, epoch=epoch)


def ask(endpoints: Endpoints) -> Leases:
    with closing(GeneratorClient(endpoints, 0)) as client:
        client.ask(0, 1, GeneratorStats.of())
        reply = client.poll(5.0)
    assert reply is not None
    return reply


def test_a_client_finds_the_server_wherever_it_listens(endpoints: Endpoints, tmp_path: Path) -> None:
    with serving(endpoints, tmp_path):
        assert ask(endpoints).weights == "", "not announced yet"
        with pytest.raises(PeerTimeoutError, match=r"no process listens for 'weights': none has said so within 0.3 s"):
            located(endpoints, endpoints.weights, timeout_s=0.3)
        with closing(Server(endpoints, endpoints.weights, "store", {Stop: lambda _: Reply(Ok({}))})) as server:
            announce(endpoints, endpoints.weights, server.address)
            assert server.address.startswith("tcp://127.0.0.1:") and not server.address.endswith(":0")
            assert located(endpoints, endpoints.weights, timeout_s=5.0) == server.address
            assert ask(endpoints).weights == server.address, "generators learn it with their leases"
    assert (tmp_path / "addresses.json").stat().st_mode & 0o077 == 0


def test_an_address_without_a_name_needs_no_queue() -> None:
    bare = loopback_endpoints(find_port())
    assert located(bare, "ipc:///x/weights", timeout_s=0.1) == "ipc:///x/weights"
    announce(bare, "ipc:///x/weights", "ipc:///x/weights")


def test_a_restarted_queue_knows_the_addresses_of_this_launch_only(endpoints: Endpoints, tmp_path: Path) -> None:
    with serving(endpoints, tmp_path):
        announce(start(endpoints, 2), endpoints.weights, "tcp://10.0.0.2:5")
    with serving(endpoints, tmp_path):
        assert located(endpoints, endpoints.weights, timeout_s=5.0) == "tcp://10.0.0.2:5"
        with pytest.raises(RunError, match="superseded: start 2 has announced 'weights', and this process is start 1"):
            announce(start(endpoints, 1), endpoints.weights, "tcp://10.0.0.1:5")
    with serving(endpoints, tmp_path):
        announce(start(endpoints, 2), endpoints.learners, "tcp://10.0.0.2:6")
    with (
        serving(endpoints, tmp_path),
        closing(LearnerClient(start(endpoints, 1), 0, timeout_s=5.0)) as old,
        pytest.raises(RunError, match="superseded: start 2 of the learner ranks trains"),
    ):
        old.begin(0)
    later = replace(endpoints, run_id="another launch")
    with serving(later, tmp_path), pytest.raises(PeerTimeoutError):
        located(later, endpoints.weights, timeout_s=0.1)


def test_ranks_wait_for_the_rendezvous_of_their_own_start(endpoints: Endpoints, tmp_path: Path) -> None:
    with serving(endpoints, tmp_path):
        announce(endpoints, endpoints.learners, "tcp://10.0.0.1:5")
        second = start(endpoints, 1)
        with pytest.raises(PeerTimeoutError):
            located(second, endpoints.learners, timeout_s=0.3, own_epoch=True)
        announce(second, endpoints.learners, "tcp://10.0.0.2:5")
        assert located(second, endpoints.learners, timeout_s=5.0, own_epoch=True) == "tcp://10.0.0.2:5"


def test_learner_ranks_that_were_replaced_change_nothing(endpoints: Endpoints, tmp_path: Path) -> None:
    with serving(endpoints, tmp_path) as queue:
        old, new = (LearnerClient(start(endpoints, epoch), 0, timeout_s=5.0) for epoch in (0, 1))
        with closing(GeneratorClient(endpoints, 0)) as generator, closing(old), closing(new):
            generator.ask(0, 4, GeneratorStats.of())
            reply = generator.poll(5.0)
            assert reply is not None
            for lease in reply.leases:
                generator.finish(make_group(lease, 0))
            assert old.begin(0) == 0 and old.take(1) is not None
            assert new.begin(0) == 0
            for late in (
                lambda: old.commit(1, {}),
                lambda: old.take(1),
                lambda: old.begin(0),
                lambda: next(old.evaluations(lambda: False)),
            ):
                with pytest.raises(RunError, match="superseded: start 1 of the learner ranks trains"):
                    late()
            assert queue.status()["step"] == 0
            assert new.take(1) is not None
            new.commit(1, {})
            assert queue.status()["step"] == 1


def test_the_directory_is_bounded() -> None:
    directory = Directory(None, "run")
    for number in range(MAX_NAMES):
        directory.announce(str(number), "tcp://10.0.0.1:5", 0)
    directory.announce("0", "tcp://10.0.0.1:6", 0)
    with pytest.raises(ProtocolError, match="one name too many"):
        directory.announce("another", "tcp://10.0.0.1:5", 0)
