"""Low-rank adapters of a frozen model (LoRA, arXiv:2106.09685): a layer computes with W + alpha / rank * B A, of which
A and B alone are trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.weights.model_tensors import (
    ADAPTER,
    MATRIX_NAMES,
    Factors,
    fingerprint_of,
    is_target,
    matrices_of,
    peft_settings,
)

BASE = ".base_layer."
"""In the name of a parameter of a layer that has an adapter."""


class Adapters:
    """The adapters of a model's layers. They are put into the model, whose other parameters are frozen."""

    def __init__(self, config: Config, model: PreTrainedModel) -> None:
        """B is 0 and A random, by `seed`, the same on all ranks. Raises ConfigError if a layer cannot have an
        adapter."""
        from peft import inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        settings = config.learner.lora
        self._settings = peft_settings(model, settings, config.model.path)
        self.base = fingerprint_of(config.model.path)
        """The fingerprint of the weights that the adapters change."""
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(config.seed)
            try:
                inject_adapter_in_model(self._settings, model, ADAPTER)
            except ValueError as error:
                raise ConfigError(f"learner.lora.targets = {settings.targets}: {error}") from error
        self._layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
        self._check(settings.targets, model)

    def _check(self, targets: tuple[str, ...] | None, model: PreTrainedModel) -> None:
        from peft.tuners.lora import Linear

        head: Any = model.get_output_embeddings()
        for name, layer in self._layers.items():
            if layer is head:
                raise ConfigError(
                    f"learner.lora.targets: {name} is the output layer, which cannot have an adapter; leave it out"
                )
            if not isinstance(layer, Linear) or not isinstance(layer.get_base_layer(), nn.Linear):
                kind = type(layer.get_base_layer()).__name__
                raise ConfigError(
                    f"learner.lora.targets: {name} is a {kind}, but only linear layers can have an adapter; name "
                    "others, or train without learner.lora"
                )
        for target in targets or ():
            if not any(is_target(name, [target]) for name in self._layers):
                raise ConfigError(f"learner.lora.targets: model.path has no layer {target!r}; leave it out")

    def frozen(self, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields those parameters of the model that are not of an adapter, with the names without adapters."""
        return ((name.replace(BASE, "."), parameter) for name, parameter in named if not parameter.requires_grad)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters of all adapters, under the names by which they are sent."""
        for name, layer in self._layers.items():
            for pattern, matrix in zip(MATRIX_NAMES, matrices_of(layer), strict=True):
                yield pattern.format(name), matrix

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of all adapters."""
        return [matrix for _, matrix in self.named()]

    def factors(self) -> dict[str, Factors]:
        """Returns float32 copies of the adapters' matrices, by the name of the weight that they change. The parameters
        have to be complete."""
        factors: dict[str, Factors] = {}
        for name, layer in self._layers.items():
            a, b = (matrix.detach().to(torch.float32, copy=True) for matrix in matrices_of(layer))
            factors[f"{name}.weight"] = Factors(a, b, layer.scaling[ADAPTER])
        return factors

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """In this context the model computes without adapters."""
        # peft's own method would also change which parameters have gradients, which DeepSpeed relies on.
        for layer in self._layers.values():
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer._disable_adapters = False

    def write(self, folder: Path, factors: dict[str, Factors]) -> None:
        """Writes these matrices in peft's format, in the number format of the model."""
        folder.mkdir(parents=True, exist_ok=True)
        self._settings.save_pretrained(str(folder))
        tensors: dict[str, Tensor] = {}
        for name, layer in self._layers.items():
            for pattern, matrix in zip(MATRIX_NAMES, factors[f"{name}.weight"][:2], strict=True):
                tensors[f"base_model.model.{pattern.format(name)}"] = matrix.to("cpu", matrices_of(layer)[0].dtype)
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns the name and parameter of each trained weight of a model."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
