"""One of two learner ranks: saves its training state half-way, goes on from it, and fails to write a checkpoint."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from worlds import STATE_RUNS, endpoints, make_config, make_trainer, train_steps

import asyncrl.learner.engine as engine_module
import asyncrl.learner.policy as policy_module
from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.learner.distributed import Ranks, connected
from asyncrl.learner.parts import Files, tensors_file
from asyncrl.learner.saving import Checkpoints
from asyncrl.learner.state import collect_state, restore_state


def halve(name: str, config: Config, ranks: Ranks, out: Path) -> None:
    """Steps 1 to 4 in one go, and with another engine from step 3 on; the states after 2 and, of both, after 4."""
    whole = make_trainer(config, ranks)
    train_steps(whole, (1, 2))
    half = collect_state(whole.policy)
    (out / name / "2").mkdir(parents=True, exist_ok=True)
    save_file(half, out / name / "2" / f"rank-{ranks.rank}.safetensors")
    train_steps(whole, (3, 4))
    ranks.any(False)
    second = make_trainer(config, ranks)
    restore_state(second.policy, out / name / "2")
    restored = collect_state(second.policy)
    train_steps(second, (3, 4))
    states = {
        "half": half,
        "restored": restored,
        "4": collect_state(whole.policy),
        "again": collect_state(second.policy),
    }
    tensors = {f"{when}/{key}": tensor for when, state in states.items() for key, tensor in state.items()}
    save_file(tensors, out / name / f"{ranks.rank}.safetensors")


def fail_to_write(ranks: Ranks, config: Config, out: Path) -> str:
    """Rank 1 may write no large file."""
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    checkpoints = Checkpoints(config, out / "checkpoints", ranks)

    def snapshot(folder: Path) -> Files:
        return {f"policy/rank-{ranks.rank}.safetensors": tensors_file({"weight": torch.zeros(1 << 16)})}

    checkpoints.save(50, snapshot, reward=None)
    try:
        while True:
            ranks.raise_together(checkpoints.failure())
            time.sleep(0.05)
    except RunError as error:
        checkpoints.close()
        return str(error)


def main(rank: int, port: int, model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    original = engine_module.deepspeed_config

    def partition_more(config: Config) -> dict[str, Any]:
        settings = original(config)
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 1000  # some are gathered always
        return settings

    engine_module.deepspeed_config = policy_module.deepspeed_config = partition_more
    with connected(endpoints(port), rank, 2, start_timeout_s=60, timeout_s=30) as ranks:
        for name, sections in STATE_RUNS.items():
            halve(name, make_config(model, **sections), ranks, out)
        text = fail_to_write(ranks, make_config(model), out)
    (out / f"failed-{rank}.json").write_text(json.dumps(text))
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
