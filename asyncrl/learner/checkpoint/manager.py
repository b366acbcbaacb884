"""The checkpoints of a run: chosen on start, saved in the background, and kept while they are wanted."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog
import torch

from asyncrl.config import Config
from asyncrl.errors import AsyncrlError, RunError
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
from asyncrl.util.files import sync_folder

log = structlog.get_logger()


class Checkpoints:
    """The checkpoints in a folder, as one learner rank sees them. Rank 0 removes what is not kept."""

    def __init__(self, config: Config, folder: Path, ranks: Ranks, *, others: tuple[str, ...] = ()) -> None:
        """`others` are processes that are no learner ranks and write parts of their own."""
        self.folder = folder
        self.ranks = ranks
        self._settings = config.checkpoint
        self._timeout_s = config.launch.progress_timeout_s
        self._names = (*(f"learner-{rank}" for rank in range(ranks.count)), *others)
        self._writer = PartWriter(f"learner-{ranks.rank}")
        self._cancelled = threading.Event()
        self._partial: Path | None = None
        """Where a checkpoint is under way."""
        self._late = False
        """It was not whole in time, and is not waited for any more."""
        self._evaluations: dict[int, float] = {}
        """Rewards of evaluated versions that no manifest has yet."""
        self._write_s: float | None = None
        self.took_s = 0.0
        """How long the last checkpoint took until it was whole, on rank 0."""
        self._whole: list[int] = []

    def path(self, step: int) -> Path:
        return self.folder / folder_name(step)

    @property
    def recent(self) -> list[int]:
        """Steps of the newest checkpoints that are whole, `checkpoint.keep_last` of them, ascending."""
        return self._whole[-self._settings.keep_last :]

    def newest(self) -> int:
        """Step of the newest checkpoint whose files are as they were written; 0 without one. All ranks call it,
        before anything is saved. A damaged one is named in the log; what a killed process left behind is removed."""
        if self.ranks.rank == 0:
            for left in [path for path in self.folder.glob("step-*") if not _is_finished(path)]:
                log.warning("an unfinished checkpoint is removed", path=str(left))
                shutil.rmtree(left)
        steps = finished_steps(self.folder)
        self._whole = [step for step in steps if has_manifest(self.path(step))]
        while True:
            newest = int(self.ranks.max(torch.tensor([max(steps, default=0)])))
            if newest == 0 or self.is_whole(newest):
                return newest
            steps = [step for step in steps if step < newest]
            self._whole = [step for step in self._whole if step != newest]

    def is_whole(self, step: int) -> bool:
        """Whether the checkpoint's files are as they were written. All ranks call it, and each reads a part."""
        damaged = is_damaged(self.path(step), part=self.ranks.rank, parts=self.ranks.count)
        return not self.ranks.any(damaged)

    def save(self, step: int, snapshot: Callable[[Path], Files], *, reward: float | None) -> None:
        """Starts a checkpoint of this step; all ranks call it. Waits for the one before, takes the snapshot of this
        rank, and goes on in the background.

        Raises RunError on all ranks when the one before failed or `checkpoint.max_bytes` is too low.
        """
        self.finish()
        begun_s = time.monotonic()
        path = self.path(step)
        unfinished = partial_folder(path)
        self._partial = unfinished
        files = snapshot(unfinished)
        num_bytes = self.ranks.sum(torch.tensor([sum(content.num_bytes for content in files.values())]))
        self.ranks.raise_on_all_ranks(self._make_room(step, int(num_bytes)))
        started_s = time.monotonic()

        def complete() -> None:
            self._complete(step, unfinished, reward)
            self._write_s = time.monotonic() - started_s
            self.took_s = time.monotonic() - begun_s

        self._writer.start(unfinished, files, then=complete if self.ranks.rank == 0 else None)

    def failure(self) -> AsyncrlError | None:
        """Why this rank's part of the last checkpoint failed, once it has; never waits."""
        self._rate()
        return self._writer.failure()

    def finish(self, limit_s: float | None = None) -> bool:
        """Waits for the checkpoint under way; all ranks call it. False when it is not whole within the limit, and only
        `close` may follow. Raises RunError on all ranks when it failed."""
        self._late = limit_s is not None and self.ranks.any(not self._writer.ends(limit_s))
        if self._late:
            return False
        self.ranks.raise_on_all_ranks(self._writer.wait())
        self._partial = None
        self._rate()
        return True

    def evaluated(self, version: int, reward: float) -> None:
        """Takes note of the reward of an evaluated version, which then is the one of its checkpoint, if it has one:
        that was begun before any generator had the version."""
        if version in self._whole or self._partial == partial_folder(self.path(version)):
            self._evaluations[version] = reward
            self._rate()

    def metrics(self) -> dict[str, float]:
        """How long the last checkpoint took to write, once it is whole; told once."""
        write_s, self._write_s = self._write_s, None
        return {} if write_s is None else {"checkpoint/write_s": write_s}

    def close(self) -> None:
        """Gives up a checkpoint that is not whole. The next start removes what is left of one that was late."""
        self._cancelled.set()
        self._writer.close(wait=not self._late)
        if self._partial is not None and self.ranks.rank == 0 and not self._late:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _make_room(self, step: int, num_bytes: int) -> RunError | None:
        """Removes older checkpoints until one of `num_bytes` fits beside the newest; the error when it cannot."""
        limit = self._settings.max_bytes
        if limit is None or self.ranks.rank:
            return None
        sizes = {whole: read_manifest(self.path(whole)).num_bytes for whole in self._whole if whole != step}
        newest = sizes[max(sizes)] if sizes else 0
        if newest + num_bytes > limit:
            return RunError(
                f"checkpoint.max_bytes = {limit}: the checkpoint of step {step} has {num_bytes} bytes and must fit "
                f"beside the newest one, which has {newest}; raise it to at least {newest + num_bytes}, or leave it out"
            )
        order = [whole for whole in sorted(sizes) if whole not in self._kept()] + sorted(sizes)
        while sum(sizes.values()) + num_bytes > limit:
            self._remove(order[0])
            sizes.pop(order[0])
            order = [whole for whole in order if whole in sizes]
        return None

    def _complete(self, step: int, unfinished: Path, reward: float | None) -> None:
        """Makes the checkpoint whole when all parts are there, and removes those that are not kept any more."""
        files = await_parts(unfinished, self._names, timeout_s=self._timeout_s, cancelled=self._cancelled)
        manifest = CheckpointManifest(step, reward, files=files)
        if error := self._make_room(step, manifest.num_bytes):
            raise error
        shutil.rmtree(unfinished / PARTS)
        write_manifest(unfinished, manifest)
        for folder in [path for path in unfinished.rglob("*") if path.is_dir()]:
            sync_folder(folder)
        path = self.path(step)
        if path.exists():
            self._remove(step)
        unfinished.rename(path)
        sync_folder(self.folder)
        self._whole = sorted({*self._whole, step})
        log.info("checkpoint saved", path=str(path), bytes=manifest.num_bytes)
        kept = self._kept()
        for other in [other for other in finished_steps(self.folder) if other not in kept]:
            self._remove(other)

    def _kept(self) -> set[int]:
        kept = set(self.recent)
        if self._settings.keep_best and self._whole:
            kept.add(max(self._whole, key=self._rank_of))
        return kept

    def _rank_of(self, step: int) -> tuple[bool, float, int]:
        """An evaluated checkpoint before one that is not, then the better, then the newer."""
        manifest = read_manifest(self.path(step))
        reward = float("-inf") if manifest.reward is None else manifest.reward
        return manifest.evaluated, reward, step

    def _rate(self) -> None:
        """Writes rewards that came late into their checkpoints; not while one is under way."""
        if self._writer.busy:
            return
        for step in [step for step in self._whole if step in self._evaluations]:
            manifest = read_manifest(self.path(step))
            manifest.reward, manifest.evaluated = self._evaluations.pop(step), True
            write_manifest(self.path(step), manifest)

    def _remove(self, step: int) -> None:
        """Removes the checkpoint, its manifest first: half of one is none."""
        path = self.path(step)
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)
        self._whole = [whole for whole in self._whole if whole != step]
        self._evaluations.pop(step, None)
        log.info("checkpoint removed", path=str(path))


def _is_finished(path: Path) -> bool:
    """False for what is left of one that was being written or removed."""
    return path.suffix != PARTIAL and (path / MANIFEST).exists()
