"""Environment hosts: real processes, with environments that hang and kill their process."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from asyncrl.config.config import Config
from asyncrl.environments import pool as pool_module
from asyncrl.environments.pool import EnvironmentPool
from asyncrl.errors import RunError
from asyncrl.types import Prompt
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.service_messages import EpisodeEnded, NextTurn
from tests.helpers.reward_pool import save_tokenizer, tokens

EXTRA = "?<>.[]*"
PROMPT = np.array(tokens("12+07=")[:-1], dtype=np.int32)
WITHIN_S = 60.0

Make = Callable[..., EnvironmentPool]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path, extra=EXTRA)
    shutil.copy(Path(__file__).with_name("bad_environments.py"), tmp_path / "mine.py")
    pools: list[EnvironmentPool] = []

    def start(name: str = "guess", **settings: object) -> EnvironmentPool:
        values = {"model": {"path": str(tmp_path)}, "data": {"train": "d"}, "generator": {"max_new_tokens": 10}}
        config = Config.model_validate({**values, "environment": {"name": name, **settings}})
        pools.append(
            EnvironmentPool(
                config, window_tokens=64, endpoints=Endpoints("run", "ipc://none", "ipc://none", "ipc://none")
            )
        )
        return pools[-1]

    yield start
    children = [host.process.pid for pool in pools for host in pool._hosts]
    for pool in pools:
        pool.close()
    assert not any(psutil.pid_exists(child) for child in children if child)


def prompt(truth: str) -> Prompt:
    return Prompt(3, PROMPT, truth, "test")


def run(
    pool: EnvironmentPool, answer: Callable[[NextTurn, list[int]], list[int]], count: int
) -> dict[str, EpisodeEnded]:
    """Plays until `count` episodes have ended."""
    ended: dict[str, EpisodeEnded] = {}
    deadline_s = time.monotonic() + WITHIN_S
    while len(ended) < count:
        assert time.monotonic() < deadline_s, f"{len(ended)} of {count} episodes have ended"
        for message, observation in pool.poll():
            if isinstance(message, NextTurn):
                pool.said(message.episode, answer(message, observation.tolist()), "completed")
            else:
                ended[message.episode] = message
        time.sleep(0.001)
    return ended


def test_many_episodes_at_once_each_with_its_own_environment(make: Make) -> None:
    pool = make(hosts=2)
    for number in range(200):
        pool.start(str(number), prompt(f"{number % 20:02d}"), seed=number, evaluation=False)
    assert pool.num_live == 200
    heard: dict[str, list[list[int]]] = {}

    def hit(wish: NextTurn, observation: list[int]) -> list[int]:
        heard.setdefault(wish.episode, []).append(observation)
        return tokens(f"{int(wish.episode) % 20:02d}")

    ended = run(pool, hit, 200)
    assert all(one.reward == 1.0 and one.ended == "done" for one in ended.values())
    assert all(len(turns) == 1 for turns in heard.values()) and pool.num_live == 0
    assert len({host.process.pid for host in pool._hosts}) == 2


def test_many_episodes_at_once_see_their_own_state(make: Make) -> None:
    pool = make("mine.py:Remembering")
    for number in range(200):
        pool.start(str(number), prompt(f"{number:04d}"), seed=number, evaluation=False)
    ended = run(pool, lambda wish, _: tokens(f"{int(wish.episode):04d}"), 200)
    assert all(one.turn_rewards == [1.0] * 3 for one in ended.values())
    assert any(one.parts["changed"] for one in ended.values()), "no episode ran beside another one"


def test_a_host_that_dies_is_replaced_and_its_episodes_are_lost(make: Make) -> None:
    pool = make("mine.py:Odd", step_timeout_s=10.0)
    pool.start("fatal", prompt("step kill"), seed=0, evaluation=False)
    pool.start("innocent", prompt("step sleep"), seed=0, evaluation=False)
    ended = run(pool, lambda wish, _: tokens("1"), 2)
    assert {one.ended for one in ended.values()} == {"host"}
    assert "its process ended with exit code 3" in ended["fatal"].error
    pool.start("next", prompt(""), seed=0, evaluation=False)
    assert run(pool, lambda wish, _: tokens("1"), 1)["next"].status == "completed"


def test_a_host_whose_event_loop_is_blocked_is_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "SILENCE_S", 1.5)
    pool = make("mine.py:Quick", step_timeout_s=0.5)
    pool.start("blocks", prompt("step sleep"), seed=0, evaluation=False)
    ended = run(pool, lambda wish, _: tokens("1"), 1)
    assert ended["blocks"].ended == "host" and "has not answered for 2 s" in ended["blocks"].error


def test_a_host_with_many_stuck_threads_is_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_STUCK", 2)
    pool = make("mine.py:Odd", step_timeout_s=0.3)
    first = pool._hosts[0].process.pid
    for number in range(2):
        pool.start(str(number), prompt("step sleep"), seed=0, evaluation=False)
    ended = run(pool, lambda wish, _: tokens("1"), 2)
    assert {one.ended for one in ended.values()} <= {"timeout", "host"}
    deadline_s = time.monotonic() + WITHIN_S
    while pool._hosts[0].process.pid == first:
        assert time.monotonic() < deadline_s
        pool.poll()
        time.sleep(0.01)


def test_a_host_that_cannot_send_is_replaced(make: Make, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from asyncrl.environments.builtin import GuessNumber\nfrom asyncrl.wire.rpc import Server\n"
        "def send(server, peer, seq, reply):\n    assert not reply.body.ended\n    plain(server, peer, seq, reply)\n"
        "plain, Server.send = Server.send, send\n"
    )
    pool = make("mine.py:GuessNumber")
    pool.start("lost", prompt("07"), seed=0, evaluation=False)
    ended = run(pool, lambda wish, _: tokens("07"), 1)
    assert ended["lost"].ended == "host" and "its process ended with exit code 1" in ended["lost"].error


def test_a_dropped_episode_has_no_end(make: Make) -> None:
    pool = make()
    pool.start("dropped", prompt("07"), seed=0, evaluation=False)
    pool.start("kept", prompt("07"), seed=0, evaluation=False)
    waiting: list[NextTurn] = []
    while len(waiting) < 2:
        waiting += [message for message, _ in pool.poll() if isinstance(message, NextTurn)]
    pool.drop(["dropped"])
    pool.said("kept", tokens("07"), "completed")
    assert run(pool, lambda wish, _: [], 1).keys() == {"kept"}
    assert pool.num_live == 0


def test_a_host_that_cannot_start_ends_the_generator(make: Make, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os; os._exit(5)")
    pool = make("mine.py:Odd")
    with pytest.raises(RunError, match="environment host 0 could not be started 3 times: its process ended with exit"):
        run(pool, lambda wish, _: [], 1)
