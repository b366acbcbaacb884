"""A checkpoint on disk: writing its parts, its manifest, and verifying the checksums of its files."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import structlog
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.errors import AsyncrlError, PeerTimeoutError, RunError
from asyncrl.learner.checkpoint.hf_export import ADAPTER_FOLDER, Export, WeightFile, write_file
from asyncrl.learner.checkpoint.zero_state import collect_state
from asyncrl.learner.model.engine import TrainedModel
from asyncrl.util.files import replace_file

PARTS = ".parts"
"""Folder in an unfinished checkpoint with the checksums of each process that has written its part."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class PartContent:
    """Content to write at one path of a checkpoint: a file, or a folder of files."""

    num_bytes: int
    """Size of its tensors or data."""
    write: Callable[[Path], object]


Files = dict[str, PartContent]
"""Contents by path in the checkpoint."""


def tensors_file(tensors: dict[str, Tensor]) -> PartContent:
    return PartContent(sum(tensor.nbytes for tensor in tensors.values()), partial(save_file, tensors))


def bytes_file(data: bytes) -> PartContent:
    return PartContent(len(data), lambda path: path.write_bytes(data))


def model_files(trained: TrainedModel, name: str) -> Files:
    """Returns the checkpoint files of a model that this rank writes: its part of the training state in the folder
    `name`; its part of the model in Hugging Face format, in the folder `model` for the policy and `NAME_model`
    otherwise, on rank 0 with the files other than weights; and on rank 0 adapters in peft's format in the folder
    `adapter`. Tensors are copied to the CPU. All ranks call it."""
    rank = trained.ranks.rank
    files = {f"{name}/rank-{rank}.safetensors": tensors_file(collect_state(trained))}
    folder = "model" if name == "policy" else f"{name}_model"
    export = Export(trained, writers=trained.ranks.count)
    copies = (tensor.to("cpu", copy=True) for tensor in export.tensors())
    for file in export.own:
        own = list(islice(copies, len(file.tensors)))
        files[f"{folder}/{file.name}"] = PartContent(file.num_bytes, partial(_write_weights, file=file, own=own))
    for _ in copies:  # takes part in what the others gather
        pass
    factors = trained.factors()
    if rank:
        return files
    files |= {f"{folder}/{name}": bytes_file(content) for name, content in export.other_files.items()}
    if trained.adapters is not None:
        num_bytes = sum(matrix.nbytes for one in factors.values() for matrix in (one.a, one.b))
        files[ADAPTER_FOLDER] = PartContent(num_bytes, partial(trained.adapters.write, factors=factors))
    return files


def _write_weights(path: Path, *, file: WeightFile, own: list[Tensor]) -> None:
    write_file(path, file, iter(own))


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
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        content.write(target)
        written = [target] if target.is_file() else sorted(p for p in target.rglob("*") if p.is_file())
        sums |= {str(file.relative_to(folder)): seal(file) for file in written}
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


log = structlog.get_logger()

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run's folder."""
MANIFEST = "checkpoint.json"
PARTIAL = ".partial"
"""Suffix of the folder of an incomplete checkpoint."""
UNREADABLE = (OSError, ValueError, TypeError)
"""Errors raised on reading a damaged manifest."""
CHUNK_BYTES = 16 << 20

Sum = dict[str, Any]
"""Size `bytes` and checksum `xxh3` (64 bits, hexadecimal) of a file."""


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
            found = sum_of(path / name)
        except OSError as error:
            return f"{path / name}: {error}"
        if found != files[name]:
            return f"{path / name}: has {found}, but was written with {files[name]}"
    return ""


def seal(path: Path) -> Sum:
    """Flushes the file to disk and returns its checksum."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return sum_of(path)


def sum_of(path: Path) -> Sum:
    digest = xxhash.xxh3_64()
    num_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return {"bytes": num_bytes, "xxh3": digest.hexdigest()}


def write_manifest(path: Path, manifest: CheckpointManifest) -> None:
    """Writes or replaces the manifest, which makes the folder a complete checkpoint."""
    replace_file(path / MANIFEST, json.dumps(asdict(manifest), indent=1))
