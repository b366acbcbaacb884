"""The saved files of a model: its weights in Hugging Face format, and its training state.

Weights: rank 0 collects them in host memory and writes them.

Training state: tensors have the names of parameters, independent of the ZeRO stage and the number of ranks. Every rank
has a fragment of each parameter's float32 weights and AdamW's moments: the complete tensor with stage 0, a slice of the
flattened parameter otherwise. Frozen parameters have no state. Parameters are assigned to ranks round robin; each rank
writes the tensors of its parameters.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.errors import RunError
from asyncrl.learner.checkpoint import Files
from asyncrl.learner.model.engine import STEP, TrainedModel, first_state
from asyncrl.learner.model.loading import read_range
from asyncrl.learner.model.lora import Adapters, trained_parameters
from asyncrl.util.files import INDEX

log = structlog.get_logger()
ADAPTER_FOLDER = "adapter"
"""Folder of adapters in peft's format, next to the folder of the merged model."""
WEIGHT = "weight"
KINDS = (WEIGHT, "exp_avg", "exp_avg_sq")
"""A parameter's float32 weights and AdamW's moments, under the key `KIND/PARAMETER`. The number of updates has the key
`STEP`, int64, in every file."""
HINT = "resume with the model.path, critic.path and learner.lora that the run began with"
SKIPPED = "skipped"
"""Key of the number of consecutive skipped updates, int64; in every file."""
BASE = "base"
"""Key of the fingerprint of the weights that adapters change, uint8; in every file of adapters."""


def save_model(trained: TrainedModel, folder: Path) -> None:
    """Writes the model to `folder`, and adapters to the folder `adapter` next to it. They are replaced only when the
    new files are complete. All ranks call it; rank 0 writes. Raises RunError on all of them if it cannot be written."""
    error = None
    for name, write in exported_files(trained, folder.name).items():
        try:
            _replace(folder.with_name(name), write)
        except (OSError, SafetensorError) as problem:
            error = RunError(f"the model cannot be written to {folder}: {problem}; free disk space or mend the folder")
            break
    trained.ranks.raise_on_all_ranks(error)


def _replace(folder: Path, write: Callable[[Path], object]) -> None:
    unfinished, former = (folder.with_name(f"{folder.name}.{suffix}") for suffix in ("partial", "former"))
    shutil.rmtree(unfinished, ignore_errors=True)
    write(unfinished)
    shutil.rmtree(former, ignore_errors=True)
    if folder.exists():
        folder.rename(former)
    unfinished.rename(folder)
    shutil.rmtree(former, ignore_errors=True)
    log.info("model saved", path=str(folder))


def exported_files(trained: TrainedModel, name: str) -> Files:
    """Returns the writers of the model in Hugging Face format, as the folder `name`, and of adapters in peft's format,
    as the folder `adapter`, on rank 0. The tensors are copied to the CPU. All ranks call it."""
    weights, factors = trained.collect_weights(), trained.factors()
    if trained.ranks.rank:
        return {}
    files: Files = {name: partial(_write_model, revert_weight_conversion(trained.model, weights), trained.other_files)}
    if trained.adapters is not None:
        files[ADAPTER_FOLDER] = partial(trained.adapters.write, factors=factors)
    return files


def _write_model(tensors: dict[str, Tensor], others: dict[str, bytes], folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, content in others.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    # On the meta device, where parts of one parameter do not count as one tensor.
    split = split_torch_state_dict_into_shards({name: tensor.to("meta") for name, tensor in tensors.items()})
    for name, parts in split.filename_to_tensors.items():
        save_file({part: tensors[part].contiguous() for part in parts}, folder / name, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2))


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
        for kind in KINDS:
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
        keys = set(where) - {STEP, BASE}
        expected = {SKIPPED, *(f"{kind}/{name}" for name in parameters for kind in KINDS)}
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
            for kind in KINDS:
                file, key = where[f"{kind}/{name}"], f"{kind}/{name}"
                saved, shape = file.get_slice(key).get_shape(), list(_shape(parameter))
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


def _shape(parameter: Any) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


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
    shape = _shape(parameter)
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
