"""The training state of a model by parameter name, independent of the ZeRO stage and the number of ranks.

Every rank has a fragment of each parameter's float32 weights and AdamW's moments: the complete tensor with stage 0, a
slice of the flattened parameter otherwise. Other optimizers, whose states have other shapes, have stage 0 only.
Frozen parameters have none. Parameters are assigned to ranks round robin; each rank assembles and writes the tensors of
its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from asyncrl.errors import RunError
from asyncrl.learner.model.engine import TrainedModel
from asyncrl.learner.model.lora import Adapters, trained_parameters
from asyncrl.learner.model.optimizers import STEP, first_state
from asyncrl.learner.model.partitioned_loading import read_range

WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter. Tensors are saved in float32 with the key `KIND/PARAMETER`; the kinds are `WEIGHT` and
the names in the optimizer's state. The number of updates has the key `STEP`, int64, in every file."""
WAY_OUT = "resume with the model.path, critic.path, learner.lora and learner.optimizer that the run began with"
SKIPPED = "skipped"
"""Key of the number of consecutive skipped updates, int64; in every file, except those of older checkpoints."""
BASE = "base"
"""Key of the fingerprint of the weights that adapters change, uint8; in every file of adapters."""


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
        _check_names(folder, set(where) - {STEP, SKIPPED, BASE}, kinds)
        if trained.adapters is not None and not torch.equal(where[BASE].get_tensor(BASE), _base_of(trained.adapters)):
            raise RunError(
                f"the checkpoint {folder.parent}: its adapters belong to other weights than those that are in "
                f"model.path now; {WAY_OUT}"
            )
        for name, parameter in parameters.items():
            for kind in kinds[name]:
                file, key = where[f"{kind}/{name}"], f"{kind}/{name}"
                _check_shape(folder, name, file.get_slice(key).get_shape(), _shape(trained, parameter, kind))
                for fragment, start in _fragments(trained, parameter, kind):
                    fragment.copy_(read_range(file, key, start, start + len(fragment)))
        updates = where[STEP].get_tensor(STEP)
        trained.skipped = int(where[SKIPPED].get_tensor(SKIPPED)) if SKIPPED in where else 0
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
    """Returns the kinds of tensors that are saved for the parameter."""
    if trained.sharded:
        return [WEIGHT, *MOMENTS]
    return [WEIGHT, *(name for name in trained.optimizer.state[parameter] if name != STEP)]


def _shape(trained: TrainedModel, parameter: Any, kind: str) -> torch.Size:
    """Returns the shape of the complete tensor."""
    if trained.sharded or kind == WEIGHT:
        return getattr(parameter, "ds_shape", parameter.shape)
    return trained.optimizer.state[parameter][kind].shape


def _fragments(trained: TrainedModel, parameter: Any, kind: str) -> Iterator[tuple[Tensor, int]]:
    """Yields this rank's fragment of the flattened parameter, float32, and its offset, if it has a fragment."""
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
    """Updates the weights that the model computes with from the float32 weights."""
    optimizer: Any = trained.engine.optimizer
    if trained.partitioned:
        optimizer._partition_all_parameters()
        for index in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    elif trained.sharded:
        optimizer.update_lp_params()


def _check_names(folder: Path, keys: set[str], kinds: dict[str, list[str]]) -> None:
    wanted = {f"{kind}/{name}" for name, own in kinds.items() for kind in own}
    if keys != wanted:
        key = min(keys ^ wanted)
        raise RunError(
            f"{folder}: {'holds' if key in keys else 'lacks'} {key}, unlike the model of this run; {WAY_OUT}"
        )


def _check_shape(folder: Path, name: str, saved: list[int], shape: torch.Size) -> None:
    if saved != list(shape):
        raise RunError(f"{folder}: {name} has shape {saved}, but {list(shape)} in the model of this run; {WAY_OUT}")
