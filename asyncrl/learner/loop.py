"""The learner's loop: every rank runs it, and all ranks do each step together.

    step            what happens                                    waits for                    woken by
    ------------    --------------------------------------------    -------------------------    -----------------------
    _agree          the ranks agree to continue or to stop          all learner ranks            a collective
    _prepared       gets this rank's part of the step, packed       groups_per_step groups       the prefetch thread
    raise_on_all..  an error of any rank is raised on all ranks     all learner ranks            a collective
    card.begin      with launch.colocate: takes the card            its generator                polling (`colocated`)
    trainer.train   version step - 1 becomes version step           all learner ranks, critic    collectives, its reply
    _commit         rank 0 records the step in the replay queue     the journal                  the queue's reply
    _send           hands this rank's slices of the weights over    the broadcast before it      the sender's thread
    _save           starts a checkpoint, if one is due              the checkpoint before it     the writer's thread
    card.end        with launch.colocate: releases the card         the copy of the weights      the sender's thread
         |
         +-- back to _agree, until the last step

While a step is trained, the prefetch thread takes and packs this rank's part of the next one (`_take`); it waits for
the queue's reply. The sender's thread copies the weights; `trainer.train` waits for it before its first update.

A step is committed before its weights are sent: the replay queue must know every version that a generator has.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import structlog
import torch

from asyncrl.colocate import NoLock
from asyncrl.config.config import Config
from asyncrl.errors import InvariantError, PeerTimeoutError, RunError, observer_failures, observing
from asyncrl.learner.batch import Batch, collate
from asyncrl.learner.checkpoint import Checkpoints, Files, bytes_file
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.metrics import StepProfiler, device_peak, utilization
from asyncrl.learner.model.saving import save_model
from asyncrl.learner.step import Trainer
from asyncrl.observe.run_metrics import LEARNER_TIMES
from asyncrl.observe.samples import SampleBook
from asyncrl.observe.trackers import Trackers
from asyncrl.replay.client import LearnerClient
from asyncrl.replay.history import JournalBatches, SampleBatches
from asyncrl.types import Shard
from asyncrl.util.processes import Stopwatch
from asyncrl.weights.background import BackgroundSender
from asyncrl.wire.messages import Committed

log = structlog.get_logger()
REWARD_STEPS = 50
"""Window, in steps, of a checkpoint's mean reward where `checkpoint.every_steps` is not set."""
POLL_S = 0.02
"""Interval at which it looks for a generator without weights while it waits for a batch."""


@dataclass(slots=True)
class Learner:
    """The loop of one rank. Each has a sender of its slices, if any are sent, and rank 0 a tracker."""

    config: Config
    trainer: Trainer
    batches: LearnerClient | JournalBatches | SampleBatches
    sender: BackgroundSender | None
    tracker: Trackers | None
    run_dir: Path
    checkpoints: Checkpoints | None = None
    """None when no checkpoints are to be saved."""
    start: int = 0
    """Step of the checkpoint that the trainer comes from."""
    book: SampleBook | None = None
    """The record of samples; None on the other ranks, or when none are recorded."""
    card: NoLock = field(default_factory=NoLock)
    """The rank's turns on a card that it shares with a generator; without `launch.colocate` it is always its turn."""
    timer: Stopwatch = field(default_factory=Stopwatch)
    """A step's times run from commit to commit: its checkpoint and weight times belong to the step before."""
    committed: int = 0
    """Last step that was committed before this start. The steps up to it are trained again on the same batches."""
    checkpoint_due: bool = False
    """True if a checkpoint follows the next step that was not committed before."""
    stopping: bool = False
    """True if the run ends with the last committed step."""
    collapsed: bool = False
    """True if it does so because the training collapsed."""
    sent: int = 0
    """The last version that was sent."""
    saved: int = 0
    """Step of the newest checkpoint that was started or loaded."""
    snapshot_s: float = 0.0
    """Seconds of this rank's latest snapshot for a checkpoint, which cannot be abandoned."""
    rewards: deque[float] = field(init=False)
    """Mean rewards of the latest steps."""
    prefetch: ThreadPoolExecutor = field(init=False)
    """Takes and packs the batches of this rank, where it needs no other rank: the next one while one is trained."""
    ahead: Future[tuple[Shard, Batch | InvariantError] | None] | None = None
    """The batch that it prepares, or has prepared; None before the first step."""
    profiler: StepProfiler = field(init=False)
    peak_flops: float | None = field(init=False)
    """Peak of each rank's device in FLOP/s; None if it is unknown."""

    def __post_init__(self) -> None:
        self.saved = self.start
        self.rewards = deque(maxlen=self.config.checkpoint.every_steps or REWARD_STEPS)
        self.prefetch = ThreadPoolExecutor(1, thread_name_prefix="take")
        self.trainer.before_update = self._await_copy
        observe = self.config.observe
        self.profiler = StepProfiler(observe.profile, self.run_dir / "profile", self.ranks.rank)
        self.peak_flops = device_peak(self.ranks.device)

    @property
    def ranks(self) -> Ranks:
        return self.trainer.ranks

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Trains until the last step, or until the batches end or any rank should stop; then saves the model, and a
        checkpoint unless it should stop."""
        self.committed = self.batches.begin(self.start)
        if self.committed < self.start:
            raise RunError(
                f"the checkpoint is of step {self.start}, but the journal ends with step {self.committed}; move the "
                f"checkpoints after step {self.committed} away, or continue without the journal: "
                f"`asyncrl launch --resume --run {self.config.run} --discard-journal`"
            )
        if self.committed > self.start:
            log.info("learner catches up", from_step=self.start, to_step=self.committed)
        self.card.holds(self.trainer, self.committed)
        if not self.card.hands_over:
            self._send(self.start)
        if self.start == self.committed:
            self._end_turn(self.start)
        last, stopped = self.start, False
        while last < self.config.steps:
            stopped = self._agree(should_stop)
            if stopped or self.stopping or not self._train(last + 1):
                log.info("learner stops early", finished_steps=last)
                break
            last += 1
        self.card.begin(soon=True)
        self._save_models()
        if self.checkpoints is not None:
            self._save_last(self.checkpoints, last, stopped=stopped or self.collapsed)
        self.ranks.barrier()
        self._end_turn(last)
        self._finish_sending()
        self._finish_evaluating(should_stop)

    def _agree(self, should_stop: Callable[[], bool]) -> bool:
        """Returns True, on all ranks, if any rank should stop before the next step. All ranks also learn here that a
        checkpoint is due or that the run is stopping, and raise RunError if a checkpoint failed on any rank."""
        self.timer.switch("waiting")
        error = self.checkpoints.failure() if self.checkpoints is not None else None
        flags = [should_stop(), self.checkpoint_due, self.stopping, self.collapsed, error is not None]
        stop, due, stopping, collapsed, failed = self.ranks.max(torch.tensor(flags, dtype=torch.int64)).tolist()
        if failed:
            self.ranks.raise_on_all_ranks(error)
        self.checkpoint_due, self.stopping, self.collapsed = bool(due), bool(stopping), bool(collapsed)
        return bool(stop)

    def _train(self, step: int) -> bool:
        prepared = self._prepared(step)
        self.timer.switch("working")
        if prepared is None:
            return False
        shard, batch = prepared
        # On all ranks, so that none waits for one that has ended.
        self.ranks.raise_on_all_ranks(batch if isinstance(batch, InvariantError) else None)
        assert not isinstance(batch, InvariantError)
        self.timer.switch("waiting")
        self.card.begin(meanwhile=self._hand_over_again)
        self.timer.switch("working")
        with self.profiler.step(step):
            metrics = self.trainer.train(batch, step=step)
        self.timer.switch("writing")
        lap = self.timer.lap()
        metrics |= {metric: lap[activity] for activity, metric in LEARNER_TIMES.items()} | self.trainer.phases.metrics()
        metrics |= utilization(metrics, ranks=self.ranks.count, peak=self.peak_flops) | self.card.metrics()
        metrics["learner/observer_failures"] = float(observer_failures.total())
        saving = self._saves(step)
        # Committed before it is sent: no generator may have a version that the replay queue does not know.
        committed = self._commit(step, metrics, saving=saving)
        passes_on = self.card.is_over(step, committed)
        if passes_on and not self.card.hands_over:
            self._send(step)
        self.timer.switch("writing")
        if saving:
            metrics["checkpoint/save_s"] = self._save(step, committed.state)
        if passes_on and step < self.config.steps:
            self._end_turn(step)
        self._log(step, metrics | committed.metrics)
        if self.book is not None:
            with observing("samples"):
                self.book.record(step, shard.groups, is_last=step == self.config.steps)
        return True

    def _saves(self, step: int) -> bool:
        """True if a checkpoint of this step follows. The queue has no state of a step that is trained again, so its
        checkpoint is made up for after the first new step."""
        every = self.config.checkpoint.every_steps
        due = self.checkpoint_due or (every is not None and step % every == 0)
        saves = due and self.committed < step < self.config.steps and self.checkpoints is not None
        self.checkpoint_due = due and not saves
        return saves

    def _save(self, step: int, state: bytes) -> float:
        """Starts the checkpoint of this step, which includes the queue's state. Returns the seconds spent on it by this
        rank."""
        started_s = time.monotonic()

        def snapshot(folder: Path) -> Files:
            began_s = time.monotonic()
            files = self.trainer.snapshot(folder)
            self.snapshot_s = time.monotonic() - began_s
            return files | ({"queue.msgpack": bytes_file(state)} if self.ranks.rank == 0 else {})

        assert self.checkpoints is not None
        self.checkpoints.save(step, snapshot, reward=fmean(self.rewards) if self.rewards else None)
        self.saved = step
        return time.monotonic() - started_s

    def _save_last(self, checkpoints: Checkpoints, step: int, *, stopped: bool) -> None:
        """Saves a checkpoint of the last step, so that no step is trained again when the run is resumed. It may take
        half of the launcher's deadline; a checkpoint that takes longer is abandoned, or not started if the snapshot
        would."""
        key = "progress_timeout_s" if step == self.config.steps else "stop_timeout_s"
        limit_s = getattr(self.config.launch, key) / 2
        deadline_s = time.monotonic() + limit_s
        wanted = self.config.checkpoint.every_steps is not None and not stopped
        in_time = checkpoints.finish(limit_s)
        due = wanted and step > self.saved and step >= self.committed
        if due and in_time:
            in_time = not self.ranks.any(self.snapshot_s > deadline_s - time.monotonic())
        if due and in_time:
            state = b"" if self.ranks.rank else self.batches.commit(step, {}, saving=True).state
            self._save(step, state)
            in_time = checkpoints.finish(max(deadline_s - time.monotonic(), 0.0))
        if not in_time:
            log.warning(f"no checkpoint of the last step: it takes longer than half of launch.{key}", step=step)

    def _save_models(self) -> None:
        save_model(self.trainer.policy, self.run_dir / "model")
        if self.trainer.critic is not None:
            self.trainer.critic.save(self.run_dir / "critic")

    def _prepared(self, step: int) -> tuple[Shard, Batch | InvariantError] | None:
        """Waits for this rank's part of the step, and lets the thread prepare the next one. Returns None if
        there is no batch. Raises what `batches.take` raises."""
        ahead = self.ahead or self.prefetch.submit(self._take, step)
        while self.card.hands_over and not wait([ahead], POLL_S).done:
            self._hand_over_again()
        prepared = ahead.result()
        if prepared is not None and step < self.config.steps:
            self.ahead = self.prefetch.submit(self._take, step + 1)
        return prepared

    def _take(self, step: int) -> tuple[Shard, Batch | InvariantError] | None:
        shard = self.batches.take(step)
        if shard is None:
            return None
        try:
            return shard, self.prepare(shard, step)
        except InvariantError as error:
            return shard, error

    def prepare(self, shard: Shard, step: int) -> Batch:
        """The packed batch. Raises InvariantError if the shard cannot be trained in this step."""
        if shard.step != step:
            raise InvariantError(f"step {step}: took the shard of step {shard.step}")
        if (replay := self.trainer.policy.replay) is not None:
            replay.check(shard.groups)
        return collate(shard.groups, self.config, version=step - 1)

    def _send(self, version: int) -> None:
        """Passes the weights to the sender, which copies them in the background. Versions sent before this start are
        not sent again, and the last one is sent only to be evaluated."""
        if version < self.committed or not (version < self.config.steps or self.config.evaluates(version)):
            return
        self.timer.switch("syncing")
        self.sent = version
        if self.sender is not None:
            self.sender.send(version, self.card.make_room(self.trainer.policy.sent_slices()), copy_later=True)

    def _end_turn(self, version: int) -> None:
        if self.card.hands_over:
            self._send(version)
        self.card.end(self._await_copy)

    def _hand_over_again(self) -> None:
        """Hands the last version over to a generator that has none: it has started since, or did not get it."""
        if self.card.can_hand_over and self.sender is not None and self.sender.is_missed:
            self.card.begin(soon=True)
            self._end_turn(self.sent)

    def _await_copy(self) -> None:
        if self.sender is not None:
            self.timer.switch("syncing")
            self.sender.copied()
            self.timer.switch("working")

    def _commit(self, step: int, metrics: dict[str, float], *, saving: bool) -> Committed:
        if self.ranks.rank:
            return Committed({}, b"", False, False, 0, False)
        if self.sender is not None:
            stats = self.sender.stats
            metrics |= {"weights/broadcasts": float(stats.count), "weights/bytes": float(stats.bytes)}
            metrics |= {"weights/broadcast_s": stats.broadcast_s, "weights/wait_s": stats.wait_s}
            metrics["weights/dropped"] = float(stats.dropped)
        recent: list[int] = []
        if self.checkpoints is not None:
            metrics |= self.checkpoints.metrics()
            recent = self.checkpoints.recent
        committed = self.batches.commit(step, metrics, saving=saving, checkpoints=recent)
        self.checkpoint_due = self.checkpoint_due or committed.checkpoint_wanted
        self.stopping, self.collapsed = committed.stopping, committed.collapsed
        if self.checkpoints is not None:
            self.checkpoints.alarmed = committed.metrics.get("collapse/alarms", 0.0) > 0
        if "reward/mean" in committed.metrics:
            self.rewards.append(committed.metrics["reward/mean"])
        self._rate(committed.metrics)
        return committed

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        if self.ranks.rank:
            return
        if self.tracker is not None:
            self.tracker.log(step, metrics)
        log.info(
            "step done",
            step=step,
            loss=round(metrics.get("learner/loss", math.nan), 6),
            grad_norm=round(metrics.get("learner/grad_norm", math.nan), 6),
            tokens=int(metrics["learner/tokens"]),
            step_s=round(metrics["learner/step_s"], 3),
            wait_s=round(metrics["learner/wait_s"], 3),
        )

    def _finish_sending(self) -> None:
        if self.sender is None:
            return
        try:
            self.sender.wait()
        except PeerTimeoutError as error:
            log.warning("the last weights did not reach all generators", error=str(error))

    def _finish_evaluating(self, should_stop: Callable[[], bool]) -> None:
        def is_over() -> bool:
            self._hand_over_again()
            return should_stop()

        if self.tracker is not None and self.config.data.eval_files:
            for step, metrics in self.batches.evaluations(is_over):
                self.tracker.log_evaluation(step, metrics)
                self._rate(metrics)

    def _rate(self, metrics: dict[str, float]) -> None:
        if self.checkpoints is not None and "eval/reward" in metrics:
            self.checkpoints.evaluated(int(metrics["eval/version"]), metrics["eval/reward"])
