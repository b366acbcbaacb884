"""Writes models in Hugging Face format, all ranks together.

Each rank writes files with complete tensors, an equal part of the model. It gets the other ranks' parts of the weights
a few at a time, so that no process has the complete model. No two ranks write to one file: network file systems do not
keep the bytes of several writers apart within a page, and a rank can compute the checksums of its own files.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.errors import RunError
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model.engine import TrainedModel
from asyncrl.util.files import INDEX, SINGLE
from asyncrl.weights.layout import Entry
from asyncrl.weights.model_tensors import CheckpointTensor, checkpoint_tensors
from asyncrl.weights.version_store import header

log = structlog.get_logger()

ADAPTER_FOLDER = "adapter"
"""Folder of adapters in peft's format, next to that of the merged model."""
MIN_SHARE_BYTES = 64 << 20
"""Fewer ranks write a model of which each would have less than this."""
FILE_BYTES = 5 << 30
"""Maximum size of a file, unless one tensor is larger."""
SEEN_S = 3.0
"""Time in which a file of rank 0 appears on the other ranks of a shared file system."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file of weights."""

    name: str
    rank: int
    """The rank that writes it."""
    tensors: tuple[CheckpointTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its tensors."""
        return sum(_num_bytes(tensor) for tensor in self.tensors)


class Export:
    """The files of a model's weights, of which each rank writes some. All ranks make it."""

    def __init__(self, trained: TrainedModel, *, writers: int) -> None:
        """The first `writers` ranks write."""
        self._trained = trained
        self._converted: list[Tensor] | None = None
        """All tensors, if the library computes some of them; on rank 0."""
        meta = {name: torch.empty(shape, dtype=dtype, device="meta") for name, dtype, shape in trained.shapes()}
        tensors = checkpoint_tensors(trained.model, meta)
        if tensors is None:
            log.warning("rank 0 collects the complete model, since the library computes tensors of its folder")
            converted = revert_weight_conversion(trained.model, trained.collect_weights())
            self._converted = list(converted.values())
            tensors = [CheckpointTensor(name, one.dtype, tuple(one.shape), name, 0) for name, one in converted.items()]
            self.files = [WeightFile(SINGLE, 0, tuple(tensors))]
        else:
            order = {name: index for index, name in enumerate(meta)}
            tensors.sort(key=lambda tensor: (order[tensor.parameter], tensor.start))
            self.files = weight_files(tensors, writers)

    @property
    def own(self) -> list[WeightFile]:
        """The files that this rank writes."""
        return [file for file in self.files if file.rank == self._trained.ranks.rank]

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors of this rank's files, in their order. Each is valid until the next one is requested. All
        ranks iterate to the end."""
        if self._converted is not None:
            yield from self._converted
            return
        parts: dict[str, list[CheckpointTensor]] = {}
        for tensor in (tensor for file in self.own for tensor in file.tensors):
            parts.setdefault(tensor.parameter, []).append(tensor)
        for name, weight in self._trained.weights(parts):
            for tensor in parts[name]:
                yield tensor.of(weight)

    @property
    def other_files(self) -> dict[str, bytes]:
        """Contents of the files other than weights, by path in the model's folder; on rank 0."""
        index = {} if [file.name for file in self.files] == [SINGLE] else {INDEX: _index(self.files)}
        return self._trained.other_files | index


def weight_files(tensors: Sequence[CheckpointTensor], writers: int) -> list[WeightFile]:
    """Returns the files of these tensors: of each writer, those that begin in its equal part of the bytes."""
    total = sum(_num_bytes(tensor) for tensor in tensors)
    writers = min(writers, max(total // MIN_SHARE_BYTES, 1))
    groups: list[tuple[int, list[CheckpointTensor]]] = []
    begin = size = 0
    for tensor in tensors:
        rank = begin * writers // total
        if not groups or groups[-1][0] != rank or size + _num_bytes(tensor) > FILE_BYTES:
            groups.append((rank, []))
            size = 0
        groups[-1][1].append(tensor)
        begin, size = begin + _num_bytes(tensor), size + _num_bytes(tensor)
    if len(groups) == 1:
        return [WeightFile(SINGLE, 0, tuple(tensors))]
    stem, suffix = SINGLE.split(".", 1)
    return [
        WeightFile(f"{stem}-{number:05d}-of-{len(groups):05d}.{suffix}", rank, tuple(own))
        for number, (rank, own) in enumerate(groups, 1)
    ]


def write_file(path: Path, file: WeightFile, contents: Iterator[Tensor]) -> None:
    """Writes a file with the next tensors of `contents`. Raises OSError."""
    # The largest elements first, as the format's own library does: each tensor is at a multiple of their size.
    order = sorted(file.tensors, key=lambda tensor: -tensor.dtype.itemsize)
    head = header(tuple(Entry(tensor.name, tensor.dtype, tensor.shape, 0) for tensor in order))
    places: dict[str, int] = {}
    end = len(head)
    for tensor in order:
        places[tensor.name], end = end, end + _num_bytes(tensor)
    with path.open("wb") as target:
        target.write(head)
        for tensor, content in zip(file.tensors, contents, strict=False):
            target.seek(places[tensor.name])
            target.write(content.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def save_model(trained: TrainedModel, folder: Path) -> None:
    """Writes the model to `folder`, and adapters to the folder `adapter` next to it. They are replaced only when the
    new files are complete. Rank 0 alone writes unless all ranks see its folder. All ranks call it. Raises RunError on
    all of them if it cannot be written."""
    ranks, partial = trained.ranks, folder.with_name(f"{folder.name}.partial")
    factors = trained.factors()

    def write() -> None:
        for file in export.own:
            write_file(partial / file.name, file, tensors)

    def complete() -> None:
        for name, content in export.other_files.items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(content)
        _replace(folder, partial)
        if trained.adapters is not None:
            trained.adapters.write(adapter := folder.with_name(f"{ADAPTER_FOLDER}.partial"), factors)
            _replace(folder.with_name(ADAPTER_FOLDER), adapter)

    ranks.raise_on_all_ranks(_problem(folder, lambda: _empty(partial), when=ranks.rank == 0))
    export = Export(trained, writers=ranks.count if _is_shared(partial, ranks) else 1)
    tensors = export.tensors()
    error = _problem(folder, write)
    for _ in tensors:  # takes part in what the others gather, even if its own files cannot be written
        pass
    ranks.raise_on_all_ranks(error)
    ranks.raise_on_all_ranks(_problem(folder, complete, when=ranks.rank == 0))


def _problem(folder: Path, act: Callable[[], object], *, when: bool = True) -> RunError | None:
    """Calls `act`. Returns the error if it cannot write."""
    try:
        if when:
            act()
    except OSError as error:
        return RunError(f"the model cannot be written to {folder}: {error}; free disk space or mend the folder")
    return None


def _is_shared(folder: Path, ranks: Ranks) -> bool:
    """True if all ranks see the folder that rank 0 made. All ranks call it."""
    if ranks.count == 1:
        return True
    number = int(ranks.sum(torch.tensor([0 if ranks.rank else secrets.randbits(62)])))
    mark = folder / f".{number:x}"
    ranks.raise_on_all_ranks(_problem(folder, mark.touch, when=ranks.rank == 0))
    deadline_s = time.monotonic() + SEEN_S
    while not (seen := mark.exists()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    shared = not ranks.any(not seen)
    if ranks.rank == 0:
        mark.unlink()
    return shared


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _replace(folder: Path, partial: Path) -> None:
    former = folder.with_name(f"{folder.name}.former")
    shutil.rmtree(former, ignore_errors=True)
    if folder.exists():
        folder.rename(former)
    partial.rename(folder)
    shutil.rmtree(former, ignore_errors=True)
    log.info("model saved", path=str(folder))


def _num_bytes(tensor: CheckpointTensor) -> int:
    return tensor.num_elements * tensor.dtype.itemsize


def _index(files: Sequence[WeightFile]) -> bytes:
    totals = {
        "total_parameters": sum(tensor.num_elements for file in files for tensor in file.tensors),
        "total_size": sum(file.num_bytes for file in files),
    }
    places = {tensor.name: file.name for file in files for tensor in file.tensors}
    return (json.dumps({"metadata": totals, "weight_map": places}, indent=2, sort_keys=True) + "\n").encode()
