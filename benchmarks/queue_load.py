"""A real replay process under load: real clients, and in place of engines and learners processes that make up groups
and throw batches away."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config import Config, load_config
from asyncrl.launch.resources import make_endpoints
from asyncrl.processes import end_with_parent
from asyncrl.replay.client import GeneratorClient, GeneratorStats, LauncherClient, LearnerClient
from asyncrl.types import NO_VERSION, Endpoints, Group, Lease, Prompt, Trajectory

GROUP_SIZE, PROMPT_TOKENS = 8, 32
SHAPES = 64
"""Different groups that a generator makes up."""
CHECKPOINT_STEPS = 100
DENIED_S = 0.004
"""Pause of a generator that got fewer leases than it asked for."""
CONTEXT = multiprocessing.get_context("spawn")


class MadeUpPrompts:
    """Prompts of increasing row numbers."""

    skipped_rows = 0

    def __init__(self) -> None:
        self.row = 0

    def __next__(self) -> Prompt:
        self.row += 1
        return self.prompt(self.row - 1)

    def prompt(self, row: int) -> Prompt:
        return Prompt(row, np.arange(PROMPT_TOKENS, dtype=np.int32), "", "made up")

    def state_dict(self) -> dict[str, int]:
        return {"row": self.row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.row = state["row"]


class MadeUpGroups:
    """Groups of trajectories with up to twice so many completion tokens, all of one version."""

    def __init__(self, index: int, completion_tokens: int) -> None:
        dice = np.random.default_rng(index)
        self._index = index
        self._lengths = PROMPT_TOKENS + dice.integers(1, 2 * completion_tokens, (SHAPES, GROUP_SIZE))
        self._rewards = dice.random((SHAPES, GROUP_SIZE))
        self._version = NO_VERSION
        self._members: list[list[Trajectory]] = []

    def make(self, lease: Lease, version: int, now_s: float) -> Group:
        if version != self._version:
            self._version = version
            self._members = [
                [self._trajectory(int(length), float(reward)) for length, reward in zip(*one, strict=True)]
                for one in zip(self._lengths, self._rewards, strict=True)
            ]
        members = self._members[lease.ticket % SHAPES]
        row, source = lease.prompt.row, lease.prompt.data_source
        return Group(lease.ticket, lease.attempt, self._index, row, source, version, version, members, now_s, now_s)

    def _trajectory(self, length: int, reward: float) -> Trajectory:
        mask = np.arange(length) >= PROMPT_TOKENS
        return Trajectory(
            tokens=np.arange(length, dtype=np.int32),
            action_mask=mask,
            behavior_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
            versions=np.where(mask, self._version, NO_VERSION).astype(np.int32),
            status="completed",
            reward=reward,
        )


def generate(config: Config, endpoints: Endpoints, version: Any, index: int, completion_tokens: int) -> None:
    """Asks for groups at the newest version and finishes them at once."""
    client, groups = GeneratorClient(endpoints, index), MadeUpGroups(index, completion_tokens)
    wanted = config.generator.max_running_groups
    done, next_ask_s, asked = False, 0.0, NO_VERSION
    while not done:
        newest, now_s = version.value, time.monotonic()
        if not client.outstanding and (now_s >= next_ask_s or newest != asked):
            client.ask(newest, wanted, GeneratorStats())
            asked = newest
        reply = client.poll(DENIED_S)
        if reply is not None:
            done = reply.done
            for lease in reply.leases:
                client.finish(groups.make(lease, newest, time.monotonic()))
            next_ask_s = time.monotonic() + (DENIED_S if len(reply.leases) < wanted else 0.0)
    client.close()


def learn(endpoints: Endpoints, version: Any) -> None:
    """Takes and commits every batch, with checkpoints that it only says it has."""
    client = LearnerClient(endpoints, 0)
    client.begin(0)
    step, checkpoints = 1, [0]
    while client.take(step) is not None:
        saving = step % CHECKPOINT_STEPS == 0
        checkpoints = [*checkpoints, step][-2:] if saving else checkpoints
        client.commit(step, {"learner/loss": 0.0, "learner/wait_s": 0.0}, saving=saving, checkpoints=checkpoints)
        version.value = step
        step += 1
    client.close()


def replay(config: Config, endpoints: Endpoints, folder: Path, journaled: bool) -> None:
    from asyncrl.replay.journal import Journal
    from asyncrl.replay.queue import ReplayQueue
    from asyncrl.replay.server import run_replay
    from asyncrl.replay.trace import TraceWriter

    journal = Journal(folder / "journal", flush=config.journal.flush) if journaled else None
    queue = ReplayQueue(config, MadeUpPrompts(), TraceWriter(folder / "trace.parquet"), journal=journal)
    run_replay(queue, endpoints, lambda: False)


@dataclass
class Load:
    """Processes under full load until `end`; the replay process has the first core for itself, the others the rest."""

    folder: Path
    generators: int = 2
    completion_tokens: int = 96
    journaled: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    processes: dict[str, BaseProcess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = {
            "model.path": "none", "data.train": "none", "steps": 10**9, "launch.generators": self.generators,
            "generator.group_size": GROUP_SIZE, "replay.groups_per_step": 32, "replay.max_staleness": 4,
        }  # fmt: skip
        config = load_config(None, values | self.settings)
        endpoints = make_endpoints(config, "load")
        first, *rest = sorted(os.sched_getaffinity(0))
        self._version = version = CONTEXT.Value("q", 0)  # kept until all processes have it
        self._start("replay", [first], replay, config, endpoints, self.folder, self.journaled)
        self._start("learner", rest or [first], learn, endpoints, version)
        for index in range(self.generators):
            own = config, endpoints, version, index, self.completion_tokens
            self._start(f"generator-{index}", rest or [first], generate, *own)
        self.client = LauncherClient(endpoints, timeout_s=60.0)

    def end(self) -> dict[str, Any]:
        """Ends all processes; gives the queue's summary."""
        summary = self.client.summary()
        self.client.stop("enough")
        for name, process in self.processes.items():
            if name != "replay":
                process.join(30)
        self.client.shutdown()
        self.client.close()
        self.processes["replay"].join(120)
        return summary

    def _start(self, name: str, cpus: list[int], run: Callable[..., None], *arguments: Any) -> None:
        process = CONTEXT.Process(target=_run, args=(os.getpid(), cpus, run, *arguments), name=name, daemon=True)
        process.start()
        self.processes[name] = process


def _run(parent: int, cpus: list[int], run: Callable[..., None], *arguments: Any) -> None:
    end_with_parent(parent)
    os.sched_setaffinity(0, cpus)
    run(*arguments)
