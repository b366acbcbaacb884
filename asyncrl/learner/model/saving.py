"""What is saved of a model: its weights in Hugging Face format, and its training state.

Weights: each rank writes files with complete tensors, an equal part of the model. It gets the other ranks' parts a few
at a time, so that no process has the complete model. No two ranks write to one file: network file systems do not keep
the bytes of several writers apart within a page, and a rank can compute the checksums of its own files.

Training state: it goes by parameter name, independent of the ZeRO stage and the number of ranks. Every rank has a
fragment of each parameter's float32 weights and AdamW's moments: the complete tensor with stage 0, a slice of the
flattened parameter otherwise. Other optimizers, whose states have other shapes, have stage 0 only. Frozen parameters
have none. Parameters are assigned to ranks round robin; each rank writes the tensors of its parameters.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.errors import RunError
from asyncrl.learner.checkpoint import Files, bytes_file, tensors_file
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model.engine import STEP, TrainedModel, first_state
from asyncrl.learner.model.loading import read_range
from asyncrl.learner.model.lora import Adapters, trained_parameters
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
WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter. Tensors are saved in float32 with the key `KIND/PARAMETER`; the kinds are `WEIGHT` and
the names in the optimizer's state. The number of updates has the key `STEP`, int64, in every file."""
HINT = "resume with the model.path, critic.path, learner.lora and learner.optimizer that the run began with"
SKIPPED = "skipped"
"""Key of the number of consecutive skipped updates, int64; in every file."""
BASE = "base"
"""Key of the fingerprint of the weights that adapters change, uint8; in every file of adapters."""


def save_model(trained: TrainedModel, folder: Path) -> None:
    """Writes the model to `folder`, and adapters to the folder `adapter` next to it. They are replaced only when the
    new files are complete. Rank 0 alone writes unless all ranks see its folder. All ranks call it. Raises RunError on
    all of them if it cannot be written."""
    ranks, partial = trained.ranks, folder.with_name(f"{folder.name}.partial")
    factors = trained.factors()

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

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

    ranks.raise_on_all_ranks(_problem(folder, begin, when=ranks.rank == 0))
    export = Export(trained, writers=ranks.count if _is_shared(partial, ranks) else 1)
    tensors = export.tensors()
    error = _problem(folder, write)
    for _ in tensors:  # takes part in what the others gather, even if its own files cannot be written
        pass
    ranks.raise_on_all_ranks(error)
    ranks.raise_on_all_ranks(_problem(folder, complete, when=ranks.rank == 0))


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
        files[f"{folder}/{file.name}"] = lambda path, file=file, own=own: write_file(path, file, iter(own))
    for _ in copies:  # takes part in what the others gather
        pass
    factors = trained.factors()
    if rank:
        return files
    files |= {f"{folder}/{name}": bytes_file(content) for name, content in export.other_files.items()}
    if trained.adapters is not None:
        files[ADAPTER_FOLDER] = partial(trained.adapters.write, factors=factors)
    return files


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


def _problem(folder: Path, act: Callable[[], object], *, when: bool = True) -> RunError | None:
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


@torch.no_grad()
def collect_state(trained: TrainedModel) -> dict[str, Tensor]:
    """Returns this rank's part of the training state, copied to the CPU. All ranks call it."""
    ranks = trained.ranks
    flats = _prepare(trained)
    states = [trained.optimizer.state[flat] for flat in flats]
    updates = max(int(state[STEP]) for state in states if STEP in state)
    share = {STEP: torch.tensor(updates), SKIPPED: torch.tensor(trained.skipped)}
    if trained.adapters is not None:
        share[BASE] = _base_of(trained.adapters)
    for index, (name, parameter) in enumerate(trained_parameters(trained.model)):
        owner = index % ranks.count
        for kind in _kinds(trained, parameter):
            full = _assemble(trained, parameter, kind, owner)
            if ranks.rank == owner:
                share[f"{kind}/{name}"] = full.to("cpu", copy=True)
    return share


@torch.no_grad()
def restore_state(trained: TrainedModel, folder: Path) -> None:
    """Loads the state that any number of ranks wrote to `folder`. All ranks call it.

    Raises RunError, the same on all ranks, if it is the state of another model.
    """
    flats = _prepare(trained)
    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(path, "pt")) for path in sorted(folder.glob("rank-*.safetensors"))]
        where = {key: file for file in files for key in file.keys()}  # noqa: SIM118 (it is no dict)
        parameters = dict(trained_parameters(trained.model))
        kinds = {name: _kinds(trained, parameter) for name, parameter in parameters.items()}
        keys, wanted = (
            set(where) - {STEP, BASE},
            {SKIPPED, *(f"{kind}/{name}" for name in kinds for kind in kinds[name])},
        )
        if keys != wanted:
            key = min(keys ^ wanted)
            what = "holds" if key in keys else "lacks"
            raise RunError(f"{folder}: {what} {key}, unlike the model of this run; {HINT}")
        if trained.adapters is not None and not torch.equal(where[BASE].get_tensor(BASE), _base_of(trained.adapters)):
            raise RunError(
                f"the checkpoint {folder.parent}: its adapters belong to other weights than those that are in "
                f"model.path now; {HINT}"
            )
        for name, parameter in parameters.items():
            for kind in kinds[name]:
                file, key = where[f"{kind}/{name}"], f"{kind}/{name}"
                saved, shape = file.get_slice(key).get_shape(), list(_shape(trained, parameter, kind))
                if saved != shape:
                    raise RunError(f"{folder}: {name} has shape {saved}, but {shape} in the model of this run; {HINT}")
                for fragment, start in _fragments(trained, parameter, kind):
                    fragment.copy_(read_range(file, key, start, start + len(fragment)))
        updates = where[STEP].get_tensor(STEP)
        trained.skipped = int(where[SKIPPED].get_tensor(SKIPPED))
    for flat in flats:
        if STEP in (state := trained.optimizer.state[flat]):
            state[STEP].fill_(int(updates))
    _refresh(trained)


def _base_of(adapters: Adapters) -> Tensor:
    return torch.tensor(list(bytes.fromhex(adapters.base)), dtype=torch.uint8)


def random_state() -> dict[str, Tensor]:
    """Returns the states of this process's random number generators, uint8."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def restore_random_state(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def seed_random_state(*entropy: int) -> None:
    """Seeds this process's random number generators with these numbers together."""
    (seed,) = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
    torch.manual_seed(int(seed))


def _prepare(trained: TrainedModel) -> list[Tensor]:
    """Returns the tensors that the optimizer updates on this rank. Creates their state, which it otherwise creates in
    its first update."""
    optimizer: Any = trained.engine.optimizer
    flats = trained.flat_weights()
    for flat in flats:
        state = trained.optimizer.state[flat]
        if not state:
            state.update(first_state(trained.optimizer, flat))
    if trained.sharded and not trained.partitioned:
        optimizer._lazy_init_hp_params_optimizer_state()
    return flats


def _kinds(trained: TrainedModel, parameter: Any) -> list[str]:
    if trained.sharded:
        return [WEIGHT, *MOMENTS]
    return [WEIGHT, *(name for name in trained.optimizer.state[parameter] if name != STEP)]


def _shape(trained: TrainedModel, parameter: Any, kind: str) -> torch.Size:
    if trained.sharded or kind == WEIGHT:
        return getattr(parameter, "ds_shape", parameter.shape)
    return trained.optimizer.state[parameter][kind].shape


def _fragments(trained: TrainedModel, parameter: Any, kind: str) -> Iterator[tuple[Tensor, int]]:
    key = None if kind == WEIGHT else kind
    optimizer: Any = trained.engine.optimizer
    if trained.partitioned:
        padded, _ = optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=False, optim_state_key=key)
        start = len(padded) * trained.ranks.rank
        if start < parameter.ds_numel:
            yield padded[: parameter.ds_numel - start], start
    elif trained.sharded:
        if (mapping := parameter._hp_mapping) is not None:
            yield mapping.get_hp_fragment(key), mapping.lp_fragment_address.start
    else:
        tensor = parameter.detach() if key is None else trained.optimizer.state[parameter][key]
        yield tensor.view(-1), 0


def _assemble(trained: TrainedModel, parameter: Any, kind: str, owner: int) -> Tensor:
    """Returns the complete tensor on rank `owner`; undefined on other ranks."""
    shape = _shape(trained, parameter, kind)
    fragments = list(_fragments(trained, parameter, kind))
    if not trained.sharded:
        return fragments[0][0].view(shape)
    full = torch.zeros(shape.numel(), dtype=torch.float32, device=trained.ranks.device)
    for fragment, start in fragments:
        full[start : start + len(fragment)] = fragment
    if trained.ranks.count > 1:
        # The sum over int32 bits, which are zero on all ranks but one, preserves every value, including -0.0.
        dist.reduce(full.view(torch.int32), owner)
    return full.view(shape)


def _refresh(trained: TrainedModel) -> None:
    optimizer: Any = trained.engine.optimizer
    if trained.partitioned:
        optimizer._partition_all_parameters()
        for index in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    elif trained.sharded:
        optimizer.update_lp_params()
