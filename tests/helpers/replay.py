"""Small configs, prompts and groups for tests of the replay queue."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count

import numpy as np
from msgspec import structs

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.observe.stats import ReportedStats
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.state import QueueSnapshot
from asyncrl.types import NO_VERSION, Group, Lease, Prompt, PromptPosition, Status, Trajectory
from asyncrl.util.durable import of_bytes, to_bytes
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.messages import Ask, GeneratorStats

PROMPT_TOKENS = 3


def small_config(**overrides: object) -> Config:
    """2 groups a step of 2 trajectories, 1 generator, 1 learner; keys with __ for the dot."""
    values: dict[str, object] = {
        "model.path": "model",
        "data.train": "data.parquet",
        "generator.group_size": 2,
        "replay.groups_per_step": 2,
        "replay.max_staleness": 1,
        "steps": 3,
    }
    values |= {name.replace("__", "."): value for name, value in overrides.items()}
    return load_config(None, values)


STATS = GeneratorStats.of(working_s=1.0)
_numbers = count(1)


def ask_queue(
    queue: ReplayQueue,
    generator: int,
    version: int,
    num_groups: int,
    num_evaluations: int = 0,
    *,
    session: str | None = None,
    number: int | None = None,
    stats: GeneratorStats | None = None,
) -> tuple[list[Lease], str]:
    """An ask of a generator, by default the next one of its only session."""
    ask = Ask(
        generator=generator,
        session=f"only session of {generator}" if session is None else session,
        number=next(_numbers) if number is None else number,
        version=version,
        num_groups=num_groups,
        num_evaluations=num_evaluations,
        stats=STATS if stats is None else stats,
    )
    return queue.ask(ask)


def saved_state(queue: ReplayQueue) -> QueueSnapshot:
    """A snapshot of the queue that shares nothing with it, without the signs of life: no event has them."""
    stored = structs.replace(queue.state.snapshot(), reported=ReportedStats())
    return of_bytes(QueueSnapshot, to_bytes(QueueSnapshot, stored))


def kill_queue(queue: ReplayQueue) -> None:
    """Ends the queue's process as SIGKILL would: buffers are lost, descriptors are closed."""
    journal = queue.store.journal
    assert journal is not None
    journal._background.shutdown(cancel_futures=True)
    for descriptor in (journal._lock, queue.store.trace._file):
        os.close(descriptor)


class EndlessPrompts:
    """Prompts of increasing row numbers, epoch after epoch of `num_rows`."""

    skipped_rows = 0
    filtered_rows = 0

    def __init__(self, num_rows: int = 1 << 16) -> None:
        self.row = -1
        self.num_rows = num_rows

    def __next__(self) -> Prompt:
        self.row += 1
        return self.prompt(self.row % self.num_rows)

    def prompt(self, row: int) -> Prompt:
        return Prompt(row, np.arange(PROMPT_TOKENS, dtype=np.int32), str(row), "test", {"index": row})

    @property
    def position(self) -> PromptPosition:
        return PromptPosition(drawn=self.row + 1)

    def seek(self, position: PromptPosition) -> None:
        self.row = position.drawn - 1


def make_group(
    lease: Lease,
    version: int,
    *,
    rewards: Sequence[float] = (0.0, 1.0),
    completion_tokens: Sequence[int] = (2, 4),
    status: Status = "completed",
    generator: int = 0,
) -> Group:
    """A finished group of the lease, all tokens sampled at `version`."""
    members: list[Trajectory] = []
    for reward, length in zip(rewards, completion_tokens, strict=True):
        mask = np.arange(PROMPT_TOKENS + length) >= PROMPT_TOKENS
        members.append(
            Trajectory(
                tokens=np.arange(len(mask), dtype=np.int32),
                action_mask=mask,
                behavior_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
                versions=np.where(mask, version, NO_VERSION).astype(np.int32),
                status=status,
                reward=reward,
                reward_parts={"exact": reward},
                error="it broke" if status == "failed" else "",
            )
        )
    return Group(
        ticket=lease.ticket,
        attempt=lease.attempt,
        generator=generator,
        row=lease.prompt.row,
        data_source=lease.prompt.data_source,
        start_version=version,
        end_version=version,
        trajectories=members,
        started_s=1.0,
        finished_s=2.0,
    )


def loopback_endpoints(port: int, run_id: str = "test") -> Endpoints:
    return Endpoints(run_id, f"tcp://127.0.0.1:{port}", "tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
