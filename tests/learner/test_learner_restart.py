"""A learner that resumes from a checkpoint produces results bit-identical to one that was never interrupted."""

from __future__ import annotations

import errno
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from worlds import CRITIC, Sender, make_config, make_groups, make_trainer

from asyncrl.config.config import Config
from asyncrl.errors import RunError
from asyncrl.learner import update
from asyncrl.learner.checkpoint import Checkpoints, Files
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.loop import Learner
from asyncrl.learner.model.saving import collect_state
from asyncrl.learner.step import Trainer
from asyncrl.observe.trackers import Trackers, make_trackers
from asyncrl.types import Shard
from asyncrl.wire.messages import Committed

STEPS = 6
TOY: dict[str, Any] = {
    **CRITIC,
    "algorithm": CRITIC["algorithm"],
    "learner": {"warmup_steps": 2, "lr_schedule": "cosine", "epochs": 2},
    "steps": STEPS,
}
"""Settings with all kinds of training state: policy, critic, schedule, and the KL coefficient."""


@dataclass
class Queue:
    """The replay queue with its journal, which outlives the learners that use it."""

    commits: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    saving: list[tuple[int, bool, list[int]]] = field(default_factory=list[tuple[int, bool, list[int]]])
    wanted_at: int = 0
    """Step at whose commit the queue requests a checkpoint."""
    begun: list[int] = field(default_factory=list[int])
    stopped_at: int = 0
    """Step before whose batch the run is asked to stop."""
    killed_at: int = 0
    """Step at whose batch the learner is killed."""
    spoiled: tuple[int, ...] = ()
    """Steps whose batch has a NaN reward, which makes the updates of policy and critic non-finite."""
    evaluated: list[tuple[int, dict[str, float]]] = field(default_factory=list[tuple[int, dict[str, float]]])
    """Versions and metrics of the evaluations that end after the last step."""
    slow: tuple[int, Path] | None = None
    """A step whose batch is available only after this path exists."""

    def begin(self, step: int) -> int:
        self.begun.append(step)
        return len(self.commits)

    def take(self, step: int) -> Shard | None:
        if step == self.stopped_at:
            return None
        if step == self.killed_at:
            raise KeyboardInterrupt
        while self.slow is not None and self.slow[0] == step and not self.slow[1].exists():
            time.sleep(0.01)
        groups = make_groups(3, seed=step, version=step - 1)
        if step in self.spoiled:
            groups[1].trajectories[2].reward = float("nan")
        return Shard(step, groups)

    def commit(
        self, step: int, metrics: dict[str, float], *, saving: bool = False, checkpoints: Sequence[int] = ()
    ) -> Committed:
        again = step in self.commits
        own = self.commits.setdefault(step, {"reward/mean": step / 10})
        self.saving.append((step, saving, list(checkpoints)))
        state, wanted = f"queue at {step}".encode() if saving else b"", step == self.wanted_at and not again
        return Committed(own, state, wanted, stopping=False, batches=0, collapsed=False)

    def evaluations(self, should_stop: Callable[[], bool]) -> Iterable[tuple[int, dict[str, float]]]:
        return self.evaluated

    def close(self) -> None: ...


@dataclass
class World:
    """A run's folder, its queue, and the learners that are started in it."""

    config: Config
    ranks: Ranks
    run_dir: Path
    queue: Queue = field(default_factory=Queue)

    def start(
        self,
        change: Callable[[Checkpoints], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> tuple[Learner, Sender]:
        """Starts the learner and runs it to its end."""
        sender = Sender()
        checkpoints = Checkpoints(self.config, self.run_dir / "checkpoints", self.ranks)
        if change is not None:
            change(checkpoints)
        trackers: Trackers = make_trackers(self.config, self.run_dir)
        trainer = make_trainer(self.config, self.ranks)
        try:
            start = checkpoints.newest()
            if start:
                trainer.restore(checkpoints.path(start))
            learner = Learner(
                self.config, trainer, self.queue, sender, trackers, self.run_dir, checkpoints, start
            )  # fmt: skip
            learner.run(should_stop)
        finally:
            trackers.close()
            checkpoints.close()
        return learner, sender

    def kill_at(self, step: int) -> None:
        self.queue.killed_at = step
        with pytest.raises(KeyboardInterrupt):
            self.start()
        self.queue.killed_at = 0

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / "checkpoints").glob("*"))

    @property
    def rows(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]


Make = Callable[..., World]


@pytest.fixture
def world(one_rank: Ranks, tiny_model: Path, tmp_path: Path) -> Make:
    def make(name: str = "run", **checkpoint: Any) -> World:
        (tmp_path / name).mkdir()
        return World(make_config(tiny_model, **TOY, checkpoint=checkpoint), one_rank, tmp_path / name)

    return make


@pytest.fixture(scope="module")
def uninterrupted(
    one_rank: Ranks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Learner, Sender, list[dict[str, float]]]]:
    config = make_config(tiny_model, **TOY, checkpoint={"every_steps": None})
    world = World(config, one_rank, tmp_path_factory.mktemp("uninterrupted"))
    learner, sender = world.start()
    assert not (world.run_dir / "checkpoints").exists()
    yield learner, sender, world.rows


def same_end(learner: Learner, other: Learner) -> None:
    critics = [getattr(one.trainer.critic, "model", None) for one in (learner, other)]
    for first, second in ((learner.trainer.policy, other.trainer.policy), critics):
        states = [collect_state(model) for model in (first, second)]
        assert states[0].keys() == states[1].keys()
        for key, tensor in states[0].items():
            assert torch.equal(tensor, states[1][key]), key


def test_a_restart_catches_up_and_ends_the_same(world: Make, uninterrupted: Any) -> None:
    whole, sent, rows = uninterrupted
    one = world(every_steps=2, keep_last=1, keep_best=False)
    one.kill_at(6)
    assert one.queue.saving == [(1, False, []), (2, True, []), *one.queue.saving[2:]]
    assert [step for step, saving, _ in one.queue.saving if saving] == [2, 4]
    lines = (one.run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (one.run_dir / "metrics.jsonl").write_text("".join(lines[:4]) + lines[4][:20])  # step 5 was being written
    queue = one.run_dir / "checkpoints" / "step-000004" / "queue.msgpack"
    assert queue.read_bytes() == b"queue at 4"
    learner, sender = one.start()
    assert one.queue.begun == [0, 4] and learner.committed == 5
    assert list(sender.sent) == [5]
    for name, weight in sender.sent[5].items():
        assert torch.equal(weight, sent.sent[5][name])
    same_end(learner, whole)
    assert [row["step"] for row in one.rows] == [1, 2, 3, 4, 5, 6]
    for row, other in zip(one.rows, rows, strict=True):
        timeless = [name for name in other if not name.endswith(("_s", "_bytes"))]
        assert {name: row[name] for name in timeless} == {name: other[name] for name in timeless}


def test_a_run_continues_after_updates_that_are_not_finite(world: Make) -> None:
    whole, killed = world("whole", every_steps=None), world("killed", every_steps=2)
    for one in (whole, killed):
        one.queue.spoiled = (3, 5)
    learner, sender = whole.start()
    assert list(sender.sent) == [0, 1, 2, 3, 4, 5] and list(whole.queue.commits) == [1, 2, 3, 4, 5, 6]
    assert all(torch.equal(weight, sender.sent[2][name]) for name, weight in sender.sent[3].items())
    assert not all(torch.equal(weight, sender.sent[3][name]) for name, weight in sender.sent[4].items())
    for row in whole.rows:
        skipped = 2.0 if row["step"] in whole.queue.spoiled else 0.0
        assert row["learner/skipped_updates"] == row["critic/skipped_updates"] == skipped
    killed.kill_at(6)
    same_end(killed.start()[0], learner)


def test_too_many_skipped_updates_end_the_run_and_it_can_be_resumed(
    world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = world(every_steps=1)
    one.queue.spoiled = (2, 3, 4)
    with pytest.raises(RunError, match=r"step 4: 6 updates in a row are not finite"):
        one.start()
    with pytest.raises(RunError, match=r"step 4: 6 updates in a row are not finite"):
        one.start()
    monkeypatch.setattr(update, "MAX_SKIPPED_UPDATES", 6)
    one.start()
    assert [row["step"] for row in one.rows] == [1, 2, 3, 4, 5, 6]
    assert [row["learner/skipped_updates"] for row in one.rows] == [0.0, 2.0, 2.0, 2.0, 0.0, 0.0]


def test_a_run_whose_steps_are_all_committed_saves_its_model(world: Make, uninterrupted: Any) -> None:
    one = world(every_steps=4)
    one.start()
    trained = (one.run_dir / "model" / "model.safetensors").read_bytes()
    (one.run_dir / "model" / "model.safetensors").unlink()
    shutil.rmtree(one.run_dir / "checkpoints" / "step-000006")
    learner, sender = one.start()
    assert one.queue.begun == [0, 4] and not sender.sent
    assert (one.run_dir / "model" / "model.safetensors").read_bytes() == trained
    assert one.checkpoints == ["step-000004", "step-000006"]
    assert [row["step"] for row in one.rows] == [1, 2, 3, 4, 5, 6]
    same_end(learner, uninterrupted[0])


def test_the_queue_asks_for_a_checkpoint(world: Make) -> None:
    one = world(every_steps=None, keep_last=2)
    one.queue.wanted_at = 2
    one.queue.slow = 5, one.run_dir / "checkpoints" / "step-000003"
    one.start()
    assert [(step, saving) for step, saving, _ in one.queue.saving] == [(s, s == 3) for s in range(1, 7)]
    assert one.queue.saving[-1][2] == [3]
    saved = {row["step"]: row for row in one.rows}
    assert saved[3]["checkpoint/save_s"] > 0 and sum("checkpoint/save_s" in row for row in one.rows) == 1
    times_s = [row["checkpoint/write_s"] for row in one.rows if "checkpoint/write_s" in row]
    assert len(times_s) == 1 and times_s[0] > 0


def test_a_finished_run_continues_with_its_last_step(world: Make) -> None:
    one = world(every_steps=4)
    one.start()
    assert one.checkpoints == ["step-000004", "step-000006"]
    queue = one.run_dir / "checkpoints" / "step-000006" / "queue.msgpack"
    assert queue.read_bytes() == b"queue at 6"
    one.config = one.config.model_copy(update={"steps": 8})
    one.queue.saving.clear()
    _, sender = one.start()
    assert one.queue.begun == [0, 6] and list(sender.sent) == [6, 7]
    assert one.queue.saving == [(7, False, [4, 6]), (8, False, [4, 6]), (8, True, [])]
    assert one.checkpoints[-2:] == ["step-000006", "step-000008"]


def test_the_last_checkpoint_gets_the_reward_of_its_evaluation(world: Make) -> None:
    one = world(every_steps=4)
    data = one.config.data.model_copy(update={"eval": "eval.parquet"})
    one.config = one.config.model_copy(update={"data": data})
    one.queue.evaluated = [
        (6, {"eval/version": 4.0, "eval/reward": 0.7}),
        (6, {"eval/version": 6.0, "eval/reward": 0.9}),
    ]
    one.start()
    told = [json.loads(path.read_text()) for path in sorted(one.run_dir.glob("checkpoints/*/checkpoint.json"))]
    assert [(one["step"], one["reward"], one["evaluated"]) for one in told] == [(4, 0.7, True), (6, 0.9, True)]


def test_a_run_that_was_asked_to_stop_continues_with_its_last_step(world: Make, uninterrupted: Any) -> None:
    one = world(every_steps=4)
    one.queue.stopped_at = 4
    learner, _ = one.start()
    assert one.checkpoints == ["step-000003"] and len(learner.rewards) == 3
    manifest = json.loads((one.run_dir / "checkpoints" / "step-000003" / "checkpoint.json").read_text())
    assert manifest["reward"] == pytest.approx(0.2)
    one.start()  # stopped before it has trained anything
    assert one.queue.saving[3:] == [(3, True, [])]
    one.queue.stopped_at = 0
    learner, sender = one.start()
    assert one.queue.begun == [0, 3, 3] and list(sender.sent) == [3, 4, 5]
    same_end(learner, uninterrupted[0])


def test_a_stopped_learner_saves_no_checkpoint(world: Make) -> None:
    one = world(every_steps=4)
    one.start(should_stop=lambda: len(one.queue.commits) == 3)
    assert one.checkpoints == [] and (one.run_dir / "model" / "config.json").exists()


def test_a_last_checkpoint_that_takes_too_long_is_abandoned(world: Make, uninterrupted: Any) -> None:
    one = world(every_steps=4)
    launch = one.config.launch.model_copy(update={"stop_timeout_s": 0.2})
    one.config = one.config.model_copy(update={"launch": launch})
    go_on, written = threading.Event(), threading.Event()

    def slow(checkpoints: Checkpoints) -> None:
        save = checkpoints.save

        def write(path: Path) -> None:
            assert go_on.wait(60)
            written.set()
            raise OSError(f"{path}: its folder is gone")

        checkpoints.save = lambda step, snapshot, **options: save(  # type: ignore[method-assign]
            step, lambda folder: {"slow": write} | snapshot(folder), **options
        )

    one.queue.stopped_at = 3
    with structlog.testing.capture_logs() as logs:
        one.start(slow)
    (entry,) = (entry for entry in logs if entry["log_level"] == "warning")
    assert entry["event"] == "no checkpoint of the last step: it takes longer than half of launch.stop_timeout_s"
    assert entry["step"] == 2 and one.checkpoints == ["step-000002.partial"]
    assert (one.run_dir / "model" / "config.json").exists()
    one.config = one.config.model_copy(update={"launch": launch.model_copy(update={"stop_timeout_s": 60.0})})
    one.queue.stopped_at = 0
    learner, _ = one.start()
    assert one.queue.begun == [0, 0] and one.checkpoints == ["step-000004", "step-000006"]
    same_end(learner, uninterrupted[0])
    go_on.set()
    assert written.wait(60)


def test_a_last_checkpoint_whose_snapshot_would_take_too_long_is_not_started(
    world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = world(every_steps=2)
    launch = one.config.launch.model_copy(update={"stop_timeout_s": 0.8})
    one.config = one.config.model_copy(update={"launch": launch})
    snapshot = Trainer.snapshot

    def slow(trainer: Trainer, folder: Path) -> Files:
        time.sleep(0.5)
        return snapshot(trainer, folder)

    monkeypatch.setattr(Trainer, "snapshot", slow)
    one.queue.stopped_at = 4
    with structlog.testing.capture_logs() as logs:
        one.start()
    assert [entry["step"] for entry in logs if entry["log_level"] == "warning"] == [3]
    assert [saving for _, saving, _ in one.queue.saving] == [False, True, False]


def test_a_full_disk_ends_the_run_at_the_next_step(world: Make, uninterrupted: Any) -> None:
    one = world(every_steps=2)

    def full(checkpoints: Checkpoints) -> None:
        save = checkpoints.save

        def fail(step: int, snapshot: Any, **options: Any) -> None:
            def write(path: Path) -> None:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))

            broken = {"first": write} if step == 4 else {}
            save(step, lambda folder: broken | snapshot(folder), **options)

        checkpoints.save = fail  # type: ignore[method-assign]

    with pytest.raises(RunError, match=r"step-000004.partial cannot be written: \[Errno 28\] No space left on device"):
        one.start(full)
    assert 4 in one.queue.commits and 6 not in one.queue.commits
    assert [path.name for path in (one.run_dir / "checkpoints").iterdir()] == ["step-000002"]
    learner, _ = one.start()
    same_end(learner, uninterrupted[0])


def test_a_checkpoint_beyond_the_journal_is_refused(world: Make) -> None:
    one = world(every_steps=2)
    one.kill_at(4)
    one.queue.commits = {1: {}}
    with pytest.raises(RunError, match=r"the checkpoint is of step 2, but the journal ends with step 1; move the"):
        one.start()
