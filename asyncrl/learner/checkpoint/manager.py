"""The checkpoints of a run: selection at the start, saving in the background, and retention."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog
import torch

from asyncrl.config import Config
from asyncrl.errors import AsyncrlError
from asyncrl.learner.checkpoint.files import (
    MANIFEST,
    PARTIAL,
    PARTS,
    CheckpointManifest,
    Files,
    PartWriter,
    await_parts,
    finished_steps,
    folder_name,
    has_manifest,
    is_damaged,
    partial_folder,
    read_manifest,
    write_manifest,
)
from asyncrl.learner.distributed import Ranks
from asyncrl.replay.metrics.collapse import LASTS_STEPS
from asyncrl.util.files import sync_folder

log = structlog.get_logger()

ALARM_STEPS = max(LASTS_STEPS.values())


class Checkpoints:
    """The checkpoints in a folder, used by one learner rank. Rank 0 removes those that are not retained."""

    def __init__(self, config: Config, folder: Path, ranks: Ranks, *, others: tuple[str, ...] = ()) -> None:
        """`others` are processes other than learner ranks that also write parts of each checkpoint."""
        self.folder = folder
        self.ranks = ranks
        self._settings = config.checkpoint
        self._may_roll_back = config.learner.on_collapse == "rollback"
        self.alarmed = False
        """True while an alarm of a collapse is active."""
        self._calm_step = 0
        """Step of the newest checkpoint before the alarm; 0 before the first."""
        self._timeout_s = config.launch.progress_timeout_s
        self._names = (*(f"learner-{rank}" for rank in range(ranks.count)), *others)
        self._writer = PartWriter(f"learner-{ranks.rank}")
        self._cancelled = threading.Event()
        self._partial: Path | None = None
        """Folder of the checkpoint that is being written."""
        self._late = False
        """True if that checkpoint was not complete in time and is abandoned."""
        self._evaluations: dict[int, float] = {}
        """Rewards of evaluated versions that are not in a manifest yet."""
        self._write_s: float | None = None
        self.took_s = 0.0
        """Duration of the last checkpoint until it was complete, on rank 0."""
        self._finished: list[int] = []

    def path(self, step: int) -> Path:
        return self.folder / folder_name(step)

    @property
    def recent(self) -> list[int]:
        """Steps of the newest `checkpoint.keep_last` complete checkpoints, ascending."""
        return self._finished[-self._settings.keep_last :]

    def newest(self) -> int:
        """Returns the step of the newest undamaged checkpoint, or 0. All ranks call it, before anything is saved.
        Damaged checkpoints are logged; those that a killed process left unfinished are removed."""
        if self.ranks.rank == 0:
            for left in [path for path in self.folder.glob("step-*") if not _is_finished(path)]:
                log.warning("an unfinished checkpoint is removed", path=str(left))
                shutil.rmtree(left)
        steps = finished_steps(self.folder)
        self._finished = [step for step in steps if has_manifest(self.path(step))]
        while True:
            newest = int(self.ranks.max(torch.tensor([max(steps, default=0)])))
            if newest == 0 or self.is_intact(newest):
                return newest
            steps = [step for step in steps if step < newest]
            self._finished = [step for step in self._finished if step != newest]

    def is_intact(self, step: int) -> bool:
        """True if the checkpoint's files have their checksums. All ranks call it, and each checks a part."""
        damaged = is_damaged(self.path(step), part=self.ranks.rank, parts=self.ranks.count)
        return not self.ranks.any(damaged)

    def save(self, step: int, snapshot: Callable[[Path], Files], *, reward: float | None) -> None:
        """Starts a checkpoint of this step. Waits for the previous checkpoint, takes the snapshot of this rank, and
        writes it in the background. All ranks call it.

        Raises RunError on all ranks if the previous checkpoint failed.
        """
        self.finish()
        begun_s = time.monotonic()
        path = self.path(step)
        unfinished = partial_folder(path)
        self._partial = unfinished
        files = snapshot(unfinished)
        started_s = time.monotonic()

        def complete() -> None:
            self._complete(step, unfinished, reward)
            self._write_s = time.monotonic() - started_s
            self.took_s = time.monotonic() - begun_s

        self._writer.start(unfinished, files, then=complete if self.ranks.rank == 0 else None)

    def failure(self) -> AsyncrlError | None:
        """Returns the error of this rank's part of the last checkpoint, once, or None. Never waits."""
        self._rate()
        return self._writer.failure()

    def finish(self, limit_s: float | None = None) -> bool:
        """Waits for the checkpoint that is being written. All ranks call it. Returns False if it is not complete within
        the limit; then only `close` may follow. Raises RunError on all ranks if it failed."""
        self._late = limit_s is not None and self.ranks.any(not self._writer.ends(limit_s))
        if self._late:
            return False
        self.ranks.raise_on_all_ranks(self._writer.wait())
        self._partial = None
        self._rate()
        return True

    def evaluated(self, version: int, reward: float) -> None:
        """Records the reward of an evaluated version as the reward of its checkpoint, if the version has one. The
        checkpoint was started before the evaluation, since generators receive a version only afterwards."""
        if version in self._finished or self._partial == partial_folder(self.path(version)):
            self._evaluations[version] = reward
            self._rate()

    def metrics(self) -> dict[str, float]:
        """Returns the write time of the last checkpoint once it is complete; each is reported once."""
        write_s, self._write_s = self._write_s, None
        return {} if write_s is None else {"checkpoint/write_s": write_s}

    def close(self) -> None:
        """Abandons an incomplete checkpoint and removes it. The next start removes one that was late."""
        self._cancelled.set()
        self._writer.close(wait=not self._late)
        if self._partial is not None and self.ranks.rank == 0 and not self._late:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _complete(self, step: int, unfinished: Path, reward: float | None) -> None:
        """Waits for all parts, completes the checkpoint, and removes those that are no longer retained."""
        files = await_parts(unfinished, self._names, timeout_s=self._timeout_s, cancelled=self._cancelled)
        manifest = CheckpointManifest(step, reward, files=files)
        shutil.rmtree(unfinished / PARTS)
        write_manifest(unfinished, manifest)
        for folder in [path for path in unfinished.rglob("*") if path.is_dir()]:
            sync_folder(folder)
        path = self.path(step)
        if path.exists():
            self._remove(step)
        unfinished.rename(path)
        sync_folder(self.folder)
        self._finished = sorted({*self._finished, step})
        log.info("checkpoint saved", path=str(path), bytes=manifest.num_bytes)
        kept = self._kept()
        for other in [other for other in finished_steps(self.folder) if other not in kept]:
            self._remove(other)

    def _kept(self) -> set[int]:
        kept = set(self.recent)
        if self._settings.keep_best and self._finished:
            kept.add(max(self._finished, key=self._rank_of))
        if self._may_roll_back and self._finished:
            # The newest from before any collapse that is found from now on, and all that may turn out to be before one.
            if not (self.alarmed and self._calm_step):
                self._calm_step = self._finished[-1]
            earliest = self._calm_step - ALARM_STEPS - 2
            kept.update([step for step in self._finished if step <= earliest][-1:])
            kept.update(step for step in self._finished if earliest < step <= self._calm_step)
        return kept

    def _rank_of(self, step: int) -> tuple[bool, float, int]:
        """Sort key: evaluated checkpoints rank above others, then those of higher reward, then newer ones."""
        manifest = read_manifest(self.path(step))
        reward = float("-inf") if manifest.reward is None else manifest.reward
        return manifest.evaluated, reward, step

    def _rate(self) -> None:
        """Writes the rewards of evaluations to the manifests of their checkpoints, unless one is being written."""
        if self._writer.busy:
            return
        for step in [step for step in self._finished if step in self._evaluations]:
            manifest = read_manifest(self.path(step))
            manifest.reward, manifest.evaluated = self._evaluations.pop(step), True
            write_manifest(self.path(step), manifest)

    def _remove(self, step: int) -> None:
        """Removes the checkpoint, its manifest first, so that a partly removed checkpoint counts as unfinished."""
        path = self.path(step)
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)
        self._finished = [other for other in self._finished if other != step]
        self._evaluations.pop(step, None)
        log.info("checkpoint removed", path=str(path))


def _is_finished(path: Path) -> bool:
    """False for a folder whose checkpoint was not completely written or removed."""
    return path.suffix != PARTIAL and (path / MANIFEST).exists()
