"""The states of models leave their memory and come back, bit for bit, whatever DeepSpeed has made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import CRITIC, make_config, make_trainer, train_steps

from asyncrl.colocate import HostMemory
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model.saving import collect_state

CPU = torch.device("cpu")
RUNS: dict[str, dict[str, Any]] = {
    "zero0": {"learner": {"zero_stage": 0}},
    "bfloat16-zero2": {"learner": {"zero_stage": 2}, "model": {"dtype": "bfloat16"}},
    "zero3-critic": CRITIC | {"learner": {"zero_stage": 3}},
    "lora-zero3": {"learner": {"zero_stage": 3, "lora": {"rank": 4}}},
}
SLOW = ("zero3-critic", "lora-zero3")


@pytest.mark.parametrize("name", ["zero0", "bfloat16-zero2", *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)])
def test_training_continues_bit_for_bit(name: str, one_rank: Ranks, tiny_model: Path) -> None:
    config = make_config(tiny_model, **RUNS[name], steps=4)
    plain, moved = make_trainer(config, one_rank), make_trainer(config, one_rank)
    memory = HostMemory(CPU, always=True)
    train_steps(plain, (1, 2, 3))
    for step in (1, 2, 3):
        weights = sum(weight.nbytes for weight in moved.policy.flat_weights())
        sent = [tensor for _, tensor in moved.policy.sent_slices()]
        others = memory.offload(moved.tensors(), keep=sent)
        assert others >= (step > 1) * weights and all(tensor.untyped_storage().nbytes() for tensor in sent)
        num_bytes = memory.offload(moved.tensors())
        assert num_bytes - others <= weights
        assert num_bytes and (step == 1 or num_bytes >= 2 * weights), "the two moments of each weight are moved, too"
        storages = [tensor.untyped_storage() for tensor in moved.tensors() if tensor.device == CPU]
        # On a CPU, weights as they were loaded are a file's.
        assert memory.is_moved and not any(storage.nbytes() for storage in storages if storage.resizable())
        memory.reload()
        train_steps(moved, (step,))
    expected, found = collect_state(plain.policy), collect_state(moved.policy)
    assert expected.keys() == found.keys() and len(expected) > 10
    assert all(torch.equal(expected[key], found[key]) for key in expected)
