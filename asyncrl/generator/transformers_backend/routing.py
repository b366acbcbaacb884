"""Records which experts compute the tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncrl.util.model_files import Routers, router_modules


class RoutingRecorder:
    """Hooks on the routers of a model, which keep the experts of the latest forward pass."""

    def __init__(self, model: nn.Module, routers: Routers, path: str) -> None:
        self._routers = routers
        self._chosen: list[Tensor] = [torch.empty(0)] * routers.layers
        for layer, module in enumerate(router_modules(model, routers, path)):
            module.register_forward_hook(partial(self._keep, layer))

    def _keep(self, layer: int, module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._chosen[layer] = output[2]

    def new_record(self, tokens: int) -> NDArray[np.uint8]:
        """Returns zeros for the experts of a sequence of at most this many tokens."""
        return np.zeros((tokens, self._routers.layers, self._routers.chosen), dtype=np.uint8)

    def taken(self, lengths: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Returns the experts [length, layers, chosen] of the latest forward pass, of rows of these lengths."""
        chosen = torch.stack(self._chosen, dim=1).to(torch.uint8).cpu().numpy()
        return np.split(chosen, np.cumsum(lengths)[:-1])
