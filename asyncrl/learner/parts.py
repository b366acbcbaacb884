"""What the processes put into a checkpoint: each writes its part in the background, and the sums of what it wrote."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.errors import AsyncrlError, PeerTimeoutError, RunError
from asyncrl.files import replace_file
from asyncrl.learner.checkpoint import Sum, seal
from asyncrl.learner.engine import TrainedModel
from asyncrl.learner.pretrained import write_model
from asyncrl.learner.state import collect_state

PARTS = ".parts"
"""Folder in an unfinished checkpoint with the sums of each process that has written its part."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Content:
    """What is to be written at one path of a checkpoint: a file, or a folder of files."""

    num_bytes: int
    """Of its tensors or data."""
    write: Callable[[Path], object]


Files = dict[str, Content]
"""Path in the checkpoint -> what it gets."""


def tensors_file(tensors: dict[str, Tensor]) -> Content:
    return Content(sum(tensor.nbytes for tensor in tensors.values()), partial(save_file, tensors))


def bytes_file(data: bytes) -> Content:
    return Content(len(data), lambda path: path.write_bytes(data))


def model_files(trained: TrainedModel, name: str, *, tokenizer: str) -> Files:
    """The model's training state in the folder `name`, and the model itself, with the tokenizer of the one at
    `tokenizer`, in Hugging Face format: `model` for the policy, `NAME_model` for another. Copied to the CPU; all
    ranks call it, and rank 0 gets the model."""
    rank = trained.ranks.rank
    files = {f"{name}/rank-{rank}.safetensors": tensors_file(collect_state(trained))}
    weights = trained.collect_weights()
    if rank == 0:
        num_bytes = sum(weight.nbytes for weight in weights.values())
        write = partial(write_model, model=trained.model, weights=weights, tokenizer=tokenizer)
        files["model" if name == "policy" else f"{name}_model"] = Content(num_bytes, write)
    return files


class PartWriter:
    """Writes the part of one process, a checkpoint at a time, in a thread of its own."""

    def __init__(self, name: str) -> None:
        """`name` tells this process from the others that write to the same checkpoint."""
        self.name = name
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    @property
    def busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def start(self, folder: Path, files: Files, *, then: Callable[[], None] | None = None) -> None:
        """Writes the files to `folder`, its sums last, then calls `then`. Call `wait` before the next."""
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
                    f"the checkpoint {folder} cannot be written: {error}; make room (checkpoint.keep_last and "
                    "checkpoint.keep_best say how many are kept), then go on with `asyncrl launch --resume`"
                ) from error

        self._running = self._executor.submit(work)

    def failure(self) -> AsyncrlError | None:
        """The error of the write that has ended, once. Raises what is none of the package's errors."""
        return self.wait() if self._running is not None and self._running.done() else None

    def wait(self) -> AsyncrlError | None:
        """Waits for the write under way; its error."""
        running, self._running = self._running, None
        error = running.exception() if running is not None else None
        if error is not None and not isinstance(error, AsyncrlError):
            raise error
        return error

    def ends(self, limit_s: float) -> bool:
        """Whether no write is under way, or it ends within the limit."""
        return self._running is None or not wait([self._running], limit_s).not_done

    def close(self, *, wait: bool = True) -> None:
        """Without `wait` a write under way goes on until the process ends."""
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
    """The sums of all files, by path, when all these processes have written their parts. Raises PeerTimeoutError
    naming those that have not within the time, and RunError when `cancelled`."""
    deadline_s = time.monotonic() + timeout_s
    paths = [folder / PARTS / f"{name}.json" for name in names]
    while missing := [path.stem for path in paths if not path.exists()]:
        if cancelled.wait(POLL_S):
            raise RunError(f"the checkpoint {folder} was given up: {', '.join(missing)} have not written their parts")
        if time.monotonic() > deadline_s:
            raise PeerTimeoutError(
                f"the checkpoint {folder} lacks the parts of {', '.join(missing)} after {timeout_s:g} s "
                "(launch.progress_timeout_s)"
            )
    return {path: entry for part in paths for path, entry in json.loads(part.read_text()).items()}
