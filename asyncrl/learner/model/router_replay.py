"""Replays the experts that the engine chose: `algorithm.routing_replay`.

A router of the learner computes its logits as always, but the chosen experts are those of the engine. Their weights
come from the learner's logits, so that the router is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.errors import InvariantError
from asyncrl.learner.batch import Routing
from asyncrl.types import Group
from asyncrl.util.routing import Routers, router_modules


class RouterReplay:
    """Hooks on the routers of a model. Each replaces the experts of the tokens whose routing was recorded."""

    def __init__(self, model: nn.Module, routers: Routers, path: str) -> None:
        self._routers = routers
        self._routing: Routing | None = None
        for layer, module in enumerate(router_modules(model, routers, path)):
            module.register_forward_hook(partial(self._replace, layer))

    def use(self, routing: Routing | None) -> None:
        """Sets the routing of the next forward pass, and of what its backward pass computes again; with None all tokens
        are routed live."""
        self._routing = routing

    def _replace(
        self, layer: int, module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, experts = output
        if self._routing is None:
            return output
        source = self._routing.source
        recorded = self._routing.experts[source, layer].long()
        experts = torch.where(source[:, None] < 0, experts, recorded)
        chosen = logits.float().softmax(dim=-1).gather(-1, experts)
        if self._routers.normalized:
            chosen = chosen / chosen.sum(dim=-1, keepdim=True)
        return logits, chosen.to(weights.dtype), experts

    def check(self, groups: Sequence[Group]) -> None:
        """Raises InvariantError for a trajectory without a routing of this model."""
        expected = (self._routers.layers, self._routers.chosen)
        for group in groups:
            for number, trajectory in enumerate(group.trajectories):
                if trajectory.status == "failed":  # it is not trained
                    continue
                where, routing = f"ticket {group.ticket}, trajectory {number}", trajectory.routing
                if routing is None:
                    raise InvariantError(f"{where}: no routing was recorded; algorithm.routing_replay = 'engine'")
                if routing.shape != (len(trajectory.tokens), *expected):
                    raise InvariantError(
                        f"{where}: its routing has the shape {routing.shape}, but the model has {expected[0]} layers "
                        f"with {expected[1]} experts of each of its {len(trajectory.tokens)} tokens"
                    )
                if int(routing.max(initial=0)) >= self._routers.experts:
                    raise InvariantError(f"{where}: it was routed to expert {routing.max()} of {self._routers.experts}")
                # The last token is not computed by the engine. What was never recorded is expert 0 throughout.
                if (routing[:-1, :, 1:] == routing[:-1, :, :-1]).any():
                    raise InvariantError(
                        f"{where}: a token was routed to one expert twice: its routing was not recorded"
                    )
