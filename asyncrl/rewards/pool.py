"""The reward workers: processes, so that a slow, hanging or crashing function never holds up generation."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import structlog
from pebble import ProcessExpired, ProcessPool

from asyncrl.config.config import Config
from asyncrl.errors import RunError
from asyncrl.rewards.calling import Score, describe, failure
from asyncrl.rewards.reward_worker import PackedEpisode, PackedGroup, score_groups, start_worker
from asyncrl.rewards.table import environment_weight, evaluation_config, reward_for, show_spec
from asyncrl.types import Prompt
from asyncrl.util.processes import HelperContext
from asyncrl.wire.endpoints import Endpoints

log = structlog.get_logger()

TASK_S = 0.05
"""Work of one task: a batch of groups large enough for few messages, and small enough to lose little on a hang."""
MAX_GROUPS_PER_TASK = 64
LINGER_S = 0.02
"""Longest time that a smaller task waits after the one before: a message costs far more than a quick reward."""
CLOSE_S = 3.0
"""Deadline for the workers to end."""
START_S = 60.0
"""Deadline for a worker to start and load its functions."""
MAX_POOL_LOSSES = 3
"""A group fails after being in progress this many times when all workers died."""
MIN_PAUSE_S = 1.0
"""Shortest pause before a group without any reward is scored again."""
RETRY_PART = 0.05
"""Part of `launch.progress_timeout_s` after which it fails. A function that has waited for a service for this time is
not called again."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Rewards of one group, in the order of its completions."""

    key: Hashable
    rewards: list[float]
    """0 where there is an error."""
    parts: list[dict[str, float]]
    errors: list[str]
    """Why each completion has no reward; "" where it has one."""
    environment_weight: float = 0.0
    """The factor of the environments' rewards in these; 0 without environments."""


@dataclass(slots=True)
class _Waiting:
    """A group that waits for its scores, or one completion of a group that failed."""

    key: Hashable
    group: PackedGroup
    alone: bool = False
    """True if it must be sent alone, because a task with it failed."""
    pool_losses: int = 0
    split: _Split | None = None
    """The scores of the completion's group; None for a group."""
    place: int = 0
    """Index of the completion in its group."""
    sent_s: float = math.inf
    """When it was first sent to a worker, as the next two on the monotonic clock."""
    failed_s: float = math.inf
    """When it was first scored without any reward."""
    due_s: float = 0.0
    """When it is scored again."""

    def completions(self) -> list[_Waiting]:
        """The completions of the group, each to be scored alone."""
        split = _Split([None] * len(self.group.completion_ids))
        groups = [self.group.select([place]) for place in range(len(split.scores))]
        return [_Waiting(self.key, group, alone=True, split=split, place=place) for place, group in enumerate(groups)]


@dataclass(slots=True)
class _Split:
    """The scores of a group whose completions are scored one by one; None for those still to come."""

    scores: list[Score | None]


@dataclass(slots=True)
class _Task:
    future: Future[tuple[float, list[list[Score]]]]
    groups: list[_Waiting]
    sent_s: float
    """On the monotonic clock."""


class RewardPool:
    """`generator.reward_workers` processes that score groups. Not thread-safe; no method waits for a reward.

    Each group has `generator.reward_timeout_s`. Groups are sent in batches. When a batch fails (a function hangs, or
    kills its process), its groups are scored again one by one, and then the completions of a group that fails alone,
    each with the same time limit: only the culprit has no reward. With `retries`, a group without any reward is scored
    again after pauses, since a service that its function asks may be away for a while.
    The thread that creates the pool must outlive it: the workers end with that thread, as with the process.
    """

    def __init__(
        self, config: Config, *, tokenizer_path: str, endpoints: Endpoints | None = None, retries: bool = False
    ) -> None:
        """`endpoints` has the address of `run_reward_model`, if a reward needs it."""
        evaluation = evaluation_config(config)
        self._rewards = {False: config.rewards, True: evaluation.rewards}
        """The rewards of training, and with True of evaluations."""
        self._workers = config.generator.reward_workers
        self._timeout_s = config.generator.reward_timeout_s
        self._worker_arguments = (os.getpid(), config, tokenizer_path, endpoints)
        self._retry_s = RETRY_PART * config.launch.progress_timeout_s if retries else 0.0
        self._waiting: deque[_Waiting] = deque()
        self._paused: list[_Waiting] = []
        """Groups that are to be scored again."""
        self._rewarded_s: dict[tuple[bool, str], float] = {}
        """When a group last had a reward, on the monotonic clock, by whether it was an evaluation and data source."""
        self._running: list[_Task] = []
        self._group_s = TASK_S
        """Smoothed time that a group takes in a worker."""
        self._sent_s = 0.0
        self._pool = self._start()

    @property
    def pending(self) -> int:
        """Number of groups, or of completions of failed groups, that are not scored yet."""
        return len(self._waiting) + len(self._paused) + sum(len(task.groups) for task in self._running)

    def submit(
        self,
        key: Hashable,
        completions: Sequence[Sequence[int]],
        prompt: Prompt,
        statuses: Sequence[str],
        *,
        evaluation: bool = False,
        episodes: Sequence[PackedEpisode] = (),
    ) -> None:
        """Queues one group: the action tokens of each completion, and its status, "completed" or "truncated"; with an
        environment also the episode of each.

        The rewards come back under `key`; with `evaluation` they are those of `eval.rewards`.
        """
        tokens = [list(completion) for completion in completions]
        packed = PackedGroup(
            tokens,
            list(statuses),
            prompt=prompt.tokens.tobytes(),
            ground_truth=prompt.ground_truth,
            data_source=prompt.data_source,
            extra_info=prompt.extra_info,
            chat=prompt.chat,
            columns=prompt.columns,
            text=prompt.text,
            evaluation=evaluation,
            episodes=list(episodes),
        )
        self._waiting.append(_Waiting(key, packed))

    def collect(self) -> list[Scored]:
        """Returns the groups scored since the last call, and sends work to free workers. Call it often."""
        scored: list[Scored] = []
        for task in self._running.copy():
            if task.future.done():
                self._running.remove(task)
                self._finish(task, scored)
            elif time.monotonic() - task.sent_s > START_S + self._timeout_s:
                self._running.remove(task)
                self._give_up(task, scored)
        now_s = time.monotonic()
        due = [waiting for waiting in self._paused if waiting.due_s <= now_s]
        self._paused = [waiting for waiting in self._paused if waiting.due_s > now_s]
        self._waiting.extendleft(reversed(due))
        while self._waiting and len(self._running) < self._workers and self._due():
            self._send()
        return scored

    def close(self) -> None:
        """Ends the workers; unscored groups are lost.

        Waits at most CLOSE_S: a later worker ends with this process.
        """
        self._pool.stop()
        joining = threading.Thread(target=self._pool.join, name="reward-pool-join", daemon=True)
        joining.start()
        joining.join(CLOSE_S)
        if joining.is_alive():
            log.warning("reward workers did not end in time", timeout_s=CLOSE_S)

    def _start(self) -> ProcessPool:
        pool = ProcessPool(
            max_workers=self._workers,
            initializer=start_worker,
            initargs=self._worker_arguments,
            context=HelperContext(),  # pyright: ignore[reportArgumentType]
        )
        if not pool.active:  # reading it starts the workers, which load while the engine does
            raise RunError(f"{self._workers} reward workers could not be started")
        return pool

    def _restart(self) -> None:
        log.warning("reward workers lost, starting new ones", workers=self._workers)
        self.close()
        self._pool = self._start()

    def _due(self) -> bool:
        return len(self._waiting) >= self._groups_per_task or time.monotonic() - self._sent_s >= LINGER_S

    @property
    def _groups_per_task(self) -> int:
        return max(1, min(MAX_GROUPS_PER_TASK, int(TASK_S / self._group_s)))

    def _send(self) -> None:
        """Sends the next task; there must be a free worker."""
        per_worker = -(-len(self._waiting) // (self._workers - len(self._running)))
        size = min(per_worker, self._groups_per_task)
        groups = [self._waiting.popleft()]
        while len(groups) < size and self._waiting and not (groups[0].alone or self._waiting[0].alone):
            groups.append(self._waiting.popleft())
        packed = [waiting.group for waiting in groups]
        try:
            future = self._pool.schedule(score_groups, args=(packed,), timeout=self._timeout_s)
        except RuntimeError:  # the pool is broken: an idle worker was killed
            self._waiting.extendleft(reversed(groups))
            self._restart()
        else:
            self._sent_s = time.monotonic()
            for waiting in groups:
                waiting.sent_s = min(waiting.sent_s, self._sent_s)
            self._running.append(_Task(future, groups, self._sent_s))

    def _finish(self, task: _Task, scored: list[Scored]) -> None:
        error = task.future.exception()
        if error is None:
            seconds, scores = task.future.result()
            self._group_s = max(1e-6, (self._group_s + seconds / len(scores)) / 2)
            for waiting, one in zip(task.groups, scores, strict=True):
                if not self._pause(waiting, one):
                    self._conclude(waiting, one, scored)
        elif isinstance(error, BrokenProcessPool):
            for waiting in task.groups:
                waiting.pool_losses += 1
            lost = [waiting for waiting in task.groups if waiting.pool_losses >= MAX_POOL_LOSSES]
            for waiting in lost:
                self._fail(waiting, "all reward workers ended repeatedly", scored)
            self._waiting.extendleft(w for w in reversed(task.groups) if w.pool_losses < MAX_POOL_LOSSES)
        elif len(task.groups) > 1:
            for waiting in task.groups:
                waiting.alone = True
            self._waiting.extendleft(reversed(task.groups))
        elif len(task.groups[0].group.completion_ids) > 1:
            self._waiting.extendleft(reversed(task.groups[0].completions()))
        else:
            self._fail(task.groups[0], self._cause(error), scored)

    def _pause(self, waiting: _Waiting, scores: list[Score]) -> bool:
        """Puts a group without any reward aside until it is scored again. Returns False if it has one, has been tried
        for long enough, or fails while others of its data source get rewards."""
        group, now_s = waiting.group, time.monotonic()
        source = group.evaluation, group.data_source
        if not all(error for *_, error in scores):
            self._rewarded_s[source] = now_s
            return False
        no_function_called = bool(group.episodes) and all(one.error for one in group.episodes)
        waiting.failed_s = min(waiting.failed_s, now_s)
        tried_s, is_late = now_s - waiting.failed_s, now_s - waiting.sent_s >= self._retry_s
        # In the first half of that time, rewards from before an outage may still have come.
        others_pass = self._rewarded_s.get(source, -math.inf) > now_s - tried_s / 2
        if is_late or others_pass or no_function_called or waiting.split is not None:
            return False
        pause_s = max(MIN_PAUSE_S, tried_s)
        if not self._paused:
            log.warning("rewards failed, tried again", error=scores[0][2], pause_s=pause_s)
        waiting.due_s = now_s + pause_s
        self._paused.append(waiting)
        return True

    def _cause(self, error: BaseException) -> str:
        if isinstance(error, FutureTimeoutError):
            return f"took longer than generator.reward_timeout_s = {self._timeout_s:g} s"
        if isinstance(error, ProcessExpired):
            return f"ended its worker process (exit code {error.exitcode})"
        return f"raised {describe(error)}"

    def _give_up(self, task: _Task, scored: list[Scored]) -> None:
        cause = f"no reward worker took the group within {START_S:g} s: does a function hang while it is imported?"
        for waiting in task.groups:
            self._fail(waiting, cause, scored)
        self._restart()

    def _fail(self, waiting: _Waiting, cause: str, scored: list[Scored]) -> None:
        data_source = waiting.group.data_source
        spec = reward_for(self._rewards[waiting.group.evaluation], data_source)
        text = failure(show_spec(spec), data_source, cause)
        self._conclude(waiting, [(0.0, {}, text)] * len(waiting.group.completion_ids), scored)

    def _conclude(self, waiting: _Waiting, scores: list[Score], scored: list[Scored]) -> None:
        """Adds the group to `scored`; for a single completion, only once all of its group are scored."""
        group, complete = waiting.group, scores
        if waiting.split is not None:
            waiting.split.scores[waiting.place] = scores[0]
            complete = [score for score in waiting.split.scores if score is not None]
            if len(complete) < len(waiting.split.scores):
                return
        rewards, parts, errors = zip(*complete, strict=True)
        weight = environment_weight(self._rewards[group.evaluation], group.data_source)
        rewards = [reward or 0.0 for reward in rewards]
        scored.append(Scored(waiting.key, rewards, list(parts), list(errors), weight))
