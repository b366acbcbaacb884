"""Trains three steps as one of the ranks that share sequences: two with every loss and with other settings, or, with
a file `four` in the folder of models, two pairs."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import save_file
from worlds import (
    CRITIC,
    copy_weights,
    endpoints,
    make_config,
    make_groups,
    make_trainer,
    pack_groups,
    partitioning,
    wanted,
)

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.learner import batch
from asyncrl.learner.distributed import Ranks, process_group
from asyncrl.learner.model.policy import Policy

ALL_TERMS: dict[str, Any] = {"kl_loss_coef": 0.1, "entropy_coef": 0.1}
WINDOW_OF_CORRECTION = {"level": "geometric", "mode": "mask", "low": 0.5, "high": 2.0, "mask_delta": 0.1}
RUNS: dict[str, dict[str, Any]] = {
    "zero2": {"algorithm": ALL_TERMS, "learner": {"zero_stage": 2}},
    "zero3": {"algorithm": ALL_TERMS, "learner": {"zero_stage": 3, "gradient_checkpointing": True}},
    "offload": {"learner": {"zero_stage": 3, "offload": "all"}},
    "critic": {**CRITIC, "learner": {"zero_stage": 3}},
    "masks": {
        "algorithm": {
            "loss": "decoupled_ppo",
            "correction": WINDOW_OF_CORRECTION,
            "aggregation": "seq-mean-token-mean",
        }
    },
    "unshared": {"algorithm": ALL_TERMS},
    "one-key-head": {"algorithm": ALL_TERMS},
    "minibatches": {"learner": {"minibatches": 2, "epochs": 2}},
    "lora": {"algorithm": ALL_TERMS, "learner": {"zero_stage": 3, "lora": {"rank": 4}}},
    "bfloat16": {"learner": {"zero_stage": 2}, "model": {"dtype": "bfloat16"}},
}
"""Settings by name, which two ranks and one rank train with."""


PAIRS = ("zero3", "critic")
"""The cases of two pairs of ranks."""


def train(name: str, models: Path, ranks: Ranks) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Returns the weights after three steps, and the metrics of all. In `unshared`, sequences share no prompt."""
    config = make_config(models / ("one-key-head" if name == "one-key-head" else "even"), **partitioning(RUNS[name], 0))
    unshared = patch.object(batch, "find_firsts", lambda tokens, *_: np.arange(len(tokens)))
    with unshared if name == "unshared" else nullcontext():
        return train_steps(config, ranks)


def train_steps(config: Config, ranks: Ranks) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    trainer = make_trainer(config, ranks)
    scalars: dict[str, float] = {}
    for step in (1, 2, 3):
        # Micro-batches of an odd number of tokens, with shared prompts and without, and of one token.
        groups = make_groups(2, seed=step, version=step - 1)
        mine = groups[ranks.of_data.rank :: ranks.of_data.count]
        metrics = trainer.train(pack_groups(config, mine), step=step)
        scalars |= {f"{step}/{name}": value for name, value in metrics.items()}
    return copy_weights(trainer.policy), scalars


def refused(config: Config, ranks: Ranks) -> str:
    try:
        Policy(config, ranks)
    except ConfigError as error:
        return str(error)
    return "no error"


def main(rank: int, port: int, models: Path, out: Path) -> None:
    torch.set_num_threads(1)
    count = 4 if (models / "four").exists() else 2
    with process_group(endpoints(port), rank, count, start_timeout_s=120, timeout_s=60, sequence_parallel=2) as ranks:
        for name in wanted(RUNS, out):
            weights, scalars = train(name, models, ranks)
            save_file(weights, out / f"{name}-{rank}.safetensors")
            (out / f"{name}-{rank}.json").write_text(json.dumps(scalars))
        (out / f"odd-{rank}.json").write_text(json.dumps(refused(make_config(models / "odd"), ranks)))
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
