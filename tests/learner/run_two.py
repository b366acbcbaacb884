"""Runs `run_learner` as one of two ranks with ZeRO stage 3, with fakes for the replay queue and the weight senders.

In the folder, `begin.json` contains the number of steps committed before. The log-probs are synthetic.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from worlds import endpoints, make_config, make_groups

import asyncrl.replay.client
import asyncrl.weights.ranks
import asyncrl.weights.sender
from asyncrl.learner.role import run_learner
from asyncrl.types import Shard
from asyncrl.weights.layout import share_of
from asyncrl.wire.messages import Committed

rank, port, model, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])


class Client:
    def __init__(self, endpoints: Any, rank: int, *, timeout_s: float) -> None:
        self.rank = rank

    def take(self, step: int) -> Shard:
        groups = make_groups(2, seed=10 * step + self.rank, version=step - 1)
        for group in groups:
            for trajectory in group.trajectories:
                trajectory.versions[trajectory.action_mask] = step - 1
        return Shard(step, groups)

    def begin(self, step: int) -> int:
        begin = out / "begin.json"
        (out / f"begun-{self.rank}").write_text(str(step))
        return json.loads(begin.read_text()) if begin.exists() else 0

    def commit(self, step: int, metrics: dict[str, float], **options: Any) -> Committed:
        assert self.rank == 0
        return Committed({"replay/ready": 1.0}, b"the queue", False, False, 0, False)

    def close(self) -> None:
        (out / f"closed-{self.rank}").touch()


class Sender:
    address = ""
    is_missed = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        manifest = arguments[1] if rank == 0 else arguments[0]
        if rank == 0:
            assert options["expected_generators"] == 1 and options["transport"] == "gloo" and options["ranks"] == 2
        self.expected = share_of(manifest, rank, 2, 1 << 20).layout.entries
        self.shapes = {entry.name: list(entry.shape) for entry in manifest.entries}
        self.sent: dict[str, Tensor] = {}
        self.stats = SimpleNamespace(count=0, broadcast_s=0.0, wait_s=0.0, dropped=0, bytes=0)

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]], *, copy_later: bool = False) -> None:
        assert copy_later, "nothing has to be gathered"
        copies = {name: weight.clone() for name, weight in weights}
        assert [(name, weight.dtype, tuple(weight.shape)) for name, weight in copies.items()] == [
            (entry.name, entry.dtype, entry.shape) for entry in self.expected
        ]
        self.sent |= {f"{version}/{name}": weight for name, weight in copies.items()}

    def copied(self) -> None: ...
    def wait(self) -> None: ...

    def close(self) -> None:
        if self.sent:
            save_file(self.sent, out / f"sent-{rank}.safetensors")
            (out / "shapes.json").write_text(json.dumps(self.shapes))


STEPS = 4
asyncrl.replay.client.LearnerClient = Client  # pyright: ignore[reportAttributeAccessIssue]
asyncrl.weights.sender.WeightSender = Sender  # pyright: ignore[reportAttributeAccessIssue]
asyncrl.weights.ranks.RankShareSender = Sender  # pyright: ignore[reportAttributeAccessIssue]
torch.set_num_threads(1)
config = make_config(
    model,
    learner={"zero_stage": 3},
    launch={"learners": 2},
    checkpoint={"every_steps": 2},
    deterministic=True,
    replay={"max_staleness": 0},
    generator={"engine_options": {"quantization": "fp8"}},
    steps=STEPS,
)
run_learner(config, rank=rank, endpoints=endpoints(port), run_dir=out, should_stop=lambda: False)
assert torch.are_deterministic_algorithms_enabled()
