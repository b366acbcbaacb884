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
from asyncrl.rewards.calling import CompletedGroup, PlayedEpisode, Score, failure
from asyncrl.rewards.reward_worker import score_groups, start_worker
from asyncrl.rewards.table import environment_weight, evaluation_config, reward_for, show_spec
from asyncrl.types import Prompt
from asyncrl.util.processes import HelperContext
from asyncrl.util.text import describe
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
class _Job:
    """A group that waits for its scores, or a single completion of a group that failed."""

    key: Hashable
    group: CompletedGroup
    scores: list[Score | None]
    """The scores so far of all completions of the group; shared by its completions."""
    first: int = 0
    """Index in `scores` of the first completion to score."""
    alone: bool = False
    """True if it must be sent alone, because a task with it failed."""
    pool_losses: int = 0
    sent_s: float = math.inf
    """When it was first sent to a worker, as the next two on the monotonic clock."""
    failed_s: float = math.inf
    """When it was first scored without any reward."""
    due_s: float = 0.0
    """When it is scored again."""

    @property
    def size(self) -> int:
        return len(self.group.completion_ids)

    @property
    def is_complete_group(self) -> bool:
        return self.size == len(self.scores)

    def split(self) -> list[_Job]:
        """The completions of the group, each to be scored alone."""
        members = range(len(self.scores))
        return [_Job(self.key, self.group.select([index]), self.scores, index, alone=True) for index in members]


@dataclass(slots=True)
class _Task:
    future: Future[tuple[float, list[list[Score]]]]
    jobs: list[_Job]
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
        self._config = config
        self._workers = config.generator.reward_workers
        self._timeout_s = config.generator.reward_timeout_s
        self._worker_arguments = (os.getpid(), config, tokenizer_path, endpoints)
        self._retry_s = RETRY_PART * config.launch.progress_timeout_s if retries else 0.0
        self._waiting: deque[_Job] = deque()
        self._paused: list[_Job] = []
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
        return len(self._waiting) + len(self._paused) + sum(len(task.jobs) for task in self._running)

    def submit(
        self,
        key: Hashable,
        completions: Sequence[Sequence[int]],
        prompt: Prompt,
        statuses: Sequence[str],
        *,
        evaluation: bool = False,
        episodes: Sequence[PlayedEpisode] = (),
    ) -> None:
        """Queues one group: the action tokens of each completion, and its status, "completed" or "truncated"; with an
        environment also the episode of each.

        The rewards come back under `key`; with `evaluation` they are those of `eval.rewards`.
        """
        tokens = [list(completion) for completion in completions]
        group = CompletedGroup(
            prompt=prompt.text,
            completions=[],
            completion_ids=tokens,
            ground_truth=prompt.ground_truth,
            data_source=prompt.data_source,
            extra_info=prompt.extra_info,
            ground_truth_name=self._config.data.columns.ground_truth_name,
            chat=prompt.chat,
            columns=prompt.columns,
            statuses=list(statuses),
            max_new_tokens=self._config.generator.max_new_tokens,
            episodes=list(episodes),
            prompt_tokens=prompt.tokens.tobytes(),
            is_evaluation=evaluation,
        )
        self._waiting.append(_Job(key, group, [None] * len(tokens)))

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
        due = [job for job in self._paused if job.due_s <= now_s]
        self._paused = [job for job in self._paused if job.due_s > now_s]
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
        jobs = [self._waiting.popleft()]
        while len(jobs) < size and self._waiting and not (jobs[0].alone or self._waiting[0].alone):
            jobs.append(self._waiting.popleft())
        try:
            groups = [job.group for job in jobs]
            future = self._pool.schedule(score_groups, args=(groups,), timeout=self._timeout_s)
        except RuntimeError:  # the pool is broken: an idle worker was killed
            self._waiting.extendleft(reversed(jobs))
            self._restart()
        else:
            self._sent_s = time.monotonic()
            for job in jobs:
                job.sent_s = min(job.sent_s, self._sent_s)
            self._running.append(_Task(future, jobs, self._sent_s))

    def _finish(self, task: _Task, scored: list[Scored]) -> None:
        error = task.future.exception()
        if error is None:
            seconds, all_scores = task.future.result()
            self._group_s = max(1e-6, (self._group_s + seconds / len(all_scores)) / 2)
            for job, scores in zip(task.jobs, all_scores, strict=True):
                if not self._pause(job, scores):
                    self._conclude(job, scores, scored)
        elif isinstance(error, BrokenProcessPool):
            for job in task.jobs:
                job.pool_losses += 1
                if job.pool_losses >= MAX_POOL_LOSSES:
                    self._fail(job, "all reward workers ended repeatedly", scored)
            self._waiting.extendleft(job for job in reversed(task.jobs) if job.pool_losses < MAX_POOL_LOSSES)
        elif len(task.jobs) > 1:
            for job in task.jobs:
                job.alone = True
            self._waiting.extendleft(reversed(task.jobs))
        elif task.jobs[0].size > 1:
            self._waiting.extendleft(reversed(task.jobs[0].split()))
        else:
            self._fail(task.jobs[0], self._cause(error), scored)

    def _pause(self, job: _Job, scores: list[Score]) -> bool:
        """Puts a group without any reward aside until it is scored again. Returns False if it has one, has been tried
        for long enough, or fails while others of its data source get rewards."""
        group, now_s = job.group, time.monotonic()
        source = group.is_evaluation, group.data_source
        if not all(error for *_, error in scores):
            self._rewarded_s[source] = now_s
            return False
        no_function_called = bool(group.episodes) and all(episode.error for episode in group.episodes)
        job.failed_s = min(job.failed_s, now_s)
        tried_s, is_late = now_s - job.failed_s, now_s - job.sent_s >= self._retry_s
        # In the first half of that time, rewards from before an outage may still have come.
        others_pass = self._rewarded_s.get(source, -math.inf) > now_s - tried_s / 2
        if is_late or others_pass or no_function_called or not job.is_complete_group:
            return False
        pause_s = max(MIN_PAUSE_S, tried_s)
        if not self._paused:
            log.warning("rewards failed, tried again", error=scores[0][2], pause_s=pause_s)
        job.due_s = now_s + pause_s
        self._paused.append(job)
        return True

    def _cause(self, error: BaseException) -> str:
        if isinstance(error, FutureTimeoutError):
            return f"took longer than generator.reward_timeout_s = {self._timeout_s:g} s"
        if isinstance(error, ProcessExpired):
            return f"ended its worker process (exit code {error.exitcode})"
        return f"raised {describe(error)}"

    def _give_up(self, task: _Task, scored: list[Scored]) -> None:
        cause = f"no reward worker took the group within {START_S:g} s: does a function hang while it is imported?"
        for job in task.jobs:
            self._fail(job, cause, scored)
        self._restart()

    def _fail(self, job: _Job, cause: str, scored: list[Scored]) -> None:
        spec = reward_for(self._rewards[job.group.is_evaluation], job.group.data_source)
        text = failure(show_spec(spec), job.group.data_source, cause)
        self._conclude(job, [(0.0, {}, text)] * job.size, scored)

    def _conclude(self, job: _Job, scores: list[Score], scored: list[Scored]) -> None:
        """Keeps the scores, and adds the group to `scored` once all of its completions have one."""
        job.scores[job.first : job.first + job.size] = scores
        complete = [score for score in job.scores if score is not None]
        if len(complete) == len(job.scores):
            rewards, parts, errors = zip(*complete, strict=True)
            weight = environment_weight(self._rewards[job.group.is_evaluation], job.group.data_source)
            rewards = [reward or 0.0 for reward in rewards]
            scored.append(Scored(job.key, rewards, list(parts), list(errors), weight))
