"""The traced memory of a micro-batch against the tensors that autograd keeps, and predictions against measured peaks.

A size is trained in a separate process, whose baseline is its memory after a step with a tiny model. What only a GPU
has (kernels' workspaces, CUDA context) is compared in tests/gpu.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from memory_steps import TINY
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)
from worlds import make_config, make_model, single_groups, spawn

from asyncrl.config.config import Config
from asyncrl.launch.machine import find_port
from asyncrl.launch.memory import Parts, Shape, learner_parts
from asyncrl.learner.batch import MicroBatch, make_batch
from asyncrl.learner.model import attention
from asyncrl.learner.model.attention import SequenceParallel
from asyncrl.learner.model.loading import hidden_states, load_policy_model
from asyncrl.learner.model.memory_trace import META, LiveStorages, empty_model, trace

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 256,
}  # fmt: skip

FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "experts": Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96, tie_word_embeddings=True
    ),
}


def kept_bytes(config: Config, micro: MicroBatch, parallel: SequenceParallel | None = None) -> int:
    """Returns the bytes that a forward pass over packed rows keeps for its backward pass, all tensors but integers."""
    model = load_policy_model(config, config.model.path).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states, _ = hidden_states(model, micro, parallel)
    assert states.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_trace_counts_what_autograd_keeps(family: str, dtype: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(tmp_path)
    config = make_config(tmp_path, model={"dtype": dtype})
    (micro,) = make_batch(
        single_groups([96, 90, 80, 75] * 6, SIZES["vocab_size"]), tokens_per_microbatch=1 << 20
    ).micro_batches
    kept = kept_bytes(config, micro)
    model = empty_model(AutoConfig.from_pretrained(tmp_path), dtype=dtype)
    traced = trace(model, micro, on_gpu=False, exchanged=False)
    print(f"{family}, {dtype}: kept {kept:,}, traced {traced.forward_bytes:,}, {traced.forward_bytes / kept:.3f}")
    assert kept <= traced.forward_bytes < 1.1 * kept
    assert traced.peak_bytes > traced.forward_bytes
    shape = Shape.read(str(tmp_path))
    assert shape is not None
    assert shape.parameters == sum(p.numel() for p in AutoModelForCausalLM.from_config(FAMILIES[family]).parameters())
    assert (shape.active < shape.parameters) == (family == "experts")


@pytest.mark.parametrize("size", [2, 4])
def test_the_trace_counts_what_one_of_several_ranks_keeps(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks are left out; two key-value heads are repeated for four."""
    AutoModelForCausalLM.from_config(FAMILIES["llama"]).save_pretrained(tmp_path)
    config = make_config(tmp_path)
    (micro,) = make_batch(
        single_groups([96, 90, 80, 75] * 6, SIZES["vocab_size"]), tokens_per_microbatch=1 << 20
    ).micro_batches
    monkeypatch.setattr(attention.dist, "all_to_all_single", lambda received, values, group: None)
    alone, kept = kept_bytes(config, micro), kept_bytes(config, micro, SequenceParallel(0, size, None))  # pyright: ignore
    model = empty_model(AutoConfig.from_pretrained(tmp_path))
    traced = trace(model, micro, on_gpu=False, exchanged=False, sequence_parallel=size)
    print(f"{size} ranks: kept {kept:,}, alone {alone:,}, traced {traced.forward_bytes:,}")
    assert kept <= traced.forward_bytes < 1.1 * kept
    assert kept < 1.25 * alone / size


def test_live_storages_are_counted_once_and_until_they_are_freed() -> None:
    before = torch.empty(5, device=META)
    with LiveStorages() as live:
        live.ignore([before])
        tensor = torch.empty(10, device=META)
        view = tensor[2:]
        other = tensor + before.sum()
        assert live.num_bytes == 80
        del tensor
        assert live.num_bytes == 80, "the view keeps the storage"
        del view, other
        assert live.num_bytes == 0 and live.peak_bytes == 84
        torch.empty(3)
        assert live.num_bytes == 0, "only tensors on the meta device count"


MIB = 1 << 20

TOLERANCE = 0.1

MAX_NEW_TOKENS = 250

Case = tuple[int, int, int, bool, int, int]
"""Hidden size, layers, tokens of a micro-batch, checkpointing, ZeRO stage, ranks."""

CASES: list[Case] = [
    (384, 6, 1024, True, 0, 1),
    (512, 8, 2048, False, 0, 1),
    (384, 8, 512, False, 2, 1),
    (384, 8, 512, True, 3, 1),
    (512, 8, 1024, True, 3, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.timeout(480)
def test_the_prediction_is_within_a_tenth(case: Case, tmp_path: Path) -> None:
    hidden, layers, tokens, checkpointing, stage, ranks = case
    predicted, measured = predict_and_measure(tmp_path, case)
    total = sum(predicted.values())
    terms = ", ".join(f"{name} {num_bytes / MIB:.0f}" for name, num_bytes in predicted.items() if num_bytes >= MIB)
    line = (
        f"{hidden} x {layers}, {tokens} tokens, {'checkpointed' if checkpointing else 'plain'}, ZeRO {stage} x {ranks}"
        f": predicted {total / MIB:.0f} MiB, measured {measured / MIB:.0f} MiB, {total / measured - 1:+.1%} ({terms})"
    )
    print(line)
    assert abs(total / measured - 1) < TOLERANCE, line


def predict_and_measure(folder: Path, case: Case) -> tuple[Parts, int]:
    hidden, layers, tokens, checkpointing, stage, ranks = case
    torch.manual_seed(0)
    make_model(folder)
    make_model(folder / TINY)
    sizes: dict[str, Any] = {
        "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "vocab_size": 8192,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128, "tie_word_embeddings": True,
    }  # fmt: skip
    AutoModelForCausalLM.from_config(Qwen2Config(**sizes)).save_pretrained(folder)
    learner: dict[str, Any] = {
        "tokens_per_microbatch": tokens, "gradient_checkpointing": checkpointing, "zero_stage": stage,
    }  # fmt: skip
    generator = {"max_new_tokens": MAX_NEW_TOKENS}
    config = make_config(folder, learner=learner, generator=generator, launch={"learners": ranks})
    shape = Shape.read(str(folder))
    assert shape is not None
    predicted = learner_parts(config, shape, reference=None, critic=None, sends=False, on_gpu=False)
    (folder / "run.json").write_text(config.model_dump_json())
    spawn("memory_steps.py", folder / "run.json", folder, find_port(), ranks=ranks, timeout_s=420)
    return predicted, max(int((folder / f"peak-{rank}").read_text()) for rank in range(ranks))
