"""The places of a checkpoint's tensors in the parameters of its model, and the part of them that each rank has.

A model may have several tensors of its checkpoint in one parameter: all experts of a layer, or query, key and value.
The library converts them while it loads and saves. Run without memory, with views in place of copies, its conversion
tells where each tensor is, so that nothing has to be gathered or copied to load, send or write one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.loading_report import LoadStateDictInfo

from asyncrl.config.training import Lora
from asyncrl.errors import ConfigError, InvariantError
from asyncrl.util.files import read_tensor_descriptions
from asyncrl.weights.layout import slice_of

if TYPE_CHECKING:
    from peft import LoraConfig

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


SAMPLE_BYTES = 4096
"""Bytes of each tensor, in its middle and at its end, that are part of the fingerprint."""


def fingerprint_of(folder: str) -> str:
    """Returns a hash of the weights in the safetensors files of a folder: of the name, dtype and shape of each tensor,
    and of samples of its bytes, so that it takes milliseconds. It does not depend on how tensors are divided into
    files."""
    tensors: list[tuple[str, str, bytes]] = []
    for path in sorted(Path(folder).glob("*.safetensors")):
        described = read_tensor_descriptions(path)
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            for name, tensor in described.items():
                begin, end = (start + offset for offset in tensor["data_offsets"])
                sample = b""
                for at in (begin + (end - begin) // 2, max(begin, end - SAMPLE_BYTES)):
                    file.seek(at)
                    sample += file.read(min(SAMPLE_BYTES, end - at))
                tensors.append((name, json.dumps([tensor["dtype"], tensor["shape"]]), sample))
    digest = hashlib.sha256()
    for name, description, sample in sorted(tensors):
        digest.update(json.dumps([name, description, hashlib.sha256(sample).hexdigest()]).encode())
    return digest.hexdigest()


MERGED_ELEMENTS = 1 << 24
"""Number of elements that are merged at a time, in float32."""
ADAPTER = "default"
"""peft's name of an adapter."""
MATRIX_NAMES = ("{}.lora_A.weight", "{}.lora_B.weight")
"""Names of the matrices of a layer where they are sent."""


class Factors(NamedTuple):
    """The matrices of an adapter."""

    a: Tensor
    """[rank, in]"""
    b: Tensor
    """[out, rank]"""
    scale: float


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Returns all linear layers but the output layer. peft's own "all-linear" adds routers and experts."""
    head = model.get_output_embeddings()
    named = model.named_modules()
    return {name: module for name, module in named if isinstance(module, nn.Linear) and module is not head}


def adapted_layers(model: PreTrainedModel, settings: Lora) -> dict[str, nn.Linear]:
    """Returns the layers of a model without adapters that have one with these settings."""
    targets = settings.targets
    return {name: layer for name, layer in linear_layers(model).items() if targets is None or is_target(name, targets)}


def is_target(name: str, targets: Iterable[str]) -> bool:
    """True if one of the targets is the layer's name or the end of it."""
    return f".{name}".endswith(tuple(f".{target}" for target in targets))


def adapter_shapes(model: PreTrainedModel, settings: Lora) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of the tensors sent for a model, which has no adapters yet."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in adapted_layers(model, settings).items():
        a, b = (pattern.format(name) for pattern in MATRIX_NAMES)
        shapes |= {a: (settings.rank, layer.in_features), b: (layer.out_features, settings.rank)}
    return shapes


def peft_settings(model: PreTrainedModel, settings: Lora, path: str) -> LoraConfig:
    """Returns peft's settings of the adapters of the model at `path`."""
    from peft import LoraConfig

    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]
        target_modules=list(settings.targets or linear_layers(model)),
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
    )


def matrices_of(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """Returns A and B of a layer that peft has changed."""
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


class MergedWeights(Mapping[str, Tensor]):
    """The weights of a model with adapters merged into them, by parameter. Each is computed when it is asked for, from
    the weights of the model, so that rounding does not accumulate over versions."""

    def __init__(
        self, base: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]], scale: float, *, device: torch.device
    ) -> None:
        """`base` has the weights of the model, maybe in host memory. The tensors are the adapters, as they are sent.
        The sums are computed on the device."""
        self._base, self._sent, self._scale, self._device = base, dict(tensors), scale, device

    def __getitem__(self, name: str) -> Tensor:
        weight = self._base[name]
        a, b = (self._sent.get(pattern.format(name.removesuffix(".weight"))) for pattern in MATRIX_NAMES)
        if a is None or b is None or not name.endswith(".weight"):
            return weight
        a, b = (matrix.to(self._device, torch.float32) for matrix in (a, b))
        return merged(weight.to(self._device), Factors(a, b, self._scale))

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def merged(weight: Tensor, factors: Factors) -> Tensor:
    """Returns the matrix with the adapter added, in float32 rounded once. The factors are float32."""
    a, b = factors.a.to(weight.device), factors.b.to(weight.device)
    result = torch.empty_like(weight)
    step = max(MERGED_ELEMENTS // weight.shape[1], 1)
    for rows, of_b, target in zip(weight.split(step), b.split(step), result.split(step), strict=True):
        target.copy_(torch.add(rows.float(), of_b @ a, alpha=factors.scale))
    return result
