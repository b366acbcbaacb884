"""The predicted memory of the learner against the measured peak of real training on this CPU.

Each size is trained in a process of its own, whose baseline is its memory after a step with a tiny model. What only a
GPU has (kernels' workspaces, CUDA context) is compared in tests/gpu.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from memory_steps import TINY
from transformers import AutoModelForCausalLM, Qwen2Config
from worlds import make_config, make_model, spawn

from asyncrl.launch.machine import find_port
from asyncrl.launch.memory import Parts, Shape, learner_parts

MIB = 1 << 20
TOLERANCE = 0.1
MAX_NEW_TOKENS = 250

Case = tuple[int, int, int, bool, int, int]
"""Hidden size, layers, tokens of a micro-batch, checkpointing, ZeRO stage, ranks."""
CASES: list[Case] = [
    (384, 6, 1024, True, 0, 1),
    (256, 8, 1024, False, 0, 1),
    (256, 8, 1024, True, 0, 1),
    (384, 6, 1024, False, 0, 1),
    (512, 4, 1024, False, 0, 1),
    (512, 4, 1024, True, 0, 1),
    (512, 8, 2048, False, 0, 1),
    (512, 8, 2048, True, 0, 1),
    (768, 12, 1024, True, 0, 1),
    (384, 8, 512, False, 2, 1),
    (384, 8, 512, True, 2, 1),
    (384, 8, 512, False, 3, 1),
    (384, 8, 512, True, 3, 1),
    (512, 8, 1024, False, 3, 2),
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
    codes = spawn("memory_steps.py", folder / "run.json", folder, find_port(), ranks=ranks, timeout_s=420)
    assert codes == [0] * ranks, [(folder / f"{rank}.log").read_text()[-2000:] for rank in range(ranks)]
    return predicted, max(int((folder / f"peak-{rank}").read_text()) for rank in range(ranks))
