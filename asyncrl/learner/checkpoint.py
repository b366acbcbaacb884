"""The checkpoints of a run: their folders and checksums, selection at the start, saving in the background, and
retention."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.config.config import Config
from asyncrl.errors import AsyncrlError, PeerTimeoutError, RunError
from asyncrl.observe.collapse import LASTS_STEPS
from asyncrl.util.files import replace_file, sync_folder

if TYPE_CHECKING:
    from asyncrl.learner.distributed import Ranks

PARTS = ".parts"
"""Folder in an unfinished checkpoint with the checksums of each process that has written its part."""
POLL_S = 0.05
ALARM_STEPS = max(LASTS_STEPS.values())
log = structlog.get_logger()
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run's folder."""
MANIFEST = "checkpoint.json"
PARTIAL = ".partial"
"""Suffix of the folder of an incomplete checkpoint."""
UNREADABLE = (OSError, ValueError, TypeError)
"""Errors raised on reading a damaged manifest."""
Sum = dict[str, Any]
"""Size `bytes` and checksum `xxh3` (64 bits, hexadecimal) of a file."""


Files = dict[str, Callable[[Path], object]]
"""Writers of a checkpoint by path: of a file, or of a folder of files."""


def tensors_file(tensors: dict[str, Tensor]) -> Callable[[Path], object]:
    return partial(save_file, tensors, metadata={"format": "pt"})


def bytes_file(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


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
            for path in list(self.folder.glob("step-*")):
                if path.suffix == PARTIAL or not (path / MANIFEST).exists():
                    log.warning("an unfinished checkpoint is removed", path=str(path))
                    shutil.rmtree(path)
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
        path = self.path(step)
        unfinished = partial_folder(path)
        self._partial = unfinished
        files = snapshot(unfinished)
        started_s = time.monotonic()

        def complete() -> None:
            self._complete(step, unfinished, reward)
            self._write_s = time.monotonic() - started_s

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
        retained = self._kept()
        for other in [other for other in finished_steps(self.folder) if other not in retained]:
            self._remove(other)

    def _kept(self) -> set[int]:
        retained = set(self.recent)
        if self._settings.keep_best and self._finished:
            retained.add(max(self._finished, key=self._rank_of))
        if self._may_roll_back and self._finished:
            # The newest from before any collapse that is found from now on, and all that may turn out to be before one.
            if not (self.alarmed and self._calm_step):
                self._calm_step = self._finished[-1]
            earliest = self._calm_step - ALARM_STEPS - 2
            retained.update([step for step in self._finished if step <= earliest][-1:])
            retained.update(step for step in self._finished if earliest < step <= self._calm_step)
        return retained

    def _rank_of(self, step: int) -> tuple[bool, float, int]:
        manifest = read_manifest(self.path(step))
        reward = float("-inf") if manifest.reward is None else manifest.reward
        return manifest.evaluated, reward, step

    def _rate(self) -> None:
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


class PartWriter:
    """Writes the part of one process, one checkpoint at a time, in a background thread."""

    def __init__(self, name: str) -> None:
        """`name` identifies this process among those that write to the same checkpoint."""
        self.name = name
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    @property
    def busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def start(self, folder: Path, files: Files, *, then: Callable[[], None] | None = None) -> None:
        """Starts to write the files to `folder`, their checksums last, and to call `then` afterwards. Call `wait`
        before the next `start`."""
        assert self._running is None

        def work() -> None:
            try:
                _write(folder, self.name, files)
                if then is not None:
                    then()
            except AsyncrlError:
                raise
            except (OSError, SafetensorError) as error:
                raise RunError(
                    f"the checkpoint {folder} cannot be written: {error}; free disk space (checkpoint.keep_last and "
                    "checkpoint.keep_best set how many are kept), then continue with `asyncrl launch --resume`"
                ) from error

        self._running = self._executor.submit(work)

    def failure(self) -> AsyncrlError | None:
        """Returns the error of a finished write, once; None if it succeeded or is still running. Never waits. Raises an
        error that is not an AsyncrlError."""
        return self.wait() if self._running is not None and self._running.done() else None

    def wait(self) -> AsyncrlError | None:
        """Waits for the running write. Returns its error, or None. Raises an error that is not an AsyncrlError."""
        running, self._running = self._running, None
        error = running.exception() if running is not None else None
        if error is not None and not isinstance(error, AsyncrlError):
            raise error
        return error

    def ends(self, limit_s: float) -> bool:
        """Waits for at most `limit_s`. Returns True if no write is running or the write ends within the limit."""
        return self._running is None or not wait([self._running], limit_s).not_done

    def close(self, *, wait: bool = True) -> None:
        """Stops the thread. Without `wait`, a running write continues until the process ends."""
        self._executor.shutdown(wait=wait)


def _write(folder: Path, name: str, files: Files) -> None:
    sums: dict[str, Sum] = {}
    for path, write in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        write(target)
        written = [target] if target.is_file() else sorted(p for p in target.rglob("*") if p.is_file())
        sums |= {str(file.relative_to(folder)): sum_of(file, flush=True) for file in written}
    (folder / PARTS).mkdir(parents=True, exist_ok=True)
    replace_file(folder / PARTS / f"{name}.json", json.dumps(sums, indent=1))


def await_parts(folder: Path, names: Iterable[str], *, timeout_s: float, cancelled: threading.Event) -> dict[str, Sum]:
    """Waits until all named processes have written their parts and returns the checksums of all files by path. Raises
    PeerTimeoutError, naming the missing processes, after `timeout_s`, and RunError if `cancelled` is set."""
    deadline_s = time.monotonic() + timeout_s
    paths = [folder / PARTS / f"{name}.json" for name in names]
    while missing := [path.stem for path in paths if not path.exists()]:
        if cancelled.wait(POLL_S):
            raise RunError(f"the checkpoint {folder} was abandoned: {', '.join(missing)} have not written their parts")
        if time.monotonic() > deadline_s:
            raise PeerTimeoutError(
                f"the checkpoint {folder} lacks the parts of {', '.join(missing)} after {timeout_s:g} s "
                "(launch.progress_timeout_s)"
            )
    return {path: entry for part in paths for path, entry in json.loads(part.read_text()).items()}


@dataclass(slots=True)
class CheckpointManifest:
    """`checkpoint.json`: metadata of the checkpoint, and the checksums of its other files."""

    step: int
    reward: float | None
    """Mean reward of the steps before the checkpoint, or of its evaluation if `evaluated`."""
    evaluated: bool = False
    files: dict[str, Sum] = field(default_factory=dict[str, Sum])

    @property
    def num_bytes(self) -> int:
        return sum(int(entry["bytes"]) for entry in self.files.values())


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


def partial_folder(checkpoint: Path) -> Path:
    """Returns the folder to which a checkpoint is written until it is complete."""
    return checkpoint.with_name(f"{checkpoint.name}{PARTIAL}")


def step_of(checkpoint: Path) -> int:
    """Returns the step in the folder name of a checkpoint, complete or not."""
    return int(checkpoint.name.removesuffix(PARTIAL).removeprefix("step-"))


def read_manifest(path: Path) -> CheckpointManifest:
    return CheckpointManifest(**json.loads((path / MANIFEST).read_text()))


def has_manifest(path: Path) -> bool:
    """True if the checkpoint's manifest can be read."""
    try:
        read_manifest(path)
    except UNREADABLE:
        return False
    return True


def finished_steps(folder: Path) -> list[int]:
    """Returns the steps of the finished checkpoints in the folder, ascending, without checking them for damage."""
    names = [path.parent.name.removeprefix("step-") for path in folder.glob(f"step-*/{MANIFEST}")]
    return sorted(int(name) for name in names if name.isdigit())


def newest_checkpoint(folder: Path, *, before: float = math.inf) -> Path | None:
    """Returns the newest undamaged checkpoint in the folder of a step before this one, or None. Damaged ones are
    logged."""
    paths = [folder / folder_name(step) for step in reversed(finished_steps(folder)) if step < before]
    return next((path for path in paths if not is_damaged(path)), None)


def is_damaged(path: Path, *, part: int = 0, parts: int = 1) -> bool:
    """True if a file of the checkpoint does not have its checksum, which is logged. Checks only the files of part
    `part` of `parts`."""
    damage = _find_damage(path, part, parts)
    if damage:
        log.warning("a damaged checkpoint is not used", path=str(path), reason=damage)
    return bool(damage)


def _find_damage(path: Path, part: int, parts: int) -> str:
    try:
        files = read_manifest(path).files
    except UNREADABLE as error:
        return f"{path / MANIFEST}: {error}"
    for name in sorted(files)[part::parts]:
        try:
            actual = sum_of(path / name)
        except OSError as error:
            return f"{path / name}: {error}"
        if actual != files[name]:
            return f"{path / name}: has {actual}, but was written with {files[name]}"
    return ""


def sum_of(path: Path, *, flush: bool = False) -> Sum:
    """Returns the checksum of the file; with `flush`, after the disk has it."""
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, xxhash.xxh3_64)
        return {"bytes": file.tell(), "xxh3": digest.hexdigest()}


def write_manifest(path: Path, manifest: CheckpointManifest) -> None:
    """Writes or replaces the manifest, which makes the folder a complete checkpoint."""
    replace_file(path / MANIFEST, json.dumps(asdict(manifest), indent=1))
