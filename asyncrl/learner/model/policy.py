"""The policy under training and the frozen reference policy: log-probs of action tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model.deepspeed_import import deepspeed
from asyncrl.learner.model.engine import TrainedModel
from asyncrl.learner.model.excluded import Excluded
from asyncrl.learner.model.experts import gather_experts_together
from asyncrl.learner.model.loading import hidden_states, load_policy_model
from asyncrl.learner.model.logprob_head import LogprobHead
from asyncrl.learner.model.lora import Adapters
from asyncrl.learner.model.packing_check import check_packing
from asyncrl.learner.model.router_replay import RouterReplay
from asyncrl.learner.model.sequence_parallel import SequenceParallel, checked
from asyncrl.learner.model.settings import deepspeed_config
from asyncrl.util.routing import replayed_routers


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
        self.excluded = Excluded.of(config)
        output = model.get_output_embeddings()
        if not isinstance(output, nn.Linear):
            raise ConfigError(f"model.path: the output layer is a {type(output).__name__}, but must be linear")
        self.head = LogprobHead(
            output,
            config.generator.temperature,
            entropy_gradient=entropy_gradient,
            excluded=self.excluded.tokens if self.excluded is not None else (),
        )

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        if self.replay is not None:
            self.replay.use(micro.routing)
        excludes = None if self.excluded is None else self.excluded.is_early(micro.logit_index)
        states, own = hidden_states(self.model, micro, self.parallel)
        if self.parallel is None or own is None:
            return self.head(states, micro.targets, excludes)
        scores = self.head(states, micro.targets[own], None if excludes is None else excludes[own])
        logprobs, entropies = self.parallel.collect(torch.stack(scores), own, len(micro.targets))
        return logprobs, entropies


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
        """Replays the engine's experts, in scoring passes, too; None without `algorithm.routing_replay`. The
        reference and the critic are other models, and route live."""
        self.excluded = network.excluded
        """Tokens that the engine excludes early in a completion; None if there are none."""
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
    """The frozen reference policy of the KL divergence. With ZeRO stage 3 its weights are sharded, too."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        path = config.algorithm.reference or config.model.path
        model = load_policy_model(config, path, "algorithm.reference")
        network = PolicyNetwork(config, model).to(ranks.device).eval().requires_grad_(False)
        self.network: nn.Module = network
        if config.learner.zero_stage == 3:
            gather_experts_together(model)
            self.network, *_ = deepspeed.initialize(model=network, config=deepspeed_config(config, network))
            self.network.eval()
        check_packing(model, self.logprobs, ranks.device, name := f"algorithm.reference = {path!r}")
        network.parallel = checked(ranks.parallel, model, name)

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch) -> Tensor:
        """Returns log-probs [N] of the action tokens at the sampling temperature, float32 in nats."""
        return self.network(micro)[0]
