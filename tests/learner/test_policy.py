"""The policy's results against a plain computation of one trajectory at a time, its optimizers, and other devices."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from worlds import (
    LR,
    make_config,
    make_groups,
    make_trainer,
    pack_groups,
    record,
)

import asyncrl.learner.model.engine as engine_module
from asyncrl.algorithms.advantages import grpo
from asyncrl.algorithms.losses import LOSSES, PolicyTerms
from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.algorithm import make_algorithm
from asyncrl.learner.batch import make_batch
from asyncrl.learner.critic import ValueNetwork
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model import logprob_head
from asyncrl.learner.model.loading import load_policy_model
from asyncrl.learner.model.policy import Policy, PolicyNetwork
from asyncrl.types import Group
from tests.helpers.far import FAR, far_device, move, plain_engine

OBJECTIVES: list[dict[str, Any]] = [
    {"loss": "decoupled_ppo"},
    {"loss": "decoupled_ppo", "correction": {"level": "sequence", "mode": "mask", "low": 1e-6, "high": 5.0}},
    {"loss": "ppo_clip", "aggregation": "seq-mean-token-mean"},
    {"loss": "reinforce_is", "loss_options": {"cap": 1.5}, "aggregation": "seq-mean-token-sum-norm"},
    {"loss": "decoupled_ppo", "entropy_coef": 0.7, "aggregation": "seq-mean-token-mean"},
]


def plain_logprobs(model: Any, tokens: np.ndarray, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns log-prob and entropy of every token except the first."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    logprobs = torch.log_softmax(model(input_ids=ids.unsqueeze(0)).logits[0, :-1] / temperature, dim=-1)
    entropies = -(logprobs.exp() * logprobs).sum(dim=-1)
    return logprobs.gather(-1, ids[1:, None]).squeeze(-1), entropies


def plain_gradients(config: Config, groups: list[Group]) -> tuple[float, dict[str, Tensor]]:
    """Returns the step's loss and its gradient, computed without packing, micro-batches or chunks."""
    model = AutoModelForCausalLM.from_pretrained(config.model.path, attn_implementation="eager", dtype=torch.float64)
    algorithm = make_algorithm(config)
    columns: dict[str, list[Tensor]] = {name: [] for name in ("logprobs", "behavior", "advantages", "seq", "entropies")}
    for group in groups:
        rewards = torch.tensor([row.reward for row in group.firsts], dtype=torch.float64)
        advantages = grpo(rewards, torch.zeros(len(rewards), dtype=torch.int64))
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            mask = torch.from_numpy(trajectory.action_mask[1:])
            logprobs, entropies = plain_logprobs(model, trajectory.tokens, config.generator.temperature)
            columns["entropies"].append(entropies[mask])
            columns["logprobs"].append(logprobs[mask])
            columns["behavior"].append(torch.from_numpy(trajectory.behavior_logprobs[1:])[mask].double())
            columns["advantages"].append(advantage.expand(int(mask.sum())))
            columns["seq"].append(torch.full((int(mask.sum()),), len(columns["seq"])))
    logprobs, behavior, advantages, seq, entropies = (torch.cat(parts) for parts in columns.values())
    token_loss = algorithm.loss(PolicyTerms(logprobs, logprobs.detach(), behavior, advantages, seq))
    loss = algorithm.aggregate(token_loss - config.algorithm.entropy_coef * entropies, seq)
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("budget", [1, 60])
@pytest.mark.parametrize("algorithm", OBJECTIVES, ids=lambda a: f"{a['loss']}-{len(a)}")
def test_packed_micro_batches_have_the_gradient_of_the_complete_batch(
    algorithm: dict[str, Any], budget: int, one_rank: Ranks, tiny_model: Path
) -> None:
    config = make_config(tiny_model, algorithm=algorithm, learner={"tokens_per_microbatch": budget})
    groups = make_groups(4)
    tensors, scalars = record(config, one_rank, groups)
    loss, gradients = plain_gradients(config, groups)
    assert scalars["1/learner/loss"] == pytest.approx(loss, abs=1e-5)
    scale = max(float(g.abs().max()) for g in gradients.values())
    assert scale > 0
    for name, expected in gradients.items():
        difference = (tensors[f"gradient/1/{name}"] - expected).abs().max()
        assert difference < 1e-5 * scale, name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_a_bfloat16_model_are_added_up_in_float32(stage: int, one_rank: Ranks, tiny_model: Path) -> None:
    config = make_config(tiny_model, model={"dtype": "bfloat16"}, learner={"zero_stage": stage})
    groups = make_groups()
    assert len(pack_groups(config, groups).micro_batches) > 5
    tensors, _ = record(config, one_rank, groups)
    gradients = [tensor for name, tensor in tensors.items() if name.startswith("gradient/")]
    rounded = [gradient == gradient.bfloat16().float() for gradient in gradients]
    assert torch.cat([r.flatten() for r in rounded]).float().mean() < 0.2


@pytest.mark.parametrize("chunked", [False, True])
def test_logprobs_are_those_of_the_sampling_temperature(
    chunked: bool, one_rank: Ranks, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunked:
        monkeypatch.setattr(logprob_head, "CHUNK_BYTES", 4 * 48 * 5)
    config = make_config(tiny_model, generator={"temperature": 0.35})
    policy = Policy(config, one_rank)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager", dtype=torch.float64)
    groups = make_groups(3)
    by_name = {(g.ticket, n): t for g in groups for n, t in enumerate(g.trajectories)}
    for micro in make_batch(groups, tokens_per_microbatch=100).micro_batches:
        logprobs, entropies = policy.forward(micro)
        assert logprobs.dtype is torch.float32 and logprobs.requires_grad and not entropies.requires_grad
        for number, name in enumerate(micro.names):
            trajectory = by_name[name]
            expected = plain_logprobs(model, trajectory.tokens, 0.35)
            for got, want in zip((logprobs, entropies), expected, strict=True):
                want = want[torch.from_numpy(trajectory.action_mask[1:])].float()
                torch.testing.assert_close(got[micro.seq == number], want, atol=2e-5, rtol=1e-5)


def test_metrics_mean_what_they_say(one_rank: Ranks, tiny_model: Path) -> None:
    config = make_config(tiny_model, algorithm={"loss": "decoupled_ppo"})
    trainer = make_trainer(config, one_rank)
    policy = trainer.policy
    groups = make_groups(4, version=3)
    batch = make_batch(groups, tokens_per_microbatch=60)
    of_sequence = grpo(batch.rewards, batch.group).float()
    columns: dict[str, list[Tensor]] = {name: [] for name in ("ratio", "advantage", "staleness", "entropy")}
    with torch.no_grad():
        for micro in batch.micro_batches:
            logprobs, entropies = policy.network(micro)
            columns["ratio"].append((logprobs - micro.behavior_logprobs).double())
            columns["advantage"].append(of_sequence[batch.seq[micro.span]])
            columns["staleness"].append(3 - micro.versions)
            columns["entropy"].append(entropies)
    log_ratio, advantage, staleness, entropy = (torch.cat(parts) for parts in columns.values())
    ratio, signal = log_ratio.exp(), advantage != 0
    kl, capped = ratio - 1 - log_ratio, ratio.clamp(max=2.0)
    metrics = trainer.train(batch, step=4)
    expected = {
        "learner/tokens": len(ratio),
        "learner/entropy": entropy.mean(),
        "learner/clip_fraction": 0.0,
        "learner/lr": LR,
        "correction/weight_mean": ratio[signal].clamp(max=2.0).mean(),
        "correction/capped_fraction": (ratio[signal] > 2.0).double().mean(),
        "correction/ess": ratio.sum() ** 2 / (len(ratio) * ratio.square().sum()),
        "correction/ess_capped": capped.sum() ** 2 / (len(ratio) * capped.square().sum()),
        "correction/behavior_kl": kl.mean(),
        "correction/mismatch_kl": kl[staleness == 0].mean(),
    }
    assert 0 < int((staleness == 0).sum()) < len(staleness) and not signal.all()
    for name, value in expected.items():
        assert metrics.pop(name) == pytest.approx(float(value), rel=1e-5), name
    for bucket in (0, 1):
        own, chosen = ratio[staleness == bucket], staleness == bucket
        ess = own.sum() ** 2 / (len(own) * own.square().sum())
        expected = {
            "tokens_fraction": chosen.double().mean(), "ratio_mean": own.mean(), "ratio_max": own.max(),
            "kl": kl[chosen].mean(), "ess": ess, "clip_positive": 0.0, "clip_negative": 0.0, "mask_positive": 0.0,
            "mask_negative": 0.0,
        }  # fmt: skip
        for name, value in expected.items():
            assert metrics.pop(f"staleness/{bucket}/{name}") == pytest.approx(float(value), rel=1e-5), name
    of_updates = {name for name in metrics if not name.startswith("batch/")}
    assert of_updates == {
        "learner/loss", "learner/policy_loss", "learner/grad_norm", "learner/skipped_updates", "learner/flops",
    }  # fmt: skip


def test_models_that_cannot_be_trained_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.path = '.*nowhere': the model cannot be loaded"):
        load_policy_model(make_config(tiny_model), str(tmp_path / "nowhere"))
    pickled = tmp_path / "pickled"
    shutil.copytree(tiny_model, pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"algorithm.reference = '.*pickled': the model cannot be loaded: .*neither model.safetensors"
    ):
        load_policy_model(make_config(tiny_model), str(pickled), "algorithm.reference")
    from transformers import Gemma2Config

    capped = AutoModelForCausalLM.from_config(
        Gemma2Config(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, head_dim=8,
        )
    )  # fmt: skip
    capped.save_pretrained(tmp_path / "capped")
    with pytest.raises(ConfigError, match="models with final_logit_softcapping cannot be trained"):
        load_policy_model(make_config(tiny_model), str(tmp_path / "capped"))


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
