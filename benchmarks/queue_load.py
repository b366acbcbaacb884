"""Puts load on a real replay process through real clients, with processes that generate synthetic groups instead of
engines, and discard batches instead of training on them."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.launch.run_dir import run_endpoints
from asyncrl.replay.client import GeneratorClient, LauncherClient, LearnerClient
from asyncrl.types import NO_VERSION, Group, Lease, Prompt, PromptPosition, Trajectory
from asyncrl.util.processes import end_with_parent, tune_gc
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.messages import GeneratorStats

GROUP_SIZE, PROMPT_TOKENS = 8, 32
GROUPS_PER_STEP = 128
TOKEN_BYTES = 13
"""Bytes per token: token id, log-prob, version, and action mask."""
SHAPES = 16
"""Number of different synthetic groups per generator."""
CHECKPOINT_STEPS = 100
DENIED_S = 0.004
"""Pause of a generator that received fewer leases than it requested."""
CONTEXT = multiprocessing.get_context("spawn")


class MadeUpPrompts:
    """Synthetic prompts with increasing row numbers."""

    skipped_rows = 0
    filtered_rows = 0
    num_rows = 1 << 20

    def __init__(self) -> None:
        self.row = 0

    def __next__(self) -> Prompt:
        self.row += 1
        return self.prompt((self.row - 1) % self.num_rows)

    def prompt(self, row: int) -> Prompt:
        return Prompt(row, np.arange(PROMPT_TOKENS, dtype=np.int32), "", "made up")

    @property
    def position(self) -> PromptPosition:
        return PromptPosition(drawn=self.row)

    def seek(self, position: PromptPosition) -> None:
        self.row = position.drawn


class MadeUpGroups:
    """Synthetic groups of trajectories with `completion_tokens` tokens on average and twice as many at most, all of one
    version."""

    def __init__(self, index: int, completion_tokens: int) -> None:
        dice = np.random.default_rng(index)
        lengths = PROMPT_TOKENS + dice.integers(1, 2 * completion_tokens, (SHAPES, GROUP_SIZE))
        self._index = index
        self._members = [[_trajectory(int(length), float(dice.random())) for length in shape] for shape in lengths]

    def make(self, lease: Lease, version: int, now_s: float) -> Group:
        members = self._members[lease.ticket % SHAPES]
        if members[0].versions[-1] != version:
            members = [
                replace(one, versions=np.where(one.action_mask, version, NO_VERSION).astype(np.int32))
                for one in members
            ]
            self._members[lease.ticket % SHAPES] = members
        row, source = lease.prompt.row, lease.prompt.data_source
        return Group(lease.ticket, lease.attempt, self._index, row, source, version, version, members, now_s, now_s)


def _trajectory(length: int, reward: float) -> Trajectory:
    mask = np.arange(length) >= PROMPT_TOKENS
    return Trajectory(
        tokens=np.arange(length, dtype=np.int32),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=np.where(mask, NO_VERSION - 1, NO_VERSION).astype(np.int32),
        status="completed",
        reward=reward,
    )


class MadeUpGenerator:
    """A generator that has leases at the newest version and finishes each after `group_s` seconds on average."""

    def __init__(
        self, endpoints: Endpoints, index: int, *, leases: int, completion_tokens: int, group_s: float
    ) -> None:
        self.done = False
        self._client, self._groups = GeneratorClient(endpoints, index), MadeUpGroups(index, completion_tokens)
        self._leases, self._group_s = leases, group_s
        self._dice = np.random.default_rng(index)
        self._held: list[tuple[float, int, Lease]] = []
        """A heap of leases, by the times at which they are finished."""
        self._next_ask_s, self._asked = 0.0, NO_VERSION

    def turn(self, newest: int, timeout_s: float) -> None:
        """Finishes groups that are due, requests as many leases, and waits up to `timeout_s` for a reply."""
        now_s, room = time.monotonic(), self._leases - len(self._held)
        if room and not self._client.outstanding and (now_s >= self._next_ask_s or newest != self._asked):
            self._client.ask(newest, room, GeneratorStats.of())
            self._asked = newest
        reply = self._client.poll(timeout_s)
        now_s = time.monotonic()
        if reply is not None:
            self.done = reply.done
            self._next_ask_s = now_s + (max(DENIED_S, reply.pause_s) if len(reply.leases) < room else 0.0)
            for lease in reply.leases:
                end_s = now_s + self._group_s * float(self._dice.uniform(0.5, 1.5))
                heappush(self._held, (end_s, lease.ticket, lease))
        while self._held and self._held[0][0] <= now_s:
            self._client.finish(self._groups.make(heappop(self._held)[-1], newest, now_s))
        if self.done:
            self._client.close()


def generate(
    endpoints: Endpoints, version: Any, indexes: range, leases: int, completion_tokens: int, group_s: float
) -> None:
    """Runs the generators with these indexes in one process until the run ends."""
    generators = [
        MadeUpGenerator(endpoints, index, leases=leases, completion_tokens=completion_tokens, group_s=group_s)
        for index in indexes
    ]
    while generators:
        if len(generators) > 1:
            time.sleep(DENIED_S)
        for one in generators:
            one.turn(version.value, DENIED_S if len(generators) == 1 else 0.0)
        generators = [one for one in generators if not one.done]


def learn(endpoints: Endpoints, version: Any, commit_s: Any) -> None:
    """Takes every batch ahead, as learners do, and commits it; reports checkpoints without writing any. `commit_s` gets
    the time of the last commit."""
    client, thread = LearnerClient(endpoints, 0), ThreadPoolExecutor(1)
    client.begin(0)
    step, checkpoints = 1, [0]
    taking = thread.submit(client.take, step)
    while taking.result() is not None:
        taking = thread.submit(client.take, step + 1)
        saving = step % CHECKPOINT_STEPS == 0
        checkpoints = [*checkpoints, step][-2:] if saving else checkpoints
        began_s = time.monotonic()
        client.commit(step, {"learner/loss": 0.0, "learner/wait_s": 0.0}, saving=saving, checkpoints=checkpoints)
        commit_s.value = time.monotonic() - began_s
        version.value = step
        step += 1
    client.close()


def hold_queue(config: Config, endpoints: Endpoints, folder: Path, journaled: bool) -> None:
    from asyncrl.observe.trace import TraceWriter
    from asyncrl.replay.journal import Journal
    from asyncrl.replay.queue import ReplayQueue
    from asyncrl.replay.server import run_replay

    journal = Journal(folder / "journal", flush=config.journal.flush) if journaled else None
    queue = ReplayQueue(config, MadeUpPrompts(), TraceWriter(folder / "trace.parquet"), journal=journal)
    tune_gc()
    run_replay(queue, endpoints, lambda: False)


@dataclass
class Load:
    """Processes under full load until `end`. The replay process has the first core; the others share the remaining
    cores."""

    folder: Path
    generators: int = 2
    in_one_process: bool = False
    """True if all generators run in one process; otherwise each has a separate process."""
    leases: int = 64
    """Maximum number of leases of a generator."""
    group_s: float = 0.0
    """Average time of a generator for a group."""
    completion_tokens: int = 96
    journaled: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    processes: dict[str, BaseProcess] = field(default_factory=dict)
    _addresses: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        values = {
            "model.path": "none", "data.train": "none", "steps": 10**9, "launch.generators": self.generators,
            "generator.group_size": GROUP_SIZE, "replay.groups_per_step": GROUPS_PER_STEP, "replay.max_staleness": 4,
        }  # fmt: skip
        config = load_config(None, values | self.settings)
        endpoints = self._addresses.enter_context(run_endpoints(config))
        first, rest = cores()
        self._version = version = CONTEXT.Value("q", 0)  # referenced until all processes have received it
        self.commit_s = CONTEXT.Value("d", 0.0)
        """Seconds of the learner's last commit."""
        self._start("replay", first, hold_queue, config, endpoints, self.folder, self.journaled)
        self._start("learner", rest, learn, endpoints, version, self.commit_s)
        size = self.generators if self.in_one_process else 1
        for index in range(0, self.generators, size):
            indexes = range(index, index + size)
            own = endpoints, version, indexes, self.leases, self.completion_tokens, self.group_s
            self._start(f"generator-{index}", rest, generate, *own)
        self.client = LauncherClient(endpoints, timeout_s=60.0)

    def end(self) -> dict[str, Any]:
        """Ends all processes and returns the queue's summary."""
        summary = self.client.summary()
        self.client.stop("enough")
        for name, process in self.processes.items():
            if name != "replay":
                process.join(30)
        self.client.shutdown()
        self.client.close()
        self.processes["replay"].join(120)
        self._addresses.close()
        return summary

    def _start(self, name: str, cpus: list[int], run: Callable[..., None], *arguments: Any) -> None:
        self.processes[name] = start(name, cpus, run, *arguments)


def processor_s(pid: int) -> float:
    """Returns the processor time of all threads of a process, to the nanosecond: psutil counts in ticks of 10 ms."""
    tasks = [*Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def cores() -> tuple[list[int], list[int]]:
    """Returns the first core and the remaining cores; with a single core, that core twice."""
    first, *rest = sorted(os.sched_getaffinity(0))
    return [first], rest or [first]


def start(name: str, cpus: list[int], run: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Starts a process on these cores that ends with this process."""
    process = CONTEXT.Process(target=_run, args=(os.getpid(), cpus, run, *arguments), name=name, daemon=True)
    process.start()
    return process


def _run(parent: int, cpus: list[int], run: Callable[..., None], *arguments: Any) -> None:
    end_with_parent(parent)
    os.sched_setaffinity(0, cpus)
    run(*arguments)
