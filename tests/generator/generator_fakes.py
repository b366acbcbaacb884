"""Stand-ins for what the generator's loop talks to: replay client, weight receiver, reward workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from msgspec import structs

from asyncrl.rewards.calling import PlayedEpisode
from asyncrl.rewards.pool import Scored
from asyncrl.types import Group, Lease, Prompt
from asyncrl.weights.staging import StagedWeights
from asyncrl.wire.messages import Evaluated, GeneratorStats, Leases


def lease(ticket: int, tokens: Sequence[int] = (5, 6, 7), attempt: int = 0) -> Lease:
    prompt = Prompt(ticket * 10, np.array(tokens, dtype=np.int32), str(ticket), "test")
    return Lease(ticket, attempt, prompt)


def lease_reply(leases: list[Lease], done: bool, reason: str, **others: Any) -> Leases:
    """Returns an answer to an ask, by default of a run that continues."""
    usual = {
        "leave": False, "evaluations_left": False, "progress": 0, "batches": 0,
        "pause_s": 0.0, "weights": "", "stored": None,
    }  # fmt: skip
    return Leases(leases=leases, done=done, reason=reason, **(usual | others))


@dataclass
class FakeClient:
    """Answers each ask at the next poll with what `answer` says."""

    answer: Callable[[int, int], Leases]
    """(version, number of groups) -> reply"""
    asks: list[tuple[int, int, GeneratorStats]] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    released: list[tuple[int, int, int]] = field(default_factory=list)
    evaluations: list[Evaluated] = field(default_factory=list)
    recorded: list[Group | None] = field(default_factory=list)
    """The completions that were sent with each evaluation."""
    released_evaluations: list[tuple[int, int]] = field(default_factory=list)
    num_evaluations: int = 0
    """Evaluation prompts that the last ask was for."""
    outstanding: bool = False
    unacknowledged: int = 0

    def ask(
        self,
        version: int,
        num_groups: int,
        stats: GeneratorStats,
        *,
        num_evaluations: int = 0,
    ) -> None:
        assert not self.outstanding
        self.num_evaluations = num_evaluations
        self.asks.append((version, num_groups, structs.replace(stats, stall_ms=list(stats.stall_ms))))
        self.outstanding = True

    def poll(self, timeout_s: float = 0.0) -> Leases | None:
        if not self.outstanding:
            return None
        self.outstanding = False
        version, num_groups, _ = self.asks[-1]
        return self.answer(version, num_groups)

    def finish(self, group: Group) -> None:
        self.groups.append(group)

    def evaluated(self, result: Evaluated, recorded: Group | None) -> None:
        self.evaluations.append(result)
        self.recorded.append(recorded)

    def release(self, leases: Sequence[tuple[int, int, int]], *, evaluations: Sequence[tuple[int, int]] = ()) -> None:
        self.released.extend(leases)
        self.released_evaluations.extend(evaluations)

    def close(self, *, linger_s: float = 5.0) -> None:
        """Nothing to wait for."""


@dataclass
class FakeReceiver:
    """Gives out the versions put into `versions`, one at each look once the one before is loaded."""

    versions: deque[tuple[int, list[tuple[str, torch.Tensor]]]] = field(default_factory=deque)
    acknowledged: list[int] = field(default_factory=list)
    holds: int = 0
    in_use: bool = False

    def start(self) -> None:
        """There is no thread."""

    def staged(self) -> StagedWeights | None:
        if self.in_use or not self.versions:
            return None
        self.in_use = True
        version, tensors = self.versions.popleft()
        return StagedWeights(version, version * 7, tensors)

    def round(self) -> None:
        """Versions come whole."""

    def locate(self, address: str) -> None:
        """There is no sender."""

    def hold(self) -> None:
        self.holds += 1

    def following(self) -> None:
        """There is no store."""

    def loaded(self, staged: StagedWeights) -> None:
        self.in_use = False
        self.acknowledged.append(staged.version)

    def close(self) -> None:
        """There is no thread."""


@dataclass
class FakeRewards:
    """Scores with `score` at once; groups in `failing` (tickets) cannot be scored."""

    score: Callable[[Sequence[int], Prompt], float] = lambda tokens, prompt: float(len(tokens))
    failing: set[int] = field(default_factory=set)
    done: list[Scored] = field(default_factory=list)

    evaluated: list[Any] = field(default_factory=list)
    """Keys of the groups that were submitted as evaluations."""
    episodes: dict[Any, list[tuple[Sequence[int], PlayedEpisode]]] = field(default_factory=dict)
    """The tokens and the episodes that were submitted."""

    def submit(
        self,
        key: Any,
        completions: Sequence[Sequence[int]],
        prompt: Prompt,
        statuses: Sequence[str],
        *,
        evaluation: bool = False,
        episodes: Sequence[PlayedEpisode] = (),
    ) -> None:
        self.evaluated += [key] if evaluation else []
        self.episodes[key] = list(zip(completions, episodes, strict=False))
        failed = key[0] in self.failing
        rewards = [float("nan") if failed else self.score(tokens, prompt) for tokens in completions]
        parts = [{} if failed else {"length": reward} for reward in rewards]
        errors = ["no reward" if failed else ""] * len(rewards)
        self.done.append(Scored(key, rewards, parts, errors, environment_weight=1.0))

    def collect(self) -> list[Scored]:
        done, self.done = self.done, []
        return done

    def close(self) -> None:
        """There are no workers."""
