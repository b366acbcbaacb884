"""A network inside a DeepSpeed engine: forward, backward and step on all learner ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel

from asyncrl.config import Config
from asyncrl.config.passthrough import merged
from asyncrl.errors import InvariantError
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.deepspeed_import import BF16_Optimizer, ZeROOptimizer, deepspeed
from asyncrl.learner.distributed import Ranks

GATHER_ELEMENTS = 1 << 26
"""Weights gathered at once from the ranks of ZeRO stage 3."""
BUCKET_ELEMENTS = 50_000_000
"""Gradients and weights that the ranks exchange at once."""


def deepspeed_config(config: Config) -> dict[str, Any]:
    """DeepSpeed's settings.

    Micro-batches are accumulated by marking the last one, and gradients are clipped by `TrainedModel.step`. In
    bfloat16, stage 0 runs as stage 1: DeepSpeed accumulates gradients in float32 only from there on. Ranks exchange
    gradients in float32, too; by default DeepSpeed rounds them to bfloat16 for that, even with one rank. The config's
    `learner.deepspeed_options` come last.
    """
    bfloat16 = config.model.dtype == "bfloat16"
    stage = config.learner.zero_stage
    settings = {
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
        "communication_data_type": "fp32",
    }
    return merged(settings, config.learner.deepspeed_options)


class TrainedModel:
    """A model under training, wrapped in a network whose forward takes a micro-batch."""

    def __init__(self, config: Config, ranks: Ranks, model: PreTrainedModel, network: nn.Module, *, lr: float) -> None:
        settings = config.learner
        self.ranks = ranks
        self.model = model
        self.network = network.to(ranks.device)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(),
            lr=lr,
            betas=settings.adam_betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.engine, *_ = deepspeed.initialize(
            model=self.network, optimizer=self.optimizer, config=deepspeed_config(config)
        )
        self.engine.train()
        self.skipped = 0
        """Updates in a row that were skipped, up to now; part of the training state."""
        self.sharded: bool = isinstance(self.engine.optimizer, ZeROOptimizer)
        """Whether each rank holds a part of the optimizer's state."""
        self.partitioned: bool = self.engine.zero_optimization_partition_weights()
        """Whether each rank holds a part of the weights, too (ZeRO stage 3)."""

    @torch.no_grad()
    def score(self, micro: MicroBatch) -> Any:
        """What the network gives for the micro-batch, without gradient."""
        self.engine.eval()
        try:
            return self.engine(micro)
        finally:
            self.engine.train()

    def backward(self, outputs: Tensor, gradient: Tensor, *, last: bool) -> None:
        """Adds this rank's part of the loss's gradient, through outputs [N] and the gradient [N] with respect to them.

        Gradients are summed over the micro-batches up to the `last` of the update, and over the ranks.
        """
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages gradients over the ranks.
        self.engine.backward((outputs * (gradient * self.ranks.count)).sum())

    def gradient_norm(self) -> float:
        """Norm of the update's whole gradient, the same on all ranks; call after the last backward."""
        norm = get_total_norm(self._gradients()).double().cpu()
        if self.sharded:
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
        self.skipped = 0

    def skip(self) -> None:
        """Drops the gradient of the update; weights and optimizer stay as they are. All ranks call it."""
        self.skipped += 1
        if not self.sharded:
            self.engine.zero_grad()
            return
        for gradient in self._gradients():
            gradient.fill_(torch.nan)  # a step that DeepSpeed drops, with what belongs to it
        self.engine.step()
        if self.engine.was_step_applied():
            raise InvariantError("DeepSpeed made an update although its gradient is not finite")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and full weight of every parameter, tied ones once, by the names of the model's checkpoint.

        All ranks iterate; with ZeRO stage 3 they gather the weights together, a part at a time, and a
        tensor is valid until the next one is asked for.
        """
        for part in self._parts():
            with self._gathered([parameter for _, parameter in part]):
                for name, parameter in part:
                    yield name, parameter.detach()

    def shapes(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, dtype and full shape of everything that `weights` brings, in its order; nothing is gathered."""
        named = self.model.named_parameters()
        return [
            (name, parameter.dtype, tuple(getattr(parameter, "ds_shape", parameter.shape))) for name, parameter in named
        ]

    def collect_weights(self) -> dict[str, Tensor]:
        """All weights on the CPU, on rank 0; other ranks take part and get none."""
        if self.ranks.rank == 0:
            return {name: weight.to("cpu", copy=True) for name, weight in self.weights()}
        self.join_gathering()
        return {}

    def join_gathering(self) -> None:
        """What the other ranks do while rank 0 iterates over `weights`."""
        if self.partitioned:
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
        return deepspeed.zero.GatheredParameters(parameters) if self.partitioned else nullcontext()

    def _gradients(self) -> list[Tensor]:
        """This rank's shards of the reduced gradient; with stage 0, all of it."""
        optimizer: Any = self.engine.optimizer
        if isinstance(optimizer, BF16_Optimizer):
            return optimizer.fp32_groups_gradient_flat_partition
        if self.sharded:
            return [gradient for group in optimizer.averaged_gradients.values() for gradient in group]
        return [p.grad for p in self.network.parameters() if p.grad is not None]
