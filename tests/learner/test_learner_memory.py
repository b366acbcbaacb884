"""The launcher's estimate of the learner's memory against the tensors that autograd and DeepSpeed keep. Measured on a
CPU; GPU kernels may keep other tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from worlds import make_config

from asyncrl.config import Config
from asyncrl.launch.resources.memory import HEAD_BYTES, Shape, activation_bytes
from asyncrl.learner.collate import make_batch
from asyncrl.learner.model import logprob_head
from asyncrl.learner.model.loading import hidden_states, load_policy_model
from asyncrl.types import NO_VERSION, Group, Trajectory

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 256,
}  # fmt: skip


def groups_of(lengths: list[int]) -> list[Group]:
    """Returns groups of one trajectory each, so that no trajectories share a prompt."""
    made: list[Group] = []
    for ticket, length in enumerate(lengths):
        tokens = np.random.default_rng(ticket).integers(0, SIZES["vocab_size"], length).astype(np.int32)
        mask = np.arange(length) > 0
        trajectory = Trajectory(
            tokens=tokens,
            action_mask=mask,
            behavior_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
            versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
            status="completed",
            reward=1.0,
        )
        made.append(
            Group(
                ticket=ticket, attempt=1, generator=0, row=ticket, data_source="", start_version=0, end_version=0,
                trajectories=[trajectory], started_s=0.0, finished_s=0.0,
            )
        )  # fmt: skip
    return made


def kept_bytes(config: Config) -> tuple[int, int]:
    """Returns the bytes that a forward pass over packed rows keeps for its backward pass, and the number of tokens."""
    model = load_policy_model(config, config.model.path).train()
    (micro,) = make_batch(groups_of([96, 90, 80, 75] * 6), tokens_per_microbatch=1 << 20).micro_batches
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states, _ = hidden_states(model, micro)
    assert states.requires_grad
    return sum(kept.values()), len(micro.input_ids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_estimated_tightly_from_above(dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    config = make_config(tmp_path, model={"dtype": dtype})
    shape = Shape.read(str(tmp_path))
    assert shape is not None
    assert shape.parameters == sum(p.numel() for p in LlamaForCausalLM(LlamaConfig(**SIZES)).parameters())
    kept, tokens = kept_bytes(config)
    estimate = activation_bytes(config, shape, tokens)
    print(dtype, kept, estimate, kept / estimate)
    assert 0.6 * estimate < kept < estimate


def test_chunks_of_logits_have_the_estimated_size() -> None:
    assert HEAD_BYTES == 3 * logprob_head.CUDA_CHUNK_BYTES
