"""The places of a checkpoint's tensors in the parameters of its model, and the part of them that each rank has.

A model may have several tensors of its checkpoint in one parameter: all experts of a layer, or query, key and value.
The library converts them while it loads and saves. Run without memory, with views in place of copies, its conversion
tells where each tensor is, so that nothing has to be gathered or copied to load, send or write one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.loading_report import LoadStateDictInfo

from asyncrl.errors import ConfigError, InvariantError
from asyncrl.weights.shares import slice_of

ROWS = 4096
"""Rows of two tensors that are compared at a time."""


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor of a checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parameter: str
    """Name of the model's parameter that has its elements."""
    start: int
    """Its first element in the flat parameter; the others follow."""

    @property
    def num_elements(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    def of(self, parameter: Tensor) -> Tensor:
        """Returns the tensor, as a view of the parameter."""
        return parameter.view(-1)[self.start : self.start + self.num_elements].view(self.shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor of the checkpoint that a rank has."""

    tensor: CheckpointTensor
    begin: int
    end: int
    """Its elements in the flat tensor, from `begin` to before `end`."""
    at: int
    """Its first element in what the rank has of the parameter (`slice_of`)."""


def meta_model(path: str, *, trust_remote_code: bool) -> PreTrainedModel:
    """Returns the model at `path` without weights or memory for them."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def checkpoint_tensors(
    model: PreTrainedModel, parameters: dict[str, Tensor] | None = None
) -> list[CheckpointTensor] | None:
    """Returns the tensors of the checkpoint of a `meta_model`, or of one with these `parameters` on the meta device,
    tied ones once; None if the library computes some of them from the parameters, so that they are no part of one."""
    parameters = parameters or {name: parameter.detach() for name, parameter in model.named_parameters()}
    owners = {parameter.untyped_storage()._cdata: name for name, parameter in parameters.items()}
    with torch.no_grad(), _Views():
        converted = revert_weight_conversion(model, parameters)
    tensors: list[CheckpointTensor] = []
    for name, tensor in converted.items():
        owner = owners.get(tensor.untyped_storage()._cdata)
        if owner is None or not tensor.is_contiguous():
            return None
        tensors.append(CheckpointTensor(name, tensor.dtype, tuple(tensor.shape), owner, int(tensor.storage_offset())))
    elements = sum(tensor.num_elements for tensor in tensors)
    if elements != (wanted := sum(parameter.numel() for parameter in parameters.values())):
        raise InvariantError(f"tensors of the checkpoint: {elements} elements, the model's parameters have {wanted}")
    return tensors


def unexpected_tensors(model: PreTrainedModel, expected: Iterable[CheckpointTensor], names: Iterable[str]) -> set[str]:
    """Returns the names in a folder that the model does not use: not `expected`, not tied to one of these,
    and not among those that the library leaves out on purpose."""
    known = {tensor.name for tensor in expected} | model.get_expanded_tied_weights_keys(all_submodels=True).keys()
    known |= {name for name, _ in model.named_buffers()}
    info = LoadStateDictInfo(set(), set(names) - known, set(), [], {}, set())
    model._adjust_missing_and_unexpected_keys(info)
    return info.unexpected_keys


def check_tied(model: PreTrainedModel, files: dict[str, Path], what: str) -> None:
    """Raises ConfigError if the config of the model, in full or a `meta_model`, ties two parameters that have different
    values in the folder's files. Learners and engines follow the config alone, so that all have the same parameters,
    where the library would follow the folder. `what` names the folder in the error."""
    for name, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if name in files and source in files and not _are_equal(files[name], name, files[source], source):
            raise ConfigError(
                f"{what}: config.json says that {name} is tied to {source} (tie_word_embeddings), but the folder has "
                "other values for it; set tie_word_embeddings to false in config.json to train both, or remove "
                f"{name} from {files[name].name}"
            )


def _are_equal(file: Path, name: str, other_file: Path, other_name: str) -> bool:
    with safe_open(file, "pt") as opened, safe_open(other_file, "pt") as other_opened:
        one, other = opened.get_slice(name), other_opened.get_slice(other_name)
        if one.get_shape() != other.get_shape() or one.get_dtype() != other.get_dtype():
            return False
        rows = one.get_shape()[0]
        return all(torch.equal(one[at : at + ROWS], other[at : at + ROWS]) for at in range(0, rows, ROWS))


def pieces(
    tensors: Sequence[CheckpointTensor], parameters: dict[str, int], *, stage: int, rank: int, ranks: int
) -> list[Piece]:
    """Returns what the rank has of the tensors. `parameters` are the numbers of elements of the model's parameters. In
    ZeRO stages 0 to 2 each rank has everything."""
    found: list[Piece] = []
    for tensor in tensors:
        count = parameters[tensor.parameter]
        first, last = slice_of(count, rank, ranks) if stage == 3 else (0, count)
        begin, end = max(first - tensor.start, 0), min(last - tensor.start, tensor.num_elements)
        if begin < end:
            found.append(Piece(tensor, begin, end, tensor.start + begin - first))
    return found


class _Views(TorchDispatchMode):
    """Answers requests for a copy with a view."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))
