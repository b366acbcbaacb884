"""The optimizers against torch's own on the same gradients, and the sizes of their states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Muon, Optimizer
from worlds import LR, copy_weights, gradients_before_step, make_config, make_groups, make_trainer, pack_groups

from asyncrl.launch.memory import Shape, optimizer_bytes
from asyncrl.learner.critic import CriticModel
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model.engine import MuonWithAdamW, TrainedModel, layer_matrices

NORM = 100.0
"""A maximum norm that clips nothing."""


def muon(matrices: list[nn.Parameter], others: list[nn.Parameter]) -> list[Optimizer]:
    options: dict[str, Any] = {"lr": LR, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    return [Muon(matrices, momentum=0.9, **options), AdamW(others, lr=LR, weight_decay=0.1, betas=(0.9, 0.95))]


def adafactor(matrices: list[nn.Parameter], others: list[nn.Parameter]) -> list[Optimizer]:
    return [Adafactor([*matrices, *others], lr=LR, weight_decay=0.1, beta2_decay=-0.7, d=2.0)]


@pytest.mark.parametrize(
    ("name", "options", "make"),
    [("muon", {"momentum": 0.9}, muon), ("adafactor", {"beta2_decay": -0.7, "d": 2.0}, adafactor)],
)
def test_updates_are_those_of_torch(
    name: str, options: dict[str, Any], make: Any, one_rank: Ranks, tiny_model: Path
) -> None:
    learner = {"optimizer": name, "optimizer_options": {"weight_decay": 0.1, **options}, "max_grad_norm": NORM}
    trainer = make_trainer(make_config(tiny_model, learner=learner), one_rank)
    policy = trainer.policy
    matrices = {id(parameter) for parameter in layer_matrices(policy.model)}
    chosen = {n for n, p in policy.model.named_parameters() if id(p) in matrices}
    assert "model.embed_tokens.weight" not in chosen and "model.layers.0.mlp.up_proj.weight" in chosen
    assert len(chosen) == 2 * 7
    own = {n: nn.Parameter(weight) for n, weight in copy_weights(policy).items()}
    expected = make([p for n, p in own.items() if n in chosen], [p for n, p in own.items() if n not in chosen])
    for step in (1, 2, 3):
        with gradients_before_step(policy) as gradients:
            trainer.train(pack_groups(trainer.config, make_groups(seed=step)), step=step)
        for parameter, gradient in gradients.items():
            own[parameter].grad = gradient
        for optimizer in expected:
            optimizer.step()
    for parameter, weight in copy_weights(policy).items():
        torch.testing.assert_close(weight, own[parameter].detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_the_learning_rate_is_the_schedules(name: str, one_rank: Ranks, tiny_model: Path) -> None:
    settings = {"optimizer": name, "warmup_steps": 4, "max_grad_norm": NORM}
    trainer = make_trainer(make_config(tiny_model, learner=settings), one_rank)
    before = copy_weights(trainer.policy)
    trainer.train(pack_groups(trainer.config, make_groups()), step=1)
    assert {group["lr"] for group in trainer.policy.optimizer.param_groups} == {LR / 4}
    assert all(not torch.equal(before[n], weight) for n, weight in copy_weights(trainer.policy).items())


def test_the_head_of_a_critic_is_not_muons(one_rank: Ranks, tiny_model: Path) -> None:
    config = make_config(tiny_model, learner={"optimizer": "muon"}, algorithm={"advantage": "gae"})
    critic = CriticModel(config, one_rank)
    assert isinstance(critic.optimizer, MuonWithAdamW)
    own = {id(p) for group in critic.optimizer.adamw.param_groups for p in group["params"]}
    named = dict(critic.model.named_parameters())
    assert {n for n, p in named.items() if id(p) in own and p.ndim == 2} == {
        "model.embed_tokens.weight",
        "score.weight",
    }


def state_bytes(model: TrainedModel) -> int:
    tensors: list[Tensor] = [t for state in model.optimizer.state.values() for n, t in state.items() if n != "step"]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_states_have_at_most_the_estimated_size(name: str, one_rank: Ranks, tiny_model: Path) -> None:
    config = make_config(tiny_model, learner={"optimizer": name})
    trainer = make_trainer(config, one_rank)
    trainer.train(pack_groups(config, make_groups()), step=1)
    shape = Shape.read(str(tiny_model))
    assert shape is not None
    kept, estimate = state_bytes(trainer.policy), optimizer_bytes(config, shape, shape.parameters)
    print(name, kept, estimate, kept / estimate)
    assert kept <= estimate
    assert kept == estimate if name == "adamw" else kept > 0.4 * estimate
