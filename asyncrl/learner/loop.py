"""The learner's loop: take a batch, check it, step, send the weights, commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog
from torch import Tensor

from asyncrl.config import Config
from asyncrl.errors import AsyncrlError, InvariantError, PeerTimeoutError
from asyncrl.learner.algorithm import make_algorithm
from asyncrl.learner.batch import Batch, check_staleness, make_batch
from asyncrl.learner.checkpoint import save_model
from asyncrl.learner.critic import Critic, ValueFunction
from asyncrl.learner.distributed import Ranks, connected
from asyncrl.learner.remote_critic import RemoteCritic
from asyncrl.learner.trainer import Trainer
from asyncrl.types import Endpoints, Shard

log = structlog.get_logger()


class Batches(Protocol):
    """Where batches come from; `asyncrl.replay.client.LearnerClient`."""

    def take(self, step: int) -> Shard | None: ...
    def commit(self, step: int, metrics: dict[str, float]) -> dict[str, float]: ...
    def evaluations(self, should_stop: Callable[[], bool]) -> Iterable[tuple[int, dict[str, float]]]: ...


class SyncStats(Protocol):
    """What was sent so far; `asyncrl.weights.sender.WeightSyncStats`."""

    count: int
    broadcast_s: float


class Sender(Protocol):
    """Where weights go; `asyncrl.weights.sender.WeightSender`."""

    @property
    def stats(self) -> SyncStats: ...

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None: ...
    def wait(self) -> None: ...


class Tracker(Protocol):
    """Where metrics go; `asyncrl.observe.trackers.Trackers`."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...


def run_learner(
    config: Config, *, rank: int, endpoints: Endpoints, run_dir: Path, should_stop: Callable[[], bool]
) -> None:
    """One learner rank, from loading the model to writing it to `run_dir/model`.

    Returns when all steps are done or the run is stopping. Raises an AsyncrlError when it cannot go on.
    """
    from asyncrl.observe.trackers import make_trackers
    from asyncrl.replay.client import LearnerClient
    from asyncrl.weights.sender import WeightSender

    launch = config.launch
    algorithm = make_algorithm(config)
    with (
        connected(
            endpoints,
            rank,
            launch.learners,
            start_timeout_s=launch.start_timeout_s,
            timeout_s=launch.progress_timeout_s,
        ) as ranks,
        ExitStack() as parts,
    ):
        critic: ValueFunction | None = None
        if algorithm.needs_critic and config.critic.ranks:
            critic = RemoteCritic(config, rank, endpoints)
            parts.callback(critic.close)
        elif algorithm.needs_critic:
            critic = Critic(config, ranks)
        trainer = Trainer(config, ranks, algorithm, critic)
        client = LearnerClient(endpoints, rank, timeout_s=launch.progress_timeout_s)
        parts.callback(client.close)
        sender = trackers = None
        if rank == 0:
            trackers = make_trackers(config, run_dir)
            parts.callback(trackers.close)
            sender = WeightSender(
                endpoints.weights,
                num_generators=launch.generators,
                transport=config.weights.transport,
                bucket_bytes=config.weights.bucket_bytes,
                timeout_s=config.weights.timeout_s,
                start_timeout_s=launch.start_timeout_s,
                device=str(ranks.device),
            )
            parts.callback(sender.close)
        Learner(config, trainer, client, sender, trackers, run_dir).run(should_stop)


@dataclass(slots=True)
class Learner:
    """The loop of one rank. Rank 0 has a sender and a tracker, the others have none."""

    config: Config
    trainer: Trainer
    batches: Batches
    sender: Sender | None
    tracker: Tracker | None
    run_dir: Path
    sync_s: float = 0.0
    """How long the last version sent held this rank up; in the metrics of the step after it."""

    @property
    def ranks(self) -> Ranks:
        return self.trainer.ranks

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Trains until the last step, or until the batches end or any rank should stop; then saves the model."""
        self._send(0)
        for step in range(1, self.config.steps + 1):
            if self.ranks.any(should_stop()) or not self._train(step):
                log.info("learner stops early", finished_steps=step - 1)
                break
        self._save(self.run_dir, "model", "critic")
        self._finish_sending()
        self._finish_evaluating(should_stop)

    def _train(self, step: int) -> bool:
        """One step; false when there is no batch for it."""
        started_s = time.monotonic()
        shard = self.batches.take(step)
        taken_s = time.monotonic()
        if shard is None:
            return False
        metrics = self.trainer.train(self.prepare(shard, step), step=step)
        metrics |= {
            "learner/wait_s": taken_s - started_s,
            "learner/step_s": time.monotonic() - taken_s,
            "learner/sync_s": self.sync_s,
        }
        # Committed before it is sent: no generator may have a version that the replay queue does not know.
        self._commit(step, metrics)
        if step < self.config.steps or self.config.evaluates(step):
            self._send(step)
        every = self.config.learner.save_every_steps
        if every and step % every == 0:
            self._save(self.run_dir / "checkpoints", f"step-{step:06d}", f"critic-{step:06d}")
        return True

    def _save(self, folder: Path, name: str, critic_name: str) -> None:
        """Writes the policy, and the critic where there is one."""
        model = self.config.model.path
        save_model(self.trainer.policy, folder / name, tokenizer=model)
        if self.trainer.critic is not None:
            self.trainer.critic.save(folder / critic_name)

    def prepare(self, shard: Shard, step: int) -> Batch:
        """The packed batch. An error of any rank is raised on all: none may wait for one that left."""
        batch: Batch | None = None
        error: AsyncrlError | None = None
        try:
            if shard.step != step:
                raise InvariantError(f"step {step}: took the shard of step {shard.step}")
            check_staleness(shard.groups, version=step - 1, max_staleness=self.config.replay.max_staleness)
            batch = make_batch(
                shard.groups,
                tokens_per_microbatch=self.config.learner.tokens_per_microbatch,
                minibatches=self.config.learner.minibatches,
                skip_truncated=self.config.algorithm.truncated == "mask",
            )
        except InvariantError as broken:
            error = broken
        self.ranks.raise_together(error)
        assert batch is not None
        return batch

    def _send(self, version: int) -> None:
        """Hands the weights to the sender, which copies them and goes on in the background."""
        started_s = time.monotonic()
        if self.sender is not None:
            self.sender.send(version, self.trainer.policy.weights())
        else:
            self.trainer.policy.join_gathering()
        self.sync_s = time.monotonic() - started_s

    def _commit(self, step: int, metrics: dict[str, float]) -> None:
        if self.ranks.rank:
            return
        if self.sender is not None:
            metrics["weights/syncs"] = float(self.sender.stats.count)
            metrics["weights/broadcast_s"] = self.sender.stats.broadcast_s
        metrics = metrics | self.batches.commit(step, metrics)
        if self.tracker is not None:
            self.tracker.log(step, metrics)
        log.info(
            "step done",
            step=step,
            loss=round(metrics["learner/loss"], 6),
            grad_norm=round(metrics["learner/grad_norm"], 6),
            tokens=int(metrics["learner/tokens"]),
            step_s=round(metrics["learner/step_s"], 3),
            wait_s=round(metrics["learner/wait_s"], 3),
        )

    def _finish_sending(self) -> None:
        """Waits for the last broadcast. Generators that already left at the end of the run are no failure."""
        if self.sender is None:
            return
        try:
            self.sender.wait()
        except PeerTimeoutError as error:
            log.warning("the last weights did not reach all generators", error=str(error))

    def _finish_evaluating(self, should_stop: Callable[[], bool]) -> None:
        """Records the evaluations that end after the last step."""
        if self.tracker is not None and self.config.data.eval_files:
            for step, metrics in self.batches.evaluations(should_stop):
                self.tracker.log(step, metrics)
