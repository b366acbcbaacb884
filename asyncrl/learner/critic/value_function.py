"""The critic: one value for the state before every action token, trained towards the returns.

Truncated sequences may have an additional value, of the state after the last token. It is never trained.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from asyncrl.algorithms.losses import value_loss
from asyncrl.config import Config
from asyncrl.learner.batch import Batch, MicroBatch
from asyncrl.learner.checkpoint.files import Files, model_files
from asyncrl.learner.checkpoint.hf_export import save_model
from asyncrl.learner.checkpoint.zero_state import restore_state
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model.engine import TrainedModel
from asyncrl.learner.model.loading import hidden_states, load_value_model
from asyncrl.learner.model.packing_check import check_packing
from asyncrl.learner.model.sequence_parallel import SequenceParallel, checked
from asyncrl.learner.update import Minibatch, learning_rate, plan_updates, skip_if_not_finite, sync_microbatches


class ValueFunction(Protocol):
    """The critic's interface for a training step. The critic runs in the learner's processes or in separate ones."""

    def values(self, batch: Batch, step: int) -> Tensor:
        """Returns values [N + C] of the batch, float32, on the CPU: those before its action tokens, then those after
        the last tokens of its `ended` sequences. All ranks call it."""
        ...

    def train(self, returns: Tensor) -> None:
        """Starts training on the returns [N] of the batch most recently passed to `values`."""
        ...

    def finish(self) -> dict[str, float]:
        """Waits for the training to finish and returns its metrics."""
        ...

    def save(self, folder: Path) -> None:
        """Writes the critic to `folder` in Hugging Face format. All ranks call it."""
        ...

    def snapshot(self, folder: Path) -> Files:
        """Returns the critic's files that this rank writes to the checkpoint in `folder`. Separate critic processes
        write their own files there. All ranks call it."""
        ...

    def restore(self, folder: Path) -> None:
        """Loads the critic from the checkpoint. All ranks call it."""
        ...


class ValueHead(nn.Module):
    """The model's linear head, computed in float32 for every dtype of its parameters. In bfloat16, values near 1 would
    be multiples of 1/128, which is too coarse for advantages, the differences of neighboring values.

    The module shares the head's parameters, so that ZeRO stage 3 gathers them for this module.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns values [N], float32, of hidden states [N, size]."""
        bias = None if self.bias is None else self.bias.float()
        return linear(hidden.float(), self.weight.float(), bias).squeeze(-1)


class ValueNetwork(nn.Module):
    """The model's body and a linear head with one output, as the module that DeepSpeed wraps."""

    def __init__(self, model: PreTrainedModel, head: nn.Linear) -> None:
        super().__init__()
        self.model = model
        self.parallel: SequenceParallel | None = None
        """The ranks that share this one's sequences, from when the network is checked on."""
        self.head = ValueHead(head)

    def forward(self, micro: MicroBatch) -> Tensor:
        states, own = hidden_states(self.model, micro, self.parallel)
        values = self.head(states)
        if self.parallel is None or own is None:
            return values
        return self.parallel.collect(values, own, len(micro.logit_index))


class CriticModel(TrainedModel):
    def __init__(self, config: Config, ranks: Ranks) -> None:
        path, key = config.critic.path, "critic.path"
        if path is None:
            path, key = config.model.path, "model.path"
        model, head = load_value_model(config, path, key)
        network = ValueNetwork(model, head)
        # The policy's tokenizer made the tokens.
        super().__init__(config, ranks, model, network, lr=config.critic.lr, folders=[path, config.model.path])
        check_packing(model, self.score, ranks.device, name := f"{key} = {path!r}")
        network.parallel = checked(ranks.parallel, model, name)


class Critic:
    """The critic in the learner's processes, in a separate DeepSpeed engine."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self.config = config
        self.ranks = ranks
        self.data_ranks = ranks.of_data
        self.model = CriticModel(config, ranks)
        self._step = 0
        none = torch.empty(0)
        self._batch = Batch([], none, none, none, none)
        self._minibatches: list[Minibatch] = []
        self._values = torch.empty(0)
        self._metrics: dict[str, float] = {}

    def values(self, batch: Batch, step: int) -> Tensor:
        self._step, self._batch = step, batch
        self._minibatches = sync_microbatches(batch.minibatches, batch.num_members, self.data_ranks, step)
        parts: list[Tensor] = []
        ends: list[Tensor] = []
        for micro in (micro for minibatch in self._minibatches for micro in minibatch.micro_batches):
            valued = replace(micro, logit_index=torch.cat([micro.logit_index, micro.ends]))
            values = self.model.score(valued.to(self.ranks.device)).cpu()
            parts.append(values[: len(micro.logit_index)])
            ends.append(values[len(micro.logit_index) :])
        self._values = torch.cat(parts)
        return torch.cat([self._values, *ends])

    def train(self, returns: Tensor) -> None:
        settings = self.config.learner
        lr = learning_rate(self._step, settings, steps=self.config.steps) / settings.lr * self.config.critic.lr
        total = torch.zeros(3, dtype=torch.float64)
        norms: list[float] = []
        skipped = 0
        for minibatch in plan_updates(self._minibatches, epochs=settings.epochs):
            sums = torch.zeros_like(total)
            finite: list[Tensor] = []
            for micro, last in minibatch.on(self.ranks.device):
                values = self.model.engine(micro)
                gradient, counted = self._loss(micro, values.detach(), returns, minibatch.num_tokens)
                sums += counted
                finite.append(values.detach().isfinite() & gradient.isfinite())
                self.model.backward(values, gradient, last=last)
            norm = self.model.gradient_norm()
            if skip_if_not_finite(self.model, minibatch, finite, norm, self._step, "critic.lr"):
                skipped += 1
                continue
            self.model.step(lr=lr, max_grad_norm=settings.max_grad_norm, grad_norm=norm)
            total += sums
            norms.append(norm)
        loss, clipped, tokens = self.data_ranks.sum(total).tolist()
        metrics = self._describe(returns) | {"critic/lr": lr, "critic/skipped_updates": float(skipped)}
        if norms:
            metrics |= {
                "critic/loss": loss / tokens,
                "critic/clip_fraction": clipped / tokens,
                "critic/grad_norm": sum(norms) / len(norms),
            }
        self._metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _loss(self, micro: MicroBatch, values: Tensor, returns: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Returns the gradient [N] of the micro-batch's part of the loss, and three sums for the metrics: token losses,
        number of values outside the clip range, number of action tokens."""
        clip = self.config.critic.clip
        leaf = values.clone().requires_grad_()
        old = self._values[micro.span].to(values.device)
        loss = value_loss(leaf, old, returns[micro.span].to(values.device), clip=clip)
        (gradient,) = torch.autograd.grad(loss.sum() / num_tokens, leaf)
        outside = (values - old).abs() > (float("inf") if clip is None else clip)
        sums = torch.stack([loss.detach().sum().double(), outside.sum().double()]).cpu()
        return gradient, torch.cat([sums, sums.new_tensor([len(old)])])

    def finish(self) -> dict[str, float]:
        return self._metrics

    def save(self, folder: Path) -> None:
        save_model(self.model, folder)

    def snapshot(self, folder: Path) -> Files:
        return model_files(self.model, "critic")

    def restore(self, folder: Path) -> None:
        restore_state(self.model, folder / "critic")

    def _describe(self, returns: Tensor) -> dict[str, float]:
        """Returns metrics of how well the values from before the training predicted the returns."""
        columns = torch.stack([returns, self._values]).double()
        error = columns[0] - columns[1]
        count = torch.tensor(float(len(returns)), dtype=torch.float64)
        moments = torch.stack([columns[1].sum(), columns[0].sum(), columns[0].square().sum(), error.sum(),
                               error.square().sum(), count])  # fmt: skip
        values, total, squares, errors, error_squares, count = self.data_ranks.sum(moments).tolist()
        variance = squares / count - (total / count) ** 2
        unexplained = error_squares / count - (errors / count) ** 2
        metrics = {"critic/value_mean": values / count, "critic/return_mean": total / count}
        if variance > 1e-12:
            metrics["critic/explained_variance"] = 1 - unexplained / variance
        return metrics
