"""The operations of a step against those that torch counts, and the fraction of a device's peak."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen2MoeConfig
from worlds import make_config, make_groups, make_trainer, pack_groups

from asyncrl.learner.batch import make_batch
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.metrics import ModelFlops, utilization

HIDDEN, LAYERS, QUERY, KEY_VALUE, INTERMEDIATE, VOCABULARY = 32, 2, 32, 16, 64, 48
"""Sizes of the tiny model."""


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


def test_mfu_is_a_fraction_of_what_all_devices_could_do() -> None:
    metrics = {"learner/flops": 6e12, "learner/step_s": 3.0}
    assert utilization(metrics, ranks=2, peak=4e12) == {"learner/mfu": 0.25}
    assert utilization(metrics, ranks=2, peak=None) == {}
    assert utilization(metrics | {"learner/step_s": 0.0}, ranks=2, peak=4e12) == {}
