"""Runs one of two learner ranks: saves its training state half-way, continues from it, fails to write a checkpoint, and
hangs as rank 1."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed import distributed_c10d
from worlds import STATE_RUNS, endpoints, make_config, make_trainer, partitioning, train_steps, wanted

from asyncrl.config.config import Config
from asyncrl.errors import PeerTimeoutError, RunError
from asyncrl.learner.checkpoint import Checkpoints, Files, tensors_file
from asyncrl.learner.distributed import Ranks, process_group
from asyncrl.learner.model.engine import TrainedModel
from asyncrl.learner.model.saving import collect_state, restore_state
from asyncrl.weights.layout import slice_of

TIMEOUT_S, SHORT_S = 30.0, 1.5


def halve(name: str, config: Config, ranks: Ranks, out: Path) -> None:
    """Trains steps 1 to 4 without interruption, and again with a new engine from step 3 on. Writes the state after step
    2, and both states after step 4."""
    whole = make_trainer(config, ranks)
    train_steps(whole, (1, 2))
    half = collect_state(whole.policy)
    (out / name / "2").mkdir(parents=True, exist_ok=True)
    save_file(half, out / name / "2" / f"rank-{ranks.rank}.safetensors")
    train_steps(whole, (3, 4))
    check_sent(whole.policy)
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


def check_sent(policy: TrainedModel) -> None:
    """The slices that this rank sends are those of the weights, or of the adapters, bit for bit."""
    named, slices = dict(policy._sent()), {name: part.clone() for name, part in policy.sent_slices()}
    with policy._gathered(list(named.values())):
        for name, weight in named.items():
            first, last = slice_of(weight.numel(), policy.ranks.rank, policy.ranks.count)
            assert torch.equal(slices.pop(name), weight.detach().view(-1)[first:last]), name
    assert not slices


def fail_to_write(ranks: Ranks, config: Config, out: Path) -> str:
    """Lets rank 1 fail to write its part, by a limit on its file size; returns the error."""
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    checkpoints = Checkpoints(config, out / "checkpoints", ranks)

    def snapshot(folder: Path) -> Files:
        return {f"policy/rank-{ranks.rank}.safetensors": tensors_file({"weight": torch.zeros(1 << 16)})}

    checkpoints.save(50, snapshot, reward=None)
    try:
        while True:
            ranks.raise_on_all_ranks(checkpoints.failure())
            time.sleep(0.05)
    except RunError as error:
        checkpoints.close()
        return str(error)


def main(rank: int, port: int, model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    hung: dict[str, Any] = {}
    try:
        with process_group(endpoints(port), rank, 2, start_timeout_s=60, timeout_s=TIMEOUT_S) as ranks:
            for name, sections in wanted(STATE_RUNS, out).items():
                halve(name, make_config(model, **partitioning(sections, 1000)), ranks, out)
            text = fail_to_write(ranks, make_config(model), out)
            (out / f"failed-{rank}.json").write_text(json.dumps(text))
            wait_for_a_rank_that_hangs(ranks, out, hung)
    except PeerTimeoutError as error:
        hung |= {"error": str(error), "waited_s": time.monotonic() - hung["since_s"]}
        (out / "hung.json").write_text(json.dumps(hung))
        os.kill(int((out / "pid").read_text()), signal.SIGCONT)
    os._exit(0)


def wait_for_a_rank_that_hangs(ranks: Ranks, out: Path, hung: dict[str, Any]) -> None:
    """Stops rank 1 before a collective. The deadline is that of `process_group`, shortened for the test."""
    if ranks.rank == 1:
        (out / "pid").write_text(str(os.getpid()))
        ranks.barrier()
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    ranks.barrier()
    group = distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    hung |= {"timeout_s": group.options._timeout.total_seconds(), "since_s": time.monotonic()}
    distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT_S))
    ranks.any(False)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
