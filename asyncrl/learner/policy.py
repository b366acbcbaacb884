"""The policy under training and the frozen reference policy: log-probs of action tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.backend import deepspeed
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.engine import TrainedModel, deepspeed_config
from asyncrl.learner.models import hidden_states, load_policy_model

CHUNK_BYTES = 256 << 20
"""Float32 logits held at once; longer rows of action tokens are scored in chunks and scored again in backward."""


class LogprobHead(nn.Module):
    """The model's output layer, giving log-probs of chosen tokens without keeping the logits.

    It shares the layer's parameters, so that ZeRO stage 3 gathers them once for all chunks.
    """

    def __init__(self, output: nn.Linear, temperature: float) -> None:
        super().__init__()
        self.weight, self.bias = output.weight, output.bias
        self.temperature = temperature
        self.chunk_tokens = max(1, CHUNK_BYTES // (4 * output.out_features))

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs [N] of targets [N] and entropies [N], float32 in nats, from hidden states [N, size].

        The entropies carry no gradient.
        """
        if len(targets) <= self.chunk_tokens:
            return self._score(hidden, targets)
        chunks = zip(hidden.split(self.chunk_tokens), targets.split(self.chunk_tokens), strict=True)
        scored = [checkpoint(self._score, *chunk, use_reentrant=False) for chunk in chunks]
        logprobs, entropies = zip(*scored, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _score(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = linear(hidden, self.weight, self.bias).float() / self.temperature
        normalizer = logits.logsumexp(dim=-1)
        logprobs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normalizer
        with torch.no_grad():
            probs = (logits - normalizer.unsqueeze(-1)).exp()
            entropies = normalizer - (probs * logits).sum(dim=-1)
        return logprobs, entropies


class PolicyNetwork(nn.Module):
    """The model with the head above; its forward is what DeepSpeed sees."""

    def __init__(self, model: PreTrainedModel, temperature: float) -> None:
        super().__init__()
        self.model = model
        output = model.get_output_embeddings()
        if not isinstance(output, nn.Linear):
            raise ConfigError(f"model.path: the output layer is a {type(output).__name__}, but must be linear")
        self.head = LogprobHead(output, temperature)

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        return self.head(hidden_states(self.model, micro), micro.targets)


class Policy(TrainedModel):
    """The policy on all learner ranks."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        model = load_policy_model(config, config.model.path)
        network = PolicyNetwork(model, config.generator.temperature)
        super().__init__(config, ranks, model, network, lr=config.learner.lr)

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs [N] of the action tokens at the sampling temperature, and detached entropies [N]; float32, nats."""
        return self.engine(micro)

    def logprobs(self, micro: MicroBatch) -> Tensor:
        """Log-probs [N] as of `forward`, without gradient."""
        return self.score(micro)[0]


class Reference:
    """The frozen policy that the divergence is measured from; with ZeRO stage 3 its weights are sharded, too."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        path = config.algorithm.reference or config.model.path
        model = load_policy_model(config, path, "algorithm.reference")
        network = PolicyNetwork(model, config.generator.temperature).to(ranks.device).eval().requires_grad_(False)
        self._network: nn.Module = network
        if config.learner.zero_stage == 3:
            self._network, *_ = deepspeed.initialize(model=network, config=deepspeed_config(config))
            self._network.eval()

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch) -> Tensor:
        """Log-probs [N] of the action tokens at the sampling temperature, float32, nats."""
        return self._network(micro)[0]
