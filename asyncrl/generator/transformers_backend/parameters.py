"""The weights of the model that are overwritten by new versions: all of them, or those of its adapters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.config.config import Config
from asyncrl.weights.layout import WeightPart
from asyncrl.weights.model_tensors import (
    ADAPTER,
    MATRIX_NAMES,
    MergedWeights,
    adapted_layers,
    adapter_shapes,
    matrices_of,
    peft_settings,
)

Shapes = dict[str, tuple[int, ...]]


class Parameters:
    """All parameters of the model, tied ones once."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._parameters = dict(named)
        self.shapes: Shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        """Names and shapes of the tensors of a version."""

    @torch.no_grad()
    def load(self, parts: Iterable[WeightPart]) -> None:
        """Overwrites parameters. On a GPU the copies may end after the return, in the order of the thread's stream."""
        for part in parts:
            parameter, first = self._parameters[part.name], part.first_row
            (parameter if first is None else parameter[first : first + len(part.tensor)]).copy_(part.tensor)


class MergedAdapters(Parameters):
    """The weights of the adapted layers, whose original values are in host memory."""

    def __init__(self, config: Config, model: PreTrainedModel) -> None:
        settings = config.learner.lora
        layers = adapted_layers(model, settings)
        super().__init__((f"{name}.weight", layer.weight) for name, layer in layers.items())
        self._base = {name: weight.to("cpu", copy=True) for name, weight in self._parameters.items()}
        self._scale, self._device = settings.scale, model.device
        self.shapes = adapter_shapes(model, settings)

    def load(self, parts: Iterable[WeightPart]) -> None:
        """Overwrites the weights by the original ones with the adapters added, which come at once."""
        sent = [(part.name, part.tensor) for part in parts]
        weights = MergedWeights(self._base, sent, self._scale, device=self._device).items()
        super().load(WeightPart(name, weight) for name, weight in weights)


def parameters_of(config: Config, model: PreTrainedModel) -> Parameters:
    """Returns what is overwritten, by `learner.lora`. With adapters that are not merged, puts them into the model; they
    change nothing before the first version."""
    settings = config.learner.lora
    if not settings.rank:
        return Parameters(model.named_parameters())
    if settings.load == "merged":
        return MergedAdapters(config, model)
    from peft import inject_adapter_in_model

    names = list(adapted_layers(model, settings))
    inject_adapter_in_model(peft_settings(model, settings, config.model.path), model, ADAPTER)
    model.eval().requires_grad_(False)
    matrices = {name: matrices_of(model.get_submodule(name)) for name in names}
    return Parameters(
        (pattern.format(name), matrix)
        for name, of in matrices.items()
        for pattern, matrix in zip(MATRIX_NAMES, of, strict=True)
    )
