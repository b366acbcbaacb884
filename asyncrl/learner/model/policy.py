"""The policy under training and the frozen reference policy: log-probs of action tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError, InvariantError
from asyncrl.learner.batch import MicroBatch, Routing
from asyncrl.learner.distributed import Ranks, deepspeed
from asyncrl.learner.model.attention import SequenceParallel, checked
from asyncrl.learner.model.engine import TrainedModel
from asyncrl.learner.model.loading import deepspeed_config, hidden_states, load_policy_model
from asyncrl.learner.model.logprob_head import LogprobHead
from asyncrl.learner.model.lora import Adapters
from asyncrl.learner.model.model_checks import check_packing
from asyncrl.types import Group
from asyncrl.util.model_files import Routers, replayed_routers, router_modules


class Policy(TrainedModel):
    """The policy on all learner ranks."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        model = load_policy_model(config, config.model.path)
        adapters = Adapters(config, model) if config.learner.lora.rank else None
        routers = replayed_routers(
            config.algorithm.routing_replay, config.model.path, trust_remote_code=config.model.trust_remote_code
        )
        replay = None if routers is None else RouterReplay(model, routers, config.model.path)
        network = PolicyNetwork(config, model, entropy_gradient=config.algorithm.entropy_coef > 0, replay=replay)
        self.replay = replay
        """Replays the engine's experts, also in scoring passes; None without `algorithm.routing_replay`. The
        reference and the critic are other models, and route live."""
        folders, lr = [config.model.path], config.learner.lr
        super().__init__(config, ranks, model, network, lr=lr, folders=folders, adapters=adapters)
        check_packing(model, self.score, ranks.device, name := f"model.path = {config.model.path!r}")
        network.parallel = checked(ranks.parallel, model, name)

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Returns log-probs [N] of the action tokens at the sampling temperature, and entropies [N], both float32 in
        nats. The entropies have a gradient if the loss has an entropy bonus."""
        return self.engine(micro)

    def logprobs(self, micro: MicroBatch) -> Tensor:
        """Returns the log-probs [N] of `forward`, without gradient."""
        return self.score(micro)[0]

    def base_logprobs(self, micro: MicroBatch) -> Tensor:
        """Returns the log-probs [N] of the model without its adapters."""
        assert self.adapters is not None
        with self.adapters.disabled():
            return self.logprobs(micro)


class Reference:
    """The frozen reference policy of the KL divergence. With ZeRO stage 3 its weights are sharded."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        path = config.algorithm.reference or config.model.path
        model = load_policy_model(config, path, "algorithm.reference")
        network = PolicyNetwork(config, model).to(ranks.device).eval().requires_grad_(False)
        self.network: nn.Module = network
        if config.learner.zero_stage == 3:
            self.network, *_ = deepspeed.initialize(model=network, config=deepspeed_config(config, network))
            self.network.eval()
        check_packing(model, self.logprobs, ranks.device, name := f"algorithm.reference = {path!r}")
        network.parallel = checked(ranks.parallel, model, name)

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch) -> Tensor:
        """Returns log-probs [N] of the action tokens at the sampling temperature, float32 in nats."""
        return self.network(micro)[0]


class PolicyNetwork(nn.Module):
    """The model with a head that returns log-probs, as the module that DeepSpeed wraps."""

    def __init__(
        self,
        config: Config,
        model: PreTrainedModel,
        *,
        entropy_gradient: bool = False,
        replay: RouterReplay | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.replay = replay
        self.parallel: SequenceParallel | None = None
        """The ranks that share this one's sequences, from when the network is checked on."""
        output = model.get_output_embeddings()
        if not isinstance(output, nn.Linear):
            raise ConfigError(f"model.path: the output layer is a {type(output).__name__}, but must be linear")
        self.head = LogprobHead(output, config.generator.temperature, entropy_gradient=entropy_gradient)

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        if self.replay is not None:
            self.replay.use(micro.routing)
        states, local = hidden_states(self.model, micro, self.parallel)
        if self.parallel is None or local is None:
            return self.head(states, micro.targets)
        scores = torch.stack(self.head(states, micro.targets[local]))
        logprobs, entropies = self.parallel.collect(scores, local, len(micro.targets))
        return logprobs, entropies


class RouterReplay:
    """Hooks on the routers of a model (`algorithm.routing_replay`): tokens whose routing was recorded go to the experts
    that the engine chose. Their weights come from the learner's logits, so that the router is trained."""

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
        routers = self._routers
        for group in groups:
            for number, trajectory in enumerate(group.trajectories):
                if trajectory.status == "failed":  # it is not trained
                    continue
                name, routing = f"ticket {group.ticket}, trajectory {number}", trajectory.routing
                shape = (len(trajectory.tokens), routers.layers, routers.chosen)
                if routing is None or routing.shape != shape or int(routing.max(initial=0)) >= routers.experts:
                    raise InvariantError(
                        f"{name}: its routing is {None if routing is None else routing.shape}, but "
                        f"algorithm.routing_replay needs {shape} of {routers.experts} experts"
                    )
                # The last token is not computed by the engine. A token that was not recorded has expert 0 throughout.
                if (routing[:-1, :, 1:] == routing[:-1, :, :-1]).any():
                    raise InvariantError(
                        f"{name}: a token was routed to one expert twice: its routing was not recorded"
                    )
