"""The optimizers that `learner.optimizer` names, all of torch.

AdamW works on any part of a parameter. Muon and Adafactor work on complete matrices, which DeepSpeed does not pass on
with ZeRO from stage 1 on, nor with bfloat16: the optimizer gets flat parts of all parameters. `Config` refuses that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Muon, Optimizer
from transformers import PreTrainedModel

from asyncrl.config.training import LearnerConfig

STEP = "step"
"""Name of the number of updates in an optimizer's state."""


class MuonWithAdamW(Optimizer):
    """Muon for the matrices of the layers and AdamW for all other parameters, as both were published to be used
    (kellerjordan.github.io/posts/muon). Muon's updates are scaled to the size of AdamW's, so that both have the same
    learning rate and weight decay (arXiv:2502.16982)."""

    def __init__(
        self, matrices: Sequence[nn.Parameter], others: Sequence[nn.Parameter], settings: LearnerConfig, lr: float
    ) -> None:
        super().__init__([*matrices, *others], {"lr": lr})
        options = settings.optimizer_options
        self.muon = Muon(
            matrices,
            lr=lr,
            weight_decay=options.weight_decay,
            momentum=options.momentum,
            nesterov=options.nesterov,
            adjust_lr_fn="match_rms_adamw",
        )
        self.adamw = _adamw(others, settings, lr)
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]
        self.muon.state = self.adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates the parameters. There must be no closure."""
        assert closure is None
        self.muon.step()
        self.adamw.step()


def make_optimizer(settings: LearnerConfig, model: PreTrainedModel, network: nn.Module, *, lr: float) -> Optimizer:
    """Returns the optimizer of the trained parameters of `network`, in which `model` is wrapped."""
    options = settings.optimizer_options
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    if settings.optimizer == "adafactor":
        return Adafactor(
            parameters, lr=lr, beta2_decay=options.beta2_decay, d=options.d, weight_decay=options.weight_decay
        )
    if settings.optimizer == "muon":
        matrices = layer_matrices(model)
        chosen = {id(parameter) for parameter in matrices}
        return MuonWithAdamW(matrices, [p for p in parameters if id(p) not in chosen], settings, lr)
    return _adamw(parameters, settings, lr)


def layer_matrices(model: PreTrainedModel) -> list[nn.Parameter]:
    """Returns the weight matrices of the model's layers: neither embeddings nor a head."""
    body = model.base_model
    embeddings = {id(p) for module in body.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    return [parameter for parameter in body.parameters() if parameter.ndim == 2 and id(parameter) not in embeddings]


def first_state(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Returns the state of a parameter before its first update, in which the optimizer would create it."""
    if isinstance(optimizer, MuonWithAdamW):
        groups = optimizer.muon.param_groups
        optimizer = (
            optimizer.muon if any(parameter is p for group in groups for p in group["params"]) else optimizer.adamw
        )
    if isinstance(optimizer, Muon):
        return {"momentum_buffer": torch.zeros_like(parameter, memory_format=torch.preserve_format)}
    if isinstance(optimizer, Adafactor):
        state = {STEP: torch.zeros(())}
        if parameter.ndim < 2:
            return state | {"variance": torch.zeros_like(parameter, memory_format=torch.preserve_format)}
        rows, columns = [*parameter.shape[:-1], 1], [*parameter.shape[:-2], 1, parameter.shape[-1]]
        return state | {"row_var": parameter.new_zeros(rows), "col_var": parameter.new_zeros(columns)}
    state = {STEP: torch.zeros((), dtype=torch.float32, device=parameter.device)}
    names = ("exp_avg", "exp_avg_sq")
    return state | {n: torch.zeros_like(parameter, memory_format=torch.preserve_format) for n in names}


def _adamw(parameters: Sequence[nn.Parameter], settings: LearnerConfig, lr: float) -> AdamW:
    options = settings.optimizer_options
    return AdamW(parameters, lr=lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay, fused=True)
