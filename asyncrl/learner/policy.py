"""The policy under training: a causal language model inside a DeepSpeed engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils import get_total_norm
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.attention import PACKED
from asyncrl.learner.backend import BF16_Optimizer, ZeROOptimizer, deepspeed
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.distributed import Ranks

CHUNK_BYTES = 256 << 20
"""Float32 logits held at once; longer rows of action tokens are scored in chunks and scored again in backward."""
GATHER_ELEMENTS = 1 << 26
"""Weights gathered at once from the ranks of ZeRO stage 3."""
BUCKET_ELEMENTS = 50_000_000
"""Gradients and weights that the ranks exchange at once."""
UNUSUAL_HEADS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Model settings that change logits after the output layer."""


def deepspeed_config(config: Config) -> dict[str, Any]:
    """DeepSpeed's settings.

    Micro-batches are accumulated by marking the last one, and gradients are clipped by `Policy.step`. In bfloat16,
    stage 0 runs as stage 1: DeepSpeed accumulates gradients in float32 only from there on.
    """
    bfloat16 = config.model.dtype == "bfloat16"
    stage = config.learner.zero_stage
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": max(stage, 1) if bfloat16 else stage,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
        },
        "bf16": {"enabled": bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
    }


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
        output = self.model.base_model(
            input_ids=micro.input_ids.unsqueeze(0),
            position_ids=micro.position_ids.unsqueeze(0),
            packing=micro.layout,
            use_cache=False,
        )
        hidden = output.last_hidden_state.squeeze(0).index_select(0, micro.logit_index)
        return self.head(hidden, micro.targets)


class Policy:
    """Forward, backward and step of the policy on all learner ranks."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        settings = config.learner
        self.ranks = ranks
        self.model = load_model(config)
        self.network = PolicyNetwork(self.model, config.generator.temperature).to(ranks.device)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(),
            lr=settings.lr,
            betas=settings.adam_betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.engine, *_ = deepspeed.initialize(
            model=self.network, optimizer=self.optimizer, config=deepspeed_config(config)
        )
        self.engine.train()
        self._sharded = isinstance(self.engine.optimizer, ZeROOptimizer)
        self._partitioned = self.engine.zero_optimization_partition_weights()

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs [N] of the action tokens at the sampling temperature, and detached entropies [N]; float32, nats."""
        return self.engine(micro)

    def backward(self, logprobs: Tensor, gradient: Tensor, *, last: bool) -> None:
        """Adds the gradient of the loss through log-probs [N], given its gradient [N] with respect to them.

        Gradients add up over the micro-batches until the `last` of the step and are averaged over the ranks.
        """
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward((logprobs * gradient).sum())

    def gradient_norm(self) -> float:
        """Norm of the step's whole gradient, the same on all ranks; call after the last backward."""
        norm = get_total_norm(self._gradients()).double().cpu()
        if self._sharded:
            norm = self.ranks.sum(norm.square()).sqrt()
        return float(norm)

    def step(self, *, lr: float, max_grad_norm: float, grad_norm: float) -> None:
        """Updates the weights with the gradient scaled to a norm of at most `max_grad_norm`."""
        scale = max_grad_norm / (grad_norm + 1e-6)
        if scale < 1:
            for gradient in self._gradients():
                gradient.mul_(scale)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and full weight of every parameter, tied ones once, by the names of the model's checkpoint.

        All ranks iterate; with ZeRO stage 3 they gather the weights together, a part at a time, and a
        tensor is valid until the next one is asked for.
        """
        for part in self._parts():
            with self._gathered([parameter for _, parameter in part]):
                for name, parameter in part:
                    yield name, parameter.detach()

    def collect_weights(self) -> dict[str, Tensor]:
        """All weights on the CPU, on rank 0; other ranks take part and get none."""
        if self.ranks.rank == 0:
            return {name: weight.to("cpu", copy=True) for name, weight in self.weights()}
        self.join_gathering()
        return {}

    def join_gathering(self) -> None:
        """What the other ranks do while rank 0 iterates over `weights`."""
        if self._partitioned:
            for _ in self.weights():
                pass

    def _parts(self) -> Iterator[list[tuple[str, nn.Parameter]]]:
        part: list[tuple[str, nn.Parameter]] = []
        elements = 0
        for name, parameter in self.model.named_parameters():
            part.append((name, parameter))
            elements += getattr(parameter, "ds_numel", parameter.numel())
            if elements >= GATHER_ELEMENTS:
                yield part
                part, elements = [], 0
        if part:
            yield part

    def _gathered(self, parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
        return deepspeed.zero.GatheredParameters(parameters) if self._partitioned else nullcontext()

    def _gradients(self) -> list[Tensor]:
        """This rank's shards of the reduced gradient; with stage 0, all of it."""
        optimizer: Any = self.engine.optimizer
        if isinstance(optimizer, BF16_Optimizer):
            return optimizer.fp32_groups_gradient_flat_partition
        if self._sharded:
            return [gradient for group in optimizer.averaged_gradients.values() for gradient in group]
        return [p.grad for p in self.network.parameters() if p.grad is not None]


def load_model(config: Config) -> PreTrainedModel:
    """The model at `model.path` with packed attention and no dropout. Raises ConfigError when it cannot be trained."""
    path = config.model.path
    disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, config.model.dtype),
            attn_implementation=PACKED,
            trust_remote_code=config.model.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {path!r}: the model cannot be loaded: {error}") from error
    text_config = model.config.get_text_config()
    for name in UNUSUAL_HEADS:
        if getattr(text_config, name, None) not in (None, 1.0):
            raise ConfigError(f"model.path = {path!r}: models with {name} cannot be trained")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if config.learner.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model
