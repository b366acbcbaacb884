"""A replay process that is killed again and again, with a generator and a learner that only see it as slow."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from asyncrl.launch.machine import find_port
from asyncrl.replay import client as client_module
from asyncrl.replay.client import GeneratorClient, LauncherClient, LearnerClient
from asyncrl.types import Lease
from asyncrl.wire.messages import GeneratorStats
from tests.helpers.replay import loopback_endpoints, make_group
from tests.replay.replay_process import MAX_STALENESS

STEPS = 40
KILLS = 5


class Process:
    """The replay process, started again whenever it was killed."""

    def __init__(self, folder: Path, port: int) -> None:
        self._command = [sys.executable, "-m", "tests.replay.replay_process", str(folder), str(port), str(STEPS)]
        self._output = (folder / "replay.out").open("w")
        self.starts = 0
        self._start()

    def _start(self) -> None:
        self.starts += 1
        self.process = subprocess.Popen(self._command, stdout=self._output, stderr=subprocess.STDOUT)

    def kill(self, *, after_s: float) -> None:
        time.sleep(after_s)
        assert self.process.poll() is None, "it ended by itself"
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=10)
        self._start()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=10)
        self._output.close()


def generate(endpoints, learned: list[int], errors: list[Exception]) -> None:  # type: ignore[no-untyped-def]
    """A generator that finishes a lease at every poll, and drops or sends twice some of them."""
    rng, client, leases = random.Random(1), GeneratorClient(endpoints, 0), list[Lease]()
    tokens, done = 0, False
    try:
        while not done:
            version = learned[0]
            client.ask(version, 3, GeneratorStats.of(tokens=tokens))
            reply = client.poll(0.005)
            if reply is not None:
                leases, done = leases + reply.leases, reply.done
            if leases:
                lease = leases.pop(0)
                if rng.random() < 0.1:
                    client.release([(lease.ticket, lease.attempt, 1)])
                else:
                    group = make_group(lease, version)
                    client.finish(group)
                    tokens += group.num_action_tokens
        client.close()
    except Exception as error:  # shown by the test's own thread
        errors.append(error)


@pytest.mark.timeout(240)
def test_every_group_is_trained_once_whenever_the_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "RESEND_S", 0.3)
    endpoints = loopback_endpoints(find_port())
    process = Process(tmp_path, int(endpoints.replay.rsplit(":", 1)[1]))
    learned, errors, seen = [0], list[Exception](), list[int]()
    generator = threading.Thread(target=generate, args=(endpoints, learned, errors))
    learner = LearnerClient(endpoints, 0, timeout_s=60)
    launcher = LauncherClient(endpoints, timeout_s=30)
    rng = random.Random(0)
    kills: list[Future[None]] = []
    killer, taker = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    try:
        assert learner.begin(0) == 0
        generator.start()
        killed_at = set(rng.sample(range(1, STEPS), KILLS))
        taking = taker.submit(learner.take, 1)
        for step in range(1, STEPS + 1):
            if step in killed_at:
                kills.append(killer.submit(process.kill, after_s=rng.random() * 0.02))
            shard = taking.result(timeout=60)
            assert shard is not None and shard.step == step
            taking = taker.submit(learner.take, step + 1)
            seen += [group.ticket for group in shard.groups]
            learner.commit(step, {"learner/wait_s": 0.0}, checkpoints=[step])
            learned[0] = step
            time.sleep(0.005)
        for kill in kills:
            kill.result(timeout=60)
        assert process.starts == KILLS + 1
        assert taking.result(timeout=60) is None, "there is no step after the last"
        generator.join(timeout=60)
        assert errors == []
        assert not generator.is_alive()
        time.sleep(0.1)
        summary = launcher.summary()
        launcher.shutdown()
        assert process.process.wait(timeout=60) == 0, (tmp_path / "replay.out").read_text()[-2000:]
    finally:
        killer.shutdown()
        process.end()
        for client in (learner, launcher):
            client.close()
        taker.shutdown()
    assert len(seen) == len(set(seen)) == 2 * STEPS
    assert (summary["steps"], summary["ledger"]["trained"]) == (STEPS, 2 * STEPS)
    rows = pq.read_table(tmp_path / "trace.parquet").to_pylist()
    trained = [row for row in rows if row["outcome"] == "trained"]
    assert sorted(row["ticket"] for row in trained) == sorted(seen)
    assert all(0 <= row["started_s"] <= row["finished_s"] <= row["taken_s"] <= row["trained_s"] for row in trained)
    assert all(row["train_version"] - row["start_version"] <= MAX_STALENESS for row in trained)
