"""Measures the replay queue under the load of synthetic groups, sent through real clients by processes that generate
nothing and train nothing.

The row: the replay process's CPU time per group, from lease to commit with its journal, at full load, when rounds are
large, and at a few groups a second, when each group is a separate round; and its rate with and without a journal.

    python -m benchmarks.replay_queue --minutes 30      # memory of every process at full load, which must not grow
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.launch.run_dir import run_endpoints
from asyncrl.replay.client import GeneratorClient, LauncherClient, LearnerClient
from asyncrl.types import NO_VERSION, Group, Lease, Prompt, PromptPosition, Trajectory
from asyncrl.util.processes import end_with_parent, tune_gc
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.messages import GeneratorStats
from benchmarks.frame import Limit, Round, Row

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


class SyntheticPrompts:
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


class SyntheticGroups:
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


class SyntheticGenerator:
    """A generator that has leases at the newest version and finishes each after `group_s` seconds on average."""

    def __init__(
        self, endpoints: Endpoints, index: int, *, leases: int, completion_tokens: int, group_s: float
    ) -> None:
        self.done = False
        self._client, self._groups = GeneratorClient(endpoints, index), SyntheticGroups(index, completion_tokens)
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
    endpoints: Endpoints, version: Any, index: int, leases: int, completion_tokens: int, group_s: float
) -> None:
    """Runs a generator until the run ends."""
    generator = SyntheticGenerator(
        endpoints, index, leases=leases, completion_tokens=completion_tokens, group_s=group_s
    )
    while not generator.done:
        generator.turn(version.value, DENIED_S)


def learn(endpoints: Endpoints, version: Any) -> None:
    """Takes every batch ahead, as learners do, and commits it; reports checkpoints without writing any."""
    client, thread = LearnerClient(endpoints, 0), ThreadPoolExecutor(1)
    client.begin(0)
    step, checkpoints = 1, [0]
    taking = thread.submit(client.take, step)
    while taking.result() is not None:
        taking = thread.submit(client.take, step + 1)
        saving = step % CHECKPOINT_STEPS == 0
        checkpoints = [*checkpoints, step][-2:] if saving else checkpoints
        client.commit(step, {"learner/loss": 0.0, "learner/wait_s": 0.0}, saving=saving, checkpoints=checkpoints)
        version.value = step
        step += 1
    client.close()


def hold_queue(config: Config, endpoints: Endpoints, folder: Path, journaled: bool) -> None:
    from asyncrl.observe.trace import TraceWriter
    from asyncrl.replay.journal import Journal
    from asyncrl.replay.queue import ReplayQueue
    from asyncrl.replay.server import run_replay

    journal = Journal(folder / "journal", flush=config.journal.flush) if journaled else None
    queue = ReplayQueue(config, SyntheticPrompts(), TraceWriter(folder / "trace.parquet"), journal=journal)
    tune_gc()
    run_replay(queue, endpoints, lambda: False)


@dataclass
class Load:
    """Processes under full load until `end`. The replay process has the first core; the others share the remaining
    cores."""

    folder: Path
    generators: int = 2
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
        first, *rest = sorted(os.sched_getaffinity(0))
        rest = rest or [first]
        self._version = version = CONTEXT.Value("q", 0)  # referenced until all processes have received it
        self._start("replay", [first], hold_queue, config, endpoints, self.folder, self.journaled)
        self._start("learner", rest, learn, endpoints, version)
        for index in range(self.generators):
            load = self.leases, self.completion_tokens, self.group_s
            self._start(f"generator-{index}", rest, generate, endpoints, version, index, *load)
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
        """Starts a process on these cores that ends with this process."""
        process = CONTEXT.Process(target=_run, args=(os.getpid(), cpus, run, *arguments), name=name, daemon=True)
        process.start()
        self.processes[name] = process


def processor_s(pid: int) -> float:
    """Returns the processor time of all threads of a process, to the nanosecond: psutil counts in ticks of 10 ms."""
    tasks = [*Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _run(parent: int, cpus: list[int], run: Callable[..., None], *arguments: Any) -> None:
    end_with_parent(parent)
    os.sched_setaffinity(0, cpus)
    run(*arguments)


TOKENS = 1000
"""Average number of completion tokens per trajectory."""
BYTES_US = GROUP_SIZE * (PROMPT_TOKENS + TOKENS) * TOKEN_BYTES / 1e3
"""The allowance of the limits for the bytes of a group: 1 ns each, a little more than five copies take."""
FEW_PER_S, FEW_LEASES = 10.0, 16
WARM_S = 2.0


def cost_us(seconds: float, **load: Any) -> tuple[float, float]:
    """Returns microseconds of CPU time per group, and groups per second."""
    with tempfile.TemporaryDirectory() as folder:
        queue = Load(Path(folder), generators=1, completion_tokens=TOKENS, **load)
        while queue.client.status()["step"] < 1:
            time.sleep(0.05)
        time.sleep(WARM_S)
        pid = queue.processes["replay"].pid or 0
        before, used_s, began_s = _num_groups(queue), processor_s(pid), time.monotonic()
        time.sleep(seconds)
        groups = _num_groups(queue) - before
        used_s, took_s = processor_s(pid) - used_s, time.monotonic() - began_s
        queue.end()
    return used_s / groups * 1e6, groups / took_s


def _num_groups(queue: Load) -> int:
    status = queue.client.status()
    return status["trained"] + status["finished"]


def measure(quick: bool) -> Iterator[Round]:
    seconds, few_s = (1.0, 3.0) if quick else (5.0, 10.0)
    few = {"leases": FEW_LEASES, "group_s": FEW_LEASES / FEW_PER_S, "settings": {"replay.groups_per_step": 32}}
    while True:
        full_us, rate = cost_us(seconds)
        _, rate_in_memory = cost_us(seconds, journaled=False)
        few_us, _ = cost_us(few_s, **few)
        yield {
            "us a group at full load": full_us,
            "us a group at 10 groups/s": few_us,
            "groups/s of no journal": rate / rate_in_memory,
            "groups/s": rate,
        }


ROW = Row(
    what=f"processor time of a group of {GROUP_SIZE} x {TOKENS} tokens in the replay process; groups/s with a journal",
    against="300 and 600 us, and 1 ns a byte; the same queue without a journal",
    limits={
        "us a group at full load": Limit(round(300 + BYTES_US), at_most=True),
        "us a group at 10 groups/s": Limit(round(600 + BYTES_US), at_most=True),
        "groups/s of no journal": Limit(0.93),
    },
    measure=measure,
)

SAMPLE_S = 5.0
SETTLE = 0.2
"""Fraction of the time at the start that is excluded, since buffers grow to their final size."""


def soak(minutes: float, generators: int) -> None:
    """Runs the queue at full load and prints the memory growth of every process, in MiB per hour."""
    with tempfile.TemporaryDirectory() as folder:
        load = Load(Path(folder), generators, settings={"journal.max_bytes": 2 << 30})
        memory_mib: dict[str, list[float]] = {name: [] for name in load.processes}
        times_s, journal_bytes, began_s = list[float](), 0, time.monotonic()
        while (now_s := time.monotonic() - began_s) < 60 * minutes:
            times_s.append(now_s)
            for name, process in load.processes.items():
                if not process.is_alive():
                    raise SystemExit(f"{name} ended with code {process.exitcode}")
                memory_mib[name].append(psutil.Process(process.pid).memory_info().rss / 2**20)
            journal_bytes = max(journal_bytes, load.client.status()["journal"]["bytes"])
            time.sleep(SAMPLE_S)
        summary, elapsed_s = load.end(), time.monotonic() - began_s
    trained = summary["ledger"]["trained"]
    print(f"{summary['steps']:,} steps, {trained:,} groups trained, {trained / elapsed_s:,.0f} a second")
    print(f"journal at most {journal_bytes / 2**20:.0f} MiB on disk")
    settled = next(index for index, time_s in enumerate(times_s) if time_s >= SETTLE * times_s[-1])
    hours = np.array(times_s[settled:]) / 3600
    for name, sizes in memory_mib.items():
        (slope, _), covariance = np.polyfit(hours, sizes[settled:], 1, cov=True)
        print(
            f"{name:12} {sizes[settled]:7.1f} -> {sizes[-1]:7.1f} MiB after the first fifth, "
            f"{slope:+7.2f} +- {covariance[0, 0] ** 0.5:.2f} MiB an hour"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Memory of the replay queue at full load.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--generators", type=int, default=2)
    options = parser.parse_args()
    soak(options.minutes, options.generators)
