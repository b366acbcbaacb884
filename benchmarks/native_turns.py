"""Measures the processor time of a turn of a native environment beside the engine: in the environment host, and in
the generator. The host is a real one; the engine answers at once and costs nothing, so that what is left of the
generator is its episodes and their messages.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.frame import CannotRun, Limit, Round, Row
from benchmarks.gateway import save_tokenizer
from benchmarks.queue_load import processor_s

if TYPE_CHECKING:
    from asyncrl.generator.engine import Completion
    from asyncrl.generator.episodes import Episodes

TURNS, TURN_TOKENS, GROUP_SIZE = 8, 32, 8
LIVE_GROUPS = 32
GROUPS, QUICK_GROUPS = 1600, 100
STEP_S = 0.005
"""Pause in place of a step of the engine."""
TIMEOUT_S = 300.0
PROMPT_TOKENS = 64
WINDOW_TOKENS = 4096
ENVIRONMENT = "benchmarks.answers:Lasting"


class InstantEngine:
    """Answers every request at the next step with the same completion."""

    def __init__(self) -> None:
        import numpy as np

        self._keys: list[str] = []
        self._tokens = list(range(TURN_TOKENS))
        self._logprobs = np.zeros(TURN_TOKENS, dtype=np.float32)
        self._versions = np.zeros(TURN_TOKENS, dtype=np.int32)

    @property
    def num_running(self) -> int:
        return len(self._keys)

    def add(self, key: str, prompt: Sequence[int], **options: Any) -> None:
        self._keys.append(key)

    def step(self) -> list[Completion]:
        from asyncrl.generator.engine import Completion

        keys, self._keys = self._keys, []
        return [Completion(key, self._tokens, self._logprobs, self._versions, "completed") for key in keys]

    def abort(self, keys: Sequence[str]) -> None: ...

    def num_generated(self, key: str) -> int:
        return 0


def play(episodes: Episodes, engine: InstantEngine, groups: int) -> int:
    """Plays this many groups, LIVE_GROUPS at a time; returns the number of turns."""
    import numpy as np

    from asyncrl.generator.groups import Running
    from asyncrl.types import Lease, Prompt

    prompt = Prompt(0, np.arange(PROMPT_TOKENS, dtype=np.int32), "", "made up")
    ended, started, turns, deadline_s = Counter[int](), 0, 0, time.monotonic() + TIMEOUT_S
    while len(ended) < groups or min(ended.values()) < GROUP_SIZE:
        while started < groups and episodes.num_live <= (LIVE_GROUPS - 1) * GROUP_SIZE:
            group = Running(Lease(started, 0, prompt), GROUP_SIZE, 0, 0.0)
            for index, key in enumerate(group.engine_keys()):
                episodes.start(group, index, key)
            started += 1
        for completion in engine.step():
            episodes.act(completion)
            turns += 1
        for one in episodes.poll():
            if one.ended.error:
                raise CannotRun(one.ended.error)
            ended[one.group.lease.ticket] += 1
        time.sleep(STEP_S)
        if time.monotonic() > deadline_s:
            raise CannotRun(f"{groups} groups were not played after {TIMEOUT_S:g} s: {len(ended)} are")
    return turns


def measure(quick: bool) -> Iterator[Round]:
    from asyncrl.config.load import load_config
    from asyncrl.environments.pool import EnvironmentPool
    from asyncrl.generator.episodes import Episodes
    from asyncrl.launch.run_dir import run_endpoints

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        save_tokenizer(Path(folder))
        config = load_config("demo", {"model.path": folder, "environment.name": ENVIRONMENT})
        endpoints = stack.enter_context(run_endpoints(config))
        pool = EnvironmentPool(config, window_tokens=WINDOW_TOKENS, endpoints=endpoints)
        stack.callback(pool.close)
        engine = InstantEngine()
        episodes = Episodes(config, pool, engine)  # type: ignore[arg-type]
        play(episodes, engine, LIVE_GROUPS)  # starts the host
        (host,) = (child.pid for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline()))
        while True:
            host_s, own_s = processor_s(host), time.process_time()
            turns = play(episodes, engine, QUICK_GROUPS if quick else GROUPS)
            host_s, own_s = processor_s(host) - host_s, time.process_time() - own_s
            yield {"host ms a turn": 1e3 * host_s / turns, "generator us a turn": 1e6 * own_s / turns}


ROW = Row(
    what=f"processor time of a turn of a native environment, {LIVE_GROUPS * GROUP_SIZE} episodes of {TURNS} turns at "
    "once",
    against="0.25 ms of the host, and 60 us of the generator beside its engine",
    limits={
        "host ms a turn": Limit(0.25, at_most=True),
        "generator us a turn": Limit(60, at_most=True),
    },
    measure=measure,
)
