"""Trains steps of a model of usual size with random weights, and prints seconds, operations and memory as JSON.

python large_steps.py PORT FOLDER CASE; the model is written to FOLDER, the case is one of CASES.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "learner"))

import numpy as np
import torch
from worlds import endpoints, make_config, make_trainer, pack_groups

from asyncrl.launch.memory import PROCESS_BYTES, Shape, learner_parts
from asyncrl.learner.distributed import process_group
from asyncrl.learner.metrics import device_peak
from asyncrl.types import NO_VERSION, Group, Trajectory

HALF_B: dict[str, Any] = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 32768,
}  # fmt: skip
"""Qwen2.5-0.5B."""
ONE_HALF_B: dict[str, Any] = HALF_B | {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12
}  # fmt: skip
"""Qwen2.5-1.5B."""
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "0.5B": (HALF_B, {"tokens_per_microbatch": 16384}),
    "1.5B": (ONE_HALF_B, {"tokens_per_microbatch": 16384, "gradient_checkpointing": True}),
}
GROUPS, GROUP_SIZE, PROMPT_TOKENS, MEAN_TOKENS, STEPS = 16, 8, 128, 512, 4


def make_groups(vocabulary: int) -> list[Group]:
    """Returns groups with a common prompt and completions of log-normal length."""
    rng = np.random.default_rng(0)
    made: list[Group] = []
    for ticket in range(GROUPS):
        prompt = rng.integers(0, vocabulary, PROMPT_TOKENS)
        members: list[Trajectory] = []
        for length in rng.lognormal(np.log(MEAN_TOKENS) - 0.5, 1.0, GROUP_SIZE).astype(int).clip(16, 4096):
            tokens = np.concatenate([prompt, rng.integers(0, vocabulary, length)]).astype(np.int32)
            mask = np.arange(len(tokens)) >= PROMPT_TOKENS
            logprobs = np.where(mask, -np.log(vocabulary), 0.0).astype(np.float32)
            versions = np.where(mask, 0, NO_VERSION).astype(np.int32)
            members.append(Trajectory(tokens, mask, logprobs, versions, "completed", float(rng.integers(2))))
        made.append(Group(ticket, 0, 0, ticket, "", 0, 0, members))
    return made


def main() -> None:
    port, folder, case = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    sizes, learner = CASES[case]
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with torch.device("cuda"):
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, dtype=torch.bfloat16))
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    config = make_config(
        folder,
        model={"dtype": "bfloat16"},
        learner=learner | {"zero_stage": 1, "lr": 1e-6},
        generator={"group_size": GROUP_SIZE, "max_new_tokens": 4096, "temperature": 1.0},
        replay={"groups_per_step": GROUPS, "max_staleness": 4},
    )
    shape = Shape.read(str(folder))
    assert shape is not None
    parts = learner_parts(config, shape, reference=None, critic=None, sends=False)
    groups, seconds = make_groups(sizes["vocab_size"]), list[float]()
    metrics: dict[str, float] = {}
    with process_group(endpoints(port), 0, 1, start_timeout_s=60, timeout_s=60) as ranks:
        trainer = make_trainer(config, ranks)
        torch.cuda.reset_peak_memory_stats()
        for step in range(1, STEPS + 1):
            started = time.perf_counter()
            metrics = trainer.train(pack_groups(config, groups), step=step)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        peak = device_peak(ranks.device)
    tokens = sum(len(trajectory.tokens) for group in groups for trajectory in group.trajectories)
    step_s = sorted(seconds[1:])[len(seconds[1:]) // 2]
    figures = {
        "tokens_per_s": tokens / step_s,
        "mfu": metrics["learner/flops"] / step_s / peak if peak else None,
        "first_step_s": seconds[0],
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "arithmetic_bytes": sum(parts.values()) - PROCESS_BYTES,
        "loss": metrics["learner/loss"],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
