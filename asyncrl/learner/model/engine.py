"""A network inside a DeepSpeed engine: forward, backward and step on all learner ranks; and its optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import AdamW
from transformers import PreTrainedModel

from asyncrl.config.config import Config
from asyncrl.errors import InvariantError
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.distributed import BF16_Optimizer, Ranks, ZeROOptimizer, deepspeed
from asyncrl.learner.model.loading import deepspeed_config, read_other_files
from asyncrl.learner.model.lora import Adapters
from asyncrl.weights.layout import slice_of
from asyncrl.weights.model_tensors import Factors, merged

GATHER_ELEMENTS = 1 << 24
"""Number of weights gathered at a time from the ranks of ZeRO stage 3."""
STEP = "step"
"""Name of the number of updates in an optimizer's state."""


class TrainedModel:
    """A model under training, wrapped in a network whose forward takes a micro-batch."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        model: PreTrainedModel,
        network: nn.Module,
        *,
        lr: float,
        folders: Sequence[str],
        adapters: Adapters | None = None,
    ) -> None:
        """The model is saved with the files other than weights in these folders. Raises ConfigError if they cannot be
        read or the model's config cannot be written."""
        self.ranks = ranks
        self.model = model
        other_files = read_other_files(model, folders)  # on all ranks, so that all raise its error
        self.other_files = {} if ranks.rank else other_files
        """Contents of the files of the saved model that are not weights, by path in its folder; on rank 0."""
        self.adapters = adapters
        """The only trained parameters; None if all are trained."""
        self.network = network.to(ranks.device)
        options = config.learner.optimizer_options
        self.optimizer = AdamW(
            [parameter for parameter in self.network.parameters() if parameter.requires_grad],
            lr=lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay, fused=True,
        )  # fmt: skip
        self.engine, *_ = deepspeed.initialize(
            model=self.network, optimizer=self.optimizer, config=deepspeed_config(config, self.network)
        )
        self.engine.train()
        self.skipped = 0
        """Number of consecutive skipped updates, including the most recent one; part of the training state."""
        self.sharded: bool = isinstance(self.engine.optimizer, ZeROOptimizer)
        """True if each rank has only a part of the optimizer's state."""
        self.partitioned: bool = self.engine.zero_optimization_partition_weights()
        """True if each rank also has only a part of the weights (ZeRO stage 3)."""
        self.offloaded = config.learner.offload != "none"
        """True if the optimizer's state and the reduced gradient are in host memory."""

    @torch.no_grad()
    def score(self, micro: MicroBatch) -> Any:
        """Returns the network's output for the micro-batch, in evaluation mode and without gradient."""
        self.engine.eval()
        try:
            return self.engine(micro)
        finally:
            self.engine.train()

    def backward(self, outputs: Tensor, gradient: Tensor, *, last: bool) -> None:
        """Accumulates this rank's part of the loss's gradient, from outputs of any shape and its gradient with respect
        to them.

        Gradients are summed over the ranks and over the micro-batches of the update, the final one of which is marked
        by `last`.
        """
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages gradients over the ranks.
        self.engine.backward((outputs * (gradient * self.ranks.count)).sum())

    def gradient_norm(self) -> float:
        """Returns the norm of the update's complete gradient, the same on all ranks. Call after the last backward."""
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
        """Drops the gradient of the update; weights and optimizer state do not change. All ranks call it."""
        self.skipped += 1
        if not self.sharded:
            self.engine.zero_grad()
            return
        # Makes DeepSpeed drop the step and reset its state of the update.
        optimizer: Any = self.engine.optimizer
        if self.offloaded:  # it looks at what it has noted of the gradients, and would keep their sums on the GPU
            optimizer.local_overflow = True
            optimizer.norm_for_param_grads = dict.fromkeys(optimizer.norm_for_param_grads, torch.tensor(torch.nan))
            optimizer.averaged_gradients.clear()
        for gradient in self._gradients():
            gradient.fill_(torch.nan)
        self.engine.step()
        if self.engine.was_step_applied():
            raise InvariantError("DeepSpeed applied an update although its gradient is not finite")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and full weight of every parameter, tied ones once, and adapters merged into them.

        All ranks iterate. With ZeRO stage 3 the ranks gather the weights in parts, and a tensor is valid only until the
        next one is requested.
        """
        factors = self.factors()
        for part in self._parts():
            with self._gathered([parameter for _, parameter in part]):
                for name, parameter in part:
                    weight, added = parameter.detach(), factors.get(name)
                    yield name, weight if added is None else merged(weight, added)

    def sent_slices(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and this rank's slice (`weights/layout.py`) of every parameter that generators get, a flat
        one; with one rank the full weight. With adapters these are their matrices alone, otherwise all parameters, as
        in `weights`. No other rank takes part, and nothing is copied. Raises InvariantError if DeepSpeed shards the
        weights in another way."""
        rank, ranks = self.ranks.rank, self.ranks.count
        for name, parameter in self._sent():
            sizes: Any = parameter
            count, shape = (sizes.ds_numel, sizes.ds_shape) if self.partitioned else (sizes.numel(), sizes.shape)
            first, last = slice_of(count, rank, ranks)
            if self.partitioned:
                shard: Tensor = sizes.ds_tensor
                if shard.numel() != slice_of(count, 0, ranks)[1]:
                    raise InvariantError(f"{name}: DeepSpeed has {shard.numel()} of {count} elements on rank {rank}")
                flat = shard.detach()[: last - first]
            else:
                flat = parameter.detach().reshape(-1)[first:last]
            yield name, flat if ranks > 1 else flat.view(shape)

    def sent_shapes(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Returns the name, dtype and full shape of what generators get, in the order of `sent_slices`."""
        return [(name, weight.dtype, tuple(getattr(weight, "ds_shape", weight.shape))) for name, weight in self._sent()]

    def factors(self) -> dict[str, Factors]:
        """Returns copies of the adapters' matrices, by the name of the weight that they change; empty without adapters.
        All ranks call it."""
        if self.adapters is None:
            return {}
        with self._gathered(self.adapters.parameters()):
            return self.adapters.factors()

    def collect_weights(self) -> dict[str, Tensor]:
        """Returns all weights, on the CPU, on rank 0 and an empty dict on other ranks. All ranks call it."""
        return {name: weight.to("cpu", copy=True) for name, weight in self.weights() if self.ranks.rank == 0}

    def _sent(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters() if self.adapters is None else self.adapters.named()

    def _parts(self) -> Iterator[list[tuple[str, nn.Parameter]]]:
        part: list[tuple[str, nn.Parameter]] = []
        elements = 0
        named = self.model.named_parameters()
        for name, parameter in named if self.adapters is None else self.adapters.frozen(named):
            part.append((name, parameter))
            elements += getattr(parameter, "ds_numel", parameter.numel())
            if elements >= GATHER_ELEMENTS:
                yield part
                part, elements = [], 0
        if part:
            yield part

    def _gathered(self, parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
        return deepspeed.zero.GatheredParameters(parameters) if self.partitioned else nullcontext()

    def flat_weights(self) -> list[Tensor]:
        """Returns the tensors that the optimizer updates on this rank: flat float32 weights, or the parameters."""
        optimizer: Any = self.engine.optimizer
        if isinstance(optimizer, BF16_Optimizer):
            return optimizer.fp32_groups_flat_partition
        if self.partitioned:
            return optimizer.fp32_partitioned_groups_flat
        if self.sharded:
            return optimizer.single_partition_of_fp32_groups
        return [parameter for parameter in self.network.parameters() if parameter.requires_grad]

    def _gradients(self) -> list[Tensor]:
        """Returns this rank's shards of the reduced gradient; with stage 0, the complete gradient."""
        optimizer: Any = self.engine.optimizer
        if isinstance(optimizer, BF16_Optimizer):
            return optimizer.fp32_groups_gradient_flat_partition
        if self.offloaded:
            if self.ranks.device.type == "cuda":
                torch.cuda.synchronize(self.ranks.device)  # the gradients may be on their way to the host
            return [flat.grad for flat in self.flat_weights() if flat.grad is not None]
        if self.sharded:
            return [gradient for group in optimizer.averaged_gradients.values() for gradient in group]
        return [p.grad for p in self.network.parameters() if p.grad is not None]


def first_state(parameter: Tensor) -> dict[str, Tensor]:
    """Returns the state of a parameter before its first update, in which the optimizer would create it."""
    state = {STEP: torch.zeros((), dtype=torch.float32, device=parameter.device)}
    names = ("exp_avg", "exp_avg_sq")
    return state | {n: torch.zeros_like(parameter, memory_format=torch.preserve_format) for n in names}
