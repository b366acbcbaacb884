"""The saved files of a model: its weights in Hugging Face format, and its training state.

Weights: each rank writes files with complete tensors, an equal part of the model. It gathers the other ranks' slices a
few at a time, so that no process has the complete model.

Training state: tensors have the names of parameters, independent of the ZeRO stage and the number of ranks. Every rank
has a fragment of each parameter's float32 weights and AdamW's moments: the complete tensor with stage 0, a slice of the
flattened parameter otherwise. Other optimizers, whose states have other shapes, have stage 0 only. Frozen parameters
have no state. Parameters are assigned to ranks round robin; each rank writes the tensors of its parameters.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.errors import RunError
from asyncrl.learner.checkpoint import Files, bytes_file, tensors_file
from asyncrl.learner.model.engine import STEP, TrainedModel, first_state
from asyncrl.learner.model.loading import read_range
from asyncrl.learner.model.lora import Adapters, trained_parameters
from asyncrl.util.files import INDEX, SINGLE
from asyncrl.weights.model_tensors import CheckpointTensor, checkpoint_tensors

log = structlog.get_logger()
ADAPTER_FOLDER = "adapter"
"""Folder of adapters in peft's format, next to the folder of the merged model."""
MIN_SHARE_BYTES = 64 << 20
"""Fewer ranks write a model of which each would have less than this."""
FILE_BYTES = 5 << 30
"""Maximum size of a file, unless one tensor is larger."""
WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter. Tensors are saved in float32 with the key `KIND/PARAMETER`; the kinds are `WEIGHT` and
the names in the optimizer's state. The number of updates has the key `STEP`, int64, in every file."""
HINT = "resume with the model.path, critic.path and learner.lora that the run began with"
SKIPPED = "skipped"
"""Key of the number of consecutive skipped updates, int64; in every file."""
BASE = "base"
"""Key of the fingerprint of the weights that adapters change, uint8; in every file of adapters."""


def save_model(trained: TrainedModel, folder: Path) -> None:
    """Writes the model to `folder`, and adapters to the folder `adapter` next to it. They are replaced only when the
    new files are complete. All ranks call it, and share the folder. Raises RunError on all of them if it cannot be
    written."""
    ranks, unfinished = trained.ranks, folder.with_name(f"{folder.name}.partial")
    factors, plan = trained.factors(), plan_files(trained)

    def begin() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)

    def complete() -> None:
        for name, content in _other_files(trained, plan).items():
            (unfinished / name).parent.mkdir(exist_ok=True)
            (unfinished / name).write_bytes(content)
        _replace(folder, unfinished)
        if trained.adapters is not None:
            trained.adapters.write(adapter := folder.with_name(f"{ADAPTER_FOLDER}.partial"), factors)
            _replace(folder.with_name(ADAPTER_FOLDER), adapter)

    ranks.raise_on_all_ranks(_problem(folder, begin) if ranks.rank == 0 else None)
    error = None
    for name, tensors in own_files(trained, plan):  # to the end: the other ranks gather with this one
        error = error or _problem(folder, partial(tensors_file(tensors), unfinished / name))
    ranks.raise_on_all_ranks(error)
    ranks.raise_on_all_ranks(_problem(folder, complete) if ranks.rank == 0 else None)


def _problem(folder: Path, act: Callable[[], object]) -> RunError | None:
    try:
        act()
    except (OSError, SafetensorError) as error:
        return RunError(f"the model cannot be written to {folder}: {error}; free disk space or mend the folder")
    return None


def _replace(folder: Path, unfinished: Path) -> None:
    former = folder.with_name(f"{folder.name}.former")
    shutil.rmtree(former, ignore_errors=True)
    if folder.exists():
        folder.rename(former)
    unfinished.rename(folder)
    shutil.rmtree(former, ignore_errors=True)
    log.info("model saved", path=str(folder))


def model_files(trained: TrainedModel, name: str) -> Files:
    """Returns the checkpoint files of a model that this rank writes: its part of the training state in the folder
    `name`; its part of the model in Hugging Face format, in the folder `model` for the policy and `NAME_model`
    otherwise, on rank 0 with the files other than weights; and on rank 0 adapters in peft's format in the folder
    `adapter`. Tensors are copied to the CPU. All ranks call it."""
    rank, plan = trained.ranks.rank, plan_files(trained)
    files = {f"{name}/rank-{rank}.safetensors": tensors_file(collect_state(trained))}
    folder = "model" if name == "policy" else f"{name}_model"
    files |= {f"{folder}/{file}": tensors_file(tensors) for file, tensors in own_files(trained, plan)}
    factors = trained.factors()
    if rank:
        return files
    files |= {f"{folder}/{file}": bytes_file(content) for file, content in _other_files(trained, plan).items()}
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
        return sum(map(_num_bytes, self.tensors))


def plan_files(trained: TrainedModel) -> list[WeightFile]:
    """Returns the files of the model's weights; none if the library computes some tensors of its folder, so that rank 0
    has to collect the complete model."""
    meta = {name: torch.empty(shape, dtype=dtype, device="meta") for name, dtype, shape in trained.shapes()}
    tensors = checkpoint_tensors(trained.model, meta)
    if tensors is None:
        log.warning("rank 0 collects the complete model, since the library computes tensors of its folder")
        return []
    order = {name: index for index, name in enumerate(meta)}
    return weight_files(
        sorted(tensors, key=lambda tensor: (order[tensor.parameter], tensor.start)), trained.ranks.count
    )


def weight_files(tensors: Sequence[CheckpointTensor], writers: int) -> list[WeightFile]:
    """Returns the files of these tensors: of each writer, those that begin in its equal part of the bytes."""
    total = sum(map(_num_bytes, tensors))
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
        WeightFile(f"{stem}-{number:05d}-of-{len(groups):05d}.{suffix}", rank, tuple(group))
        for number, (rank, group) in enumerate(groups, 1)
    ]


def _num_bytes(tensor: CheckpointTensor) -> int:
    return tensor.num_elements * tensor.dtype.itemsize


def own_files(trained: TrainedModel, plan: list[WeightFile]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yields name and tensors, on the CPU, of each weight file that this rank writes. All ranks iterate to the end."""
    rank = trained.ranks.rank
    if not plan:
        weights = trained.collect_weights()
        if rank == 0:
            converted = revert_weight_conversion(trained.model, weights)
            yield SINGLE, {name: tensor.contiguous() for name, tensor in converted.items()}
        return
    files = [file for file in plan if file.rank == rank]
    parts: dict[str, list[CheckpointTensor]] = {}
    for tensor in (tensor for file in files for tensor in file.tensors):
        parts.setdefault(tensor.parameter, []).append(tensor)
    pending, tensors = iter(files), dict[str, Tensor]()
    file = next(pending, None)
    for name, weight in trained.weights(parts):
        for tensor in parts[name]:
            tensors[tensor.name] = tensor.of(weight).to("cpu", copy=True)
            if file is not None and len(tensors) == len(file.tensors):
                yield file.name, tensors
                file, tensors = next(pending, None), {}


def _other_files(trained: TrainedModel, plan: list[WeightFile]) -> dict[str, bytes]:
    """Returns the contents of the files other than weights, by path in the model's folder; on rank 0."""
    if len(plan) < 2:
        return trained.other_files
    index = {
        "metadata": {
            "total_parameters": sum(tensor.num_elements for file in plan for tensor in file.tensors),
            "total_size": sum(file.num_bytes for file in plan),
        },
        "weight_map": {tensor.name: file.name for file in plan for tensor in file.tensors},
    }
    return trained.other_files | {INDEX: (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()}


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
        keys = set(where) - {STEP, BASE}
        expected = {SKIPPED, *(f"{kind}/{name}" for name in kinds for kind in kinds[name])}
        if keys != expected:
            key = min(keys ^ expected)
            raise RunError(
                f"{folder}: {'holds' if key in keys else 'lacks'} {key}, unlike the model of this run; {HINT}"
            )
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
            state.update(first_state(flat))
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
