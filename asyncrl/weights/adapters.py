"""Low-rank adapters (LoRA, arXiv:2106.09685) of a frozen model, as learner and engines know them: which layers have
them, what their matrices are named where they are sent, and weights into which they are merged.

A layer computes with W + scale * B A. W is in `model.path` on either side, and A and B alone are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.config.training import Lora

if TYPE_CHECKING:
    from peft import LoraConfig

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
    """Returns the names and shapes of what is sent for a model, which has no adapters yet."""
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
