"""The operations of a step against those that torch counts, and the fraction of a device's peak."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen2MoeConfig
from worlds import make_config, make_groups, make_trainer, pack_groups

from asyncrl.learner.batch import make_batch
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.metrics import ModelFlops, device_peak, peak_flops, utilization

HIDDEN, LAYERS, QUERY, KEY_VALUE, INTERMEDIATE, VOCABULARY = 32, 2, 32, 16, 64, 48
"""Sizes of the tiny model."""
MATRICES = LAYERS * (2 * HIDDEN * QUERY + 2 * HIDDEN * KEY_VALUE + 3 * HIDDEN * INTERMEDIATE)


def test_sizes_are_those_of_the_matrices_without_the_embedding(tiny_model: Path) -> None:
    found = ModelFlops.of(AutoModelForCausalLM.from_pretrained(tiny_model))
    assert found == ModelFlops(layers=MATRICES, head=VOCABULARY * HIDDEN, attention=LAYERS * QUERY)


def test_of_a_mixture_of_experts_only_those_of_a_token_count() -> None:
    config = Qwen2MoeConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24,
        decoder_sparse_step=1,
    )  # fmt: skip
    with torch.device("meta"):
        found = ModelFlops.of(AutoModelForCausalLM.from_config(config))
    experts, shared = 2 * 3 * HIDDEN * 16, 3 * HIDDEN * 24 + HIDDEN
    assert found.layers == 4 * HIDDEN * HIDDEN + experts + shared + 8 * HIDDEN
    assert found.head == VOCABULARY * HIDDEN


def test_a_forward_pass_has_the_operations_that_torch_counts(one_rank: Ranks, tiny_model: Path) -> None:
    trainer = make_trainer(make_config(tiny_model), one_rank)
    (group,) = make_groups(1)
    group.trajectories = group.trajectories[:1]
    (micro,) = make_batch([group], tokens_per_microbatch=100).micro_batches
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # counts matrices
        trainer.policy.score(micro)
    tokens, pair = len(micro.input_ids), 4 * LAYERS * QUERY
    unneeded = pair * (tokens**2 - tokens * (tokens + 1) // 2)
    assert counter.get_total_flops() - unneeded == trainer._flops.forward(micro)


def test_a_common_prefix_counts_once_and_attention_counts_the_tokens_before(one_rank: Ranks, tiny_model: Path) -> None:
    config = make_config(tiny_model)
    (group,) = make_groups(1)
    flops = ModelFlops(layers=1000, head=100, attention=10)
    (micro,) = make_batch([group], tokens_per_microbatch=1000).micro_batches
    lengths = [len(one.tokens) for one in group.trajectories]
    shared = len(micro.input_ids) - len(micro.layout.computed)
    assert 0 < shared < sum(lengths)
    positions = micro.position_ids[micro.layout.computed].tolist()
    attended = sum(position + 1 for position in positions)
    assert flops.forward(micro) == 2000 * (sum(lengths) - shared) + 200 * len(micro.targets) + 40 * attended
    batch = pack_groups(config, [group])
    assert flops.step(batch, passes=3) == 3 * sum(flops.forward(one) for one in batch.micro_batches)


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({}, 3),
        ({"learner": {"epochs": 2, "tokens_per_microbatch": 40}, "algorithm": {"kl_loss_coef": 0.1}}, 6 + 2),
        ({"critic": {"warmup_steps": 1}, "algorithm": {"advantage": "gae", "loss": "ppo_clip"}}, 1),
    ],
    ids=["an update", "two updates, proximal and reference", "the critic's warm-up"],
)
def test_the_passes_of_a_step(settings: dict, passes: int, one_rank: Ranks, tiny_model: Path) -> None:  # type: ignore[type-arg]
    config = make_config(tiny_model, **settings)
    trainer = make_trainer(config, one_rank)
    batch = pack_groups(config, make_groups(2))
    metrics = trainer.train(batch, step=1)
    assert metrics["learner/flops"] == passes * sum(trainer._flops.forward(micro) for micro in batch.micro_batches)


def test_mfu_is_a_fraction_of_what_all_devices_could_do() -> None:
    metrics = {"learner/flops": 6e12, "learner/step_s": 3.0}
    assert utilization(metrics, ranks=2, peak=4e12) == {"learner/mfu": 0.25}
    assert utilization(metrics, ranks=2, peak=None) == {}
    assert utilization(metrics | {"learner/step_s": 0.0}, ranks=2, peak=4e12) == {}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12), ("NVIDIA H20", 148e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA A10", 125e12),
        ("NVIDIA L40S", 362e12), ("NVIDIA L4", 121e12), ("NVIDIA GeForce RTX 4090", 165.2e12), ("NVIDIA B200", 2250e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("Tesla T4", None),
        ("NVIDIA A1000", None),
    ],
)  # fmt: skip
def test_peaks_are_by_the_words_of_a_device_s_name(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_a_cpu_has_no_peak() -> None:
    assert device_peak(torch.device("cpu")) is None
