"""A training step on a device other than the CPU produces the CPU's results, and does not mix tensors of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import make_config, make_groups, make_trainer, pack_groups

import asyncrl.learner.model.engine as engine_module
from asyncrl.algorithms.losses import LOSSES
from asyncrl.config.config import Config
from asyncrl.learner.critic import ValueNetwork
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model.policy import PolicyNetwork
from tests.helpers.far import FAR, FarTensor, far_device, move, plain_engine

CASES: dict[str, dict[str, Any]] = {
    **{loss: {"algorithm": {"loss": loss}, "learner": {"minibatches": 2}} for loss in LOSSES if loss != "vtrace"},
    "vtrace": {"algorithm": {"advantage": "vtrace", "loss": "vtrace"}},
    "critic, reference, whitening": {
        "algorithm": {"advantage": "gae", "whiten": True, "kl_reward_coef": 0.1, "kl_loss_coef": 0.1},
        "learner": {"epochs": 2},
    },
    "critic alone": {"algorithm": {"advantage": "gae"}, "critic": {"warmup_steps": 9, "clip": None}},
    "loglinear": {"algorithm": {"loss": "decoupled_ppo", "proximal": "loglinear"}, "learner": {"minibatches": 2}},
    "masks": {
        "algorithm": {
            "loss": "decoupled_ppo",
            "correction": {"level": "geometric", "mode": "mask", "low": 0.5, "high": 2.0, "mask_delta": 0.1},
            "aggregation": "seq-mean-token-mean",
        }
    },
    "bounded divergence": {"algorithm": {"max_divergence": 0.1}},
}  # fmt: skip


@pytest.fixture
def train(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, float]]:
    """Trains two steps on the device with the settings. Returns the metrics of the second step, after checking that all
    weights are on the device."""
    monkeypatch.setattr(engine_module.deepspeed, "initialize", plain_engine)

    def run(device: torch.device, sections: dict[str, Any]) -> dict[str, float]:
        config: Config = make_config(tiny_model, **sections)
        trainer = make_trainer(config, Ranks(0, 1, device))
        for step in (1, 2):
            metrics = trainer.train(pack_groups(config, make_groups(3, seed=step, version=step - 1)), step=step)
        assert all(weight.device == device for _, weight in trainer.policy.weights())
        return metrics

    return run


@pytest.mark.parametrize("sections", CASES.values(), ids=CASES)
def test_a_step_on_another_device(
    sections: dict[str, Any], train: Callable[..., dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(torch.device("cpu"), sections)
    for network in (PolicyNetwork, ValueNetwork):
        monkeypatch.setattr(network, "to", lambda self, device: move(self))
    with far_device():
        metrics = train(FAR, sections)
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_device_refuses_what_cuda_refuses() -> None:
    near = torch.arange(3.0)
    with far_device():
        far = near.to(FAR)
        assert isinstance(far, FarTensor) and torch.tensor([1.0], device=FAR).device == FAR
        assert torch.equal((far * torch.tensor(2.0)).cpu(), near * 2)
        for mixed in (
            lambda: far + near,
            lambda: torch.stack([far.sum(), near.sum()]),
            lambda: torch.cat([far, near]),
            lambda: far[torch.tensor([1])].add_(near[:1]),
        ):
            with pytest.raises(RuntimeError, match=r"tensors on far:0 and cpu"):
                mixed()
