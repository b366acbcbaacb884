"""Runs one of two learner ranks: trains at every ZeRO stage, raises errors, and loses the other rank."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from worlds import (
    CRITIC,
    LORA,
    SKIPS,
    copy_weights,
    endpoints,
    make_config,
    make_groups,
    make_trainer,
    pack_groups,
    partitioning,
    record,
    wanted,
)

from asyncrl.config.config import Config
from asyncrl.errors import AsyncrlError
from asyncrl.learner import update
from asyncrl.learner.distributed import Ranks, process_group
from asyncrl.learner.loop import Learner
from asyncrl.learner.model import logprob_head
from asyncrl.types import Shard

RUNS: dict[str, dict[str, Any]] = {
    "critic-zero0": {**CRITIC, "learner": {"zero_stage": 0}},
    "critic-zero3": {**CRITIC, "learner": {"zero_stage": 3}},
    "zero0": {"learner": {"zero_stage": 0}},
    "epochs": {"learner": {"zero_stage": 2, "minibatches": 3, "epochs": 2}},
    "zero2": {"learner": {"zero_stage": 2}},
    "zero3": {"learner": {"zero_stage": 3, "gradient_checkpointing": True}},
    "lora-zero2": {"learner": {"zero_stage": 2, "lora": LORA}, "algorithm": {"kl_loss_coef": 0.1}},
    "lora-zero3": {
        "learner": {"zero_stage": 3, "gradient_checkpointing": True, "lora": LORA},
        "algorithm": {"kl_loss_coef": 0.1},
    },
    "offload-zero2": {"learner": {"zero_stage": 2, "offload": "optimizer"}},
    "offload-zero3": {"learner": {"zero_stage": 3, "offload": "all"}},
    "dropped-zero3": {"learner": {"zero_stage": 3}, "replay": {"zero_variance": "drop"}},
    "bfloat16-zero0": {"learner": {"zero_stage": 0}, "model": {"dtype": "bfloat16"}},
    "bfloat16-zero2": {"learner": {"zero_stage": 2}, "model": {"dtype": "bfloat16"}},
    "bfloat16-zero3": {"learner": {"zero_stage": 3, "gradient_checkpointing": True}, "model": {"dtype": "bfloat16"}},
    "bfloat16-offload1": {"learner": {"zero_stage": 1, "offload": "optimizer"}, "model": {"dtype": "bfloat16"}},
}


def error_of(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except AsyncrlError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def train(name: str, config: Config, ranks: Ranks, out: Path) -> None:
    groups = make_groups()
    # Rank 1 needs empty micro-batches; when groups are dropped, it may have nothing else.
    first = len(groups) if config.replay.drops else 5
    mine = groups[:first] if ranks.rank == 0 else groups[first:]
    tensors, scalars = record(config, ranks, mine)
    save_file(tensors, out / f"{name}-{ranks.rank}.safetensors")
    (out / f"{name}-{ranks.rank}.json").write_text(json.dumps(scalars))


def skip_an_update(config: Config, ranks: Ranks) -> dict[str, Any]:
    """Trains with a NaN log-prob on rank 1 once, which is skipped, and twice in a row, which exceeds the limit."""
    trainer = make_trainer(config, ranks)
    mine = make_groups(3, seed=ranks.rank)
    sound = [trainer.train(pack_groups(config, mine), step=1)]
    before = copy_weights(trainer.policy)
    if ranks.rank == 1:
        broken = mine[2].trajectories[3]
        broken.behavior_logprobs[broken.action_mask.nonzero()[0][-1]] = float("nan")
    skipped = trainer.train(pack_groups(config, mine), step=2)
    after = copy_weights(trainer.policy)
    too_many = error_of(trainer.train, pack_groups(config, mine), step=3)
    sound.append(trainer.train(pack_groups(config, make_groups(3, seed=ranks.rank)), step=4))
    return {
        "sound": sound,
        "skipped": skipped,
        "weights_kept": all(torch.equal(before[name], after[name]) for name in before),
        "too_many": too_many,
    }


def meet_errors(config: Config, ranks: Ranks, skips: dict[str, dict[str, Any]]) -> dict[str, Any]:
    trainer = make_trainer(config, ranks)
    version = 5 if ranks.rank else 7
    batches: Any = SimpleNamespace(take=lambda step: Shard(step, make_groups(2, version=version)))
    stale = error_of(Learner(config, trainer, batches, None, None, Path())._train, 8)
    results = {
        name: skip_an_update(make_config(config.model.path, **partitioning(sections, 0)), ranks)
        for name, sections in skips.items()
    }
    return {"stale": stale, "skips": results}


def main(rank: int, port: int, model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    update.MAX_SKIPPED_UPDATES = 1
    logprob_head.CHUNK_BYTES = 4 * 48 * 7  # splits log-probs into chunks, more of them on rank 0
    errors: dict[str, Any] = {}
    try:
        with process_group(endpoints(port), rank, 2, start_timeout_s=120, timeout_s=60) as ranks:
            for name, sections in wanted(RUNS, out).items():
                train(name, make_config(model, **partitioning(sections, 0)), ranks, out)
            errors = meet_errors(make_config(model, learner={"zero_stage": 2}), ranks, wanted(SKIPS, out))
            if rank == 1:
                (out / "errors-1.json").write_text(json.dumps(errors))
                os._exit(0)
            for _ in range(100):
                ranks.any(False)
    except AsyncrlError as error:
        errors["lost"] = f"{type(error).__name__}: {error}"
    (out / "errors-0.json").write_text(json.dumps(errors))
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
