"""A replay process with keys and few descriptors, while strangers open many connections and say nothing."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.launch.machine import find_port
from asyncrl.replay.client import LauncherClient, LearnerClient
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.sockets import new_keys
from tests.helpers.replay import loopback_endpoints
from tests.replay.test_replay_killed import generate

STRANGERS = 1200
DESCRIPTORS = 256
"""Limit of the replay process. This one has a higher limit: it holds the strangers' ends."""
STEPS = 60


@pytest.fixture
def endpoints() -> Endpoints:
    return replace(loopback_endpoints(find_port()), keys=new_keys())


@pytest.fixture
def process(endpoints: Endpoints, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    port = endpoints.replay.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "tests.replay.replay_process", str(tmp_path), port, str(STEPS), endpoints.keys]
    with (tmp_path / "replay.out").open("wb") as output:
        replay = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS)),
        )
    yield replay
    replay.kill()
    replay.wait(timeout=10)


@pytest.mark.timeout(120)
def test_strangers_that_stay_in_their_handshake_do_not_end_the_run(
    endpoints: Endpoints, process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    learned, errors, strangers = [0], list[Exception](), list[socket.socket]()
    learner, launcher = LearnerClient(endpoints, 0, timeout_s=30), LauncherClient(endpoints, timeout_s=30)
    generator = threading.Thread(target=generate, args=(endpoints, learned, errors))
    port = int(endpoints.replay.rsplit(":", 1)[1])
    try:
        assert learner.begin(0) == 0
        generator.start()
        for step in range(1, STEPS + 1):
            for _ in range(STRANGERS if step == 10 else 0):  # generator and learner are let in
                strangers.append(stranger := socket.socket())
                stranger.setblocking(False)
                stranger.connect_ex(("127.0.0.1", port))
            time.sleep(1.0 if step == 10 else 0.0)  # they are accepted
            assert learner.take(step) is not None
            learner.commit(step, {"learner/wait_s": 0.0}, checkpoints=[step])
            learned[0] = step
        generator.join(timeout=30)
        assert (errors, generator.is_alive()) == ([], False)
        assert launcher.summary()["strangers"] > DESCRIPTORS
        launcher.shutdown()
        assert process.wait(timeout=30) == 0
    except Exception as error:
        raise AssertionError(f"{error!r}: {(tmp_path / 'replay.out').read_text()[-2000:]}") from error
    finally:
        for end in (*strangers, learner, launcher):
            end.close()
