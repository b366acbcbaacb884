"""Low-rank adapters of a frozen model (LoRA, arXiv:2106.09685): a layer computes with W + alpha / rank * B A, of which
A and B alone are trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.config import Config
from asyncrl.config.mappings import Lora
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

MERGED_ELEMENTS = 1 << 24
"""Number of elements that are merged at a time, in float32."""
ADAPTER = "default"
"""peft's name of an adapter."""
BASE = ".base_layer."
"""In the name of a parameter of a layer that has an adapter."""


class Factors(NamedTuple):
    """The matrices of an adapter, float32."""

    a: Tensor
    """[rank, in]"""
    b: Tensor
    """[out, rank]"""
    scale: float


class Adapters:
    """The adapters of a model's layers. They are put into the model, whose other parameters are frozen."""

    def __init__(self, config: Config, model: PreTrainedModel) -> None:
        """B is 0 and A random, by `seed`, the same on all ranks. Raises ConfigError if a layer cannot have an
        adapter."""
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        settings = config.learner.lora
        self._settings = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]
            target_modules=list(settings.targets or linear_layers(model)),
            bias="none",
            task_type="CAUSAL_LM",
            base_model_name_or_path=config.model.path,
        )
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
            if not any(_ends(name, (f".{target}",)) for name in self._layers):
                raise ConfigError(f"learner.lora.targets: model.path has no layer {target!r}; leave it out")

    def frozen(self, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields those parameters of the model that are not of an adapter, with the names without adapters."""
        return ((name.replace(BASE, "."), parameter) for name, parameter in named if not parameter.requires_grad)

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of all adapters."""
        return [matrix for layer in self._layers.values() for matrix in _matrices(layer)]

    def factors(self) -> dict[str, Factors]:
        """Returns copies of the adapters' matrices, by the name of the weight that they change. The parameters have to
        be complete."""
        found: dict[str, Factors] = {}
        for name, layer in self._layers.items():
            a, b = (matrix.detach().to(torch.float32, copy=True) for matrix in _matrices(layer))
            found[f"{name}.weight"] = Factors(a, b, layer.scaling[ADAPTER])
        return found

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
            for letter, matrix in zip("AB", factors[f"{name}.weight"][:2], strict=True):
                tensors[f"base_model.model.{name}.lora_{letter}.weight"] = matrix.to("cpu", _matrices(layer)[0].dtype)
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Returns the names of all linear layers but the output layer. peft's own "all-linear" adds routers and experts."""
    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]


def adapter_parameters(model: PreTrainedModel, settings: Lora) -> int:
    """Returns the number of parameters of the adapters that a model without them would get."""
    endings = None if settings.targets is None else tuple(f".{target}" for target in settings.targets)
    layers: list[Any] = [model.get_submodule(name) for name in linear_layers(model) if _ends(name, endings)]
    return settings.rank * sum(layer.in_features + layer.out_features for layer in layers)


def _ends(name: str, endings: tuple[str, ...] | None) -> bool:
    return endings is None or f".{name}".endswith(endings)


def _matrices(layer: LoraLayer) -> tuple[nn.Parameter, nn.Parameter]:
    a: Any = layer.lora_A[ADAPTER]
    b: Any = layer.lora_B[ADAPTER]
    return a.weight, b.weight


def merged(weight: Tensor, factors: Factors, first: int = 0) -> Tensor:
    """Returns the weight with the adapter added, in float32 rounded once: a matrix, or a slice of the flat one from
    element `first`."""
    a, b = factors.a.to(weight.device), factors.b.to(weight.device)
    flat, columns = weight.reshape(-1), a.shape[1]
    result = torch.empty_like(flat)
    step = max(MERGED_ELEMENTS // columns, 1)
    last = first + len(flat)
    for row in range(first // columns, -(-last // columns), step):
        begin, end = max(row * columns, first), min((row + step) * columns, last)
        change = (b[row : row + step] @ a).view(-1)[begin - row * columns : end - row * columns]
        torch.add(flat[begin - first : end - first].float(), change, alpha=factors.scale, out=change)
        result[begin - first : end - first] = change
    return result.view(weight.shape)


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns the name and parameter of what is trained of a model."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
