"""A service that environments or rewards ask is away for seconds: groups wait or are refunded, the run continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config.config import Config
from asyncrl.environments.pool import EnvironmentPool
from asyncrl.generator.engine import Completion
from asyncrl.generator.loop import GroupRunner, make_group
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.codec import pack_group
from asyncrl.replay.live_group import MIN_FAILURES
from asyncrl.replay.queue import ReplayQueue
from asyncrl.rewards.pool import RewardPool
from asyncrl.wire.endpoints import LOOPBACK, Endpoints
from tests.helpers.replay import EndlessPrompts, ask_queue, small_config
from tests.helpers.reward_pool import save_tokenizer, tokens

AWAY_S = 3.0
WITHIN_S = 60.0
FUNCTIONS = """
import urllib.request
from asyncrl.environments import Environment, Step

def ask():
    with urllib.request.urlopen("http://{address}", timeout=5) as answer:
        return float(answer.read())

def score(solution_str):
    return ask()

class Tool(Environment):
    def step(self, action):
        return Step("", reward=ask(), done=True)
"""


class Service:
    """Answers with increasing numbers, at the same port after each absence."""

    def __init__(self) -> None:
        self._numbers, self._port = count(), 0
        self.num_answers = 0

    @contextmanager
    def up(self) -> Iterator[str]:
        """Serves at the address."""
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(str(next(service._numbers)).encode())
                service.num_answers += 1

            def log_message(self, *_: object) -> None: ...

        with HTTPServer((LOOPBACK, self._port), Handler) as server:
            self._port = server.server_port
            thread = threading.Thread(target=server.serve_forever, args=[0.01])
            thread.start()
            try:
                yield f"{LOOPBACK}:{self._port}"
            finally:
                server.shutdown()
                thread.join(10)


class InstantEngine:
    """Completes each request in the next step with two tokens, under the newest version."""

    def __init__(self, queue: ReplayQueue) -> None:
        self._queue, self._keys = queue, list[str]()

    @property
    def version(self) -> int:
        return self._queue.ledger.steps

    @property
    def num_running(self) -> int:
        return len(self._keys)

    def num_generated(self, key: str) -> int:
        return 0

    def add(self, key: str, prompt: Any, **options: Any) -> None:
        self._keys.append(key)

    def abort(self, keys: Any) -> None:
        self._keys = [key for key in self._keys if key not in set(keys)]

    def step(self) -> list[Completion]:
        keys, self._keys = self._keys, []
        versions, said = np.full(2, self.version, np.int32), tokens("7")
        return [Completion(key, said, np.full(2, -0.5, np.float32), versions, "completed") for key in keys]


class Run:
    """A run's queue and one generator, which load each version at once."""

    def __init__(self, config: Config, folder: Path, *, parts: dict[str, Any]) -> None:
        self.queue = ReplayQueue(config, EndlessPrompts(), TraceWriter(folder / "trace.parquet"))
        self._engine = InstantEngine(self.queue)
        self._runner = GroupRunner(config, self._engine, **parts)  # type: ignore[arg-type]

    @property
    def num_refunded(self) -> int:
        return sum(amount.groups for amount in self.queue.ledger.refunded.values())

    def play(self, *, steps: int = 0, for_s: float = 0.0) -> None:
        """Plays so many steps, or so long."""
        until, began_s = self.queue.ledger.steps + steps, time.monotonic()
        while self.queue.ledger.steps < until or time.monotonic() - began_s < for_s:
            assert time.monotonic() - began_s < WITHIN_S, f"at step {self.queue.ledger.steps}"
            self._tick()
            time.sleep(0.001)

    def _tick(self) -> None:
        queue, runner, version = self.queue, self._runner, self.queue.ledger.steps
        for lease in ask_queue(queue, 0, version, runner.free_capacity(evaluates=False, denied=False)[0])[0]:
            runner.start(lease)
        runner.flush()
        runner.take(self._engine.step())
        runner.poll()
        for group, scored in runner.collect():
            queue.finish(*pack_group(make_group(group, scored, generator=0)))
        if queue.take(0, version + 1)[0] == "shard":
            queue.commit(version + 1, {})


@pytest.mark.parametrize("asks", ["environment", "reward"])
def test_a_service_that_is_away_for_seconds_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path)
    service = Service()
    with service.up() as address:
        (tmp_path / "mine.py").write_text(FUNCTIONS.replace("{address}", address))
        own = {"environment__name": "mine.py:Tool"} if asks == "environment" else {"rewards": "mine.py:score"}
        config = small_config(model__path=str(tmp_path), replay__groups_per_step=8, steps=10_000, **own)
        endpoints = Endpoints("run", "ipc://none", "ipc://none", "ipc://none")
        if asks == "environment":
            pool: Any = EnvironmentPool(config, window_tokens=64, endpoints=endpoints)
            run = Run(config, tmp_path, parts={"rewards": None, "environments": pool})
        else:
            pool = RewardPool(config, tokenizer_path=str(tmp_path), retries=True)
            run = Run(config, tmp_path, parts={"rewards": pool, "environments": None})
    try:
        with service.up():
            run.play(steps=3)
        answered = service.num_answers
        run.play(for_s=AWAY_S)
        assert service.num_answers == answered
        refunded = run.num_refunded
        with service.up():
            run.play(steps=3)
            run.play(for_s=0.5)
    finally:
        pool.close()
        run.queue.store.close()
    if asks == "environment":
        assert refunded > MIN_FAILURES, "as many failures in a row do not end a run that has worked before"
    else:
        # The service may end between the two completions of a group, of which one has a reward then.
        assert run.num_refunded <= 1, "the completions are scored when the service is back"
