"""Runs one of two learner ranks that write models in Hugging Face format, and rank 0 also in the library's way."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from worlds import LORA, endpoints, make_config, partitioning

from asyncrl.errors import RunError
from asyncrl.learner.distributed import Ranks, process_group
from asyncrl.learner.model import policy, saving
from asyncrl.learner.model.policy import Policy
from asyncrl.learner.model.saving import model_files, save_model
from tests.helpers.memory_peak import Peak, anonymous_bytes, keep_freed_memory_away

CASES: list[tuple[str, dict[str, Any]]] = [
    *(("qwen2", {"zero_stage": stage}) for stage in range(4)),
    ("llama", {"zero_stage": 3}),
    ("mixtral", {"zero_stage": 2}),
    ("mixtral", {"zero_stage": 3}),
    ("qwen3_moe", {"zero_stage": 3}),
    ("qwen2", {"zero_stage": 2, "lora": LORA}),
    ("qwen2", {"zero_stage": 3, "lora": LORA}),
]
"""Families and settings of the learner; embeddings of qwen2 are tied."""
CHECKPOINT = 3
"""The case of which the files of a checkpoint are written, too."""


def make_policy(folder: Path, learner: dict[str, Any], ranks: Ranks, **sections: Any) -> Policy:
    """Returns a policy whose parameters are all partitioned in ZeRO stage 3. Its adapters, if any, change it."""
    sections |= {"learner": learner}
    config = make_config(folder, **(partitioning(sections, 8) if learner["zero_stage"] == 3 else sections))
    with patch.object(policy, "check_packing", lambda *args: None):
        made = Policy(config, ranks)
    if made.adapters is not None:
        with made._gathered(parameters := made.adapters.parameters()), torch.no_grad():
            for parameter in parameters:
                parameter.fill_(0.1)
    return made


def write_complete(model: Policy, folder: Path) -> None:
    """Writes the model as the library does, from rank 0."""
    weights = model.collect_weights()
    if model.ranks.rank == 0:
        model.model.save_pretrained(folder, state_dict=weights)


def compare(models: Path, out: Path, ranks: Ranks) -> None:
    """Writes each case to OUT/INDEX/model, and in the library's way to OUT/INDEX/expected."""
    saving.MIN_SHARE_BYTES = 1
    for index, (name, learner) in enumerate(CASES):
        model = make_policy(models / name, learner, ranks)
        save_model(model, out / str(index) / "model")
        write_complete(model, out / str(index) / "expected")
        if index == CHECKPOINT:
            for name, content in model_files(model, "policy").items():
                target = out / "checkpoint" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                content(target)


def fail(models: Path, out: Path, ranks: Ranks) -> dict[str, str]:
    """Returns the error of a model that rank 1 cannot write."""
    model, found = make_policy(models / "qwen2", {"zero_stage": 3}, ranks), dict[str, str]()

    def full(path: Path) -> None:
        raise OSError("No space left on device")

    with patch.object(saving, "tensors_file", lambda tensors: full) if ranks.rank else nullcontext():
        try:
            save_model(model, out / "full")
        except RunError as error:
            found["full"] = str(error)
    return found | {"left": " ".join(sorted(path.name for path in out.glob("full*")))}


def measure(models: Path, out: Path, ranks: Ranks) -> dict[str, int]:
    """Returns the peaks of anonymous memory beyond that before, of both ways to write."""
    keep_freed_memory_away()
    settings = {"zero_stage": 3}
    warm, large = (make_policy(models / name, settings, ranks) for name in ("warm", "large"))
    ways: dict[str, Any] = {
        "shares": lambda model, folder: save_model(model, folder),
        "complete": write_complete,
    }
    peak, found = Peak(), dict[str, int]()
    for name, write in ways.items():
        write(warm, out / f"warm-{name}")
        ranks.barrier()
        before = anonymous_bytes()
        peak.reset()
        write(large, out / name)
        ranks.barrier()
        found[name] = peak.num_bytes - before
    return found


def main(rank: int, port: int, models: Path, out: Path) -> None:
    torch.set_num_threads(1)
    with process_group(endpoints(port), rank, 2, start_timeout_s=120, timeout_s=60) as ranks:
        result: dict[str, Any] = {}
        if (models / "large").exists():
            result = measure(models, out, ranks)
        else:
            compare(models, out, ranks)
            result = fail(models, out, ranks)
        ranks.barrier()
    (out / f"{rank}.json").write_text(json.dumps(result))
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
