"""`run_learner` as one of two ranks with ZeRO stage 3, with fakes for the replay queue and the weight sender."""

from __future__ import annotations

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
import asyncrl.weights.sender
from asyncrl.learner.loop import run_learner
from asyncrl.types import Shard

rank, port, model, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])


class Client:
    def __init__(self, endpoints: Any, rank: int, *, timeout_s: float) -> None:
        self.rank = rank

    def take(self, step: int) -> Shard:
        return Shard(step, make_groups(2, seed=10 * step + self.rank, version=step - 1))

    def commit(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        assert self.rank == 0
        return {"replay/ready": 1.0}

    def close(self) -> None:
        (out / f"closed-{self.rank}").touch()


class Sender:
    def __init__(self, address: tuple[str, int], **options: Any) -> None:
        assert rank == 0 and options["num_generators"] == 1 and options["transport"] == "auto"
        self.sent: dict[str, Tensor] = {}
        self.stats = SimpleNamespace(count=0, broadcast_s=0.0)

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.sent |= {f"{version}/{name}": weight.clone() for name, weight in weights}

    def wait(self) -> None: ...

    def close(self) -> None:
        save_file(self.sent, out / "sent.safetensors")


asyncrl.replay.client.LearnerClient = Client  # pyright: ignore[reportAttributeAccessIssue]
asyncrl.weights.sender.WeightSender = Sender  # pyright: ignore[reportAttributeAccessIssue]
torch.set_num_threads(1)
config = make_config(model, learner={"zero_stage": 3}, launch={"learners": 2}, steps=2)
run_learner(config, rank=rank, endpoints=endpoints(port), run_dir=out, should_stop=lambda: False)
