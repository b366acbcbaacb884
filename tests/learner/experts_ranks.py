"""Runs one of two learner ranks of ZeRO stage 3 that train mixture-of-experts models.

The model of the folder is trained for STEPS steps, and sent to a transformers engine in rank 0 after each. The engine
has then the learner's weights under the same names. Last, a model whose experts are modules of their own is trained
where each rank's tokens visit another expert.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from send_ranks import TIMEOUT_S, Received, make_sender
from torch import Tensor, nn
from worlds import copy_weights, endpoints, make_config, make_groups, make_trainer, pack_groups

from asyncrl.generator.transformers_backend.engine import TransformersEngine
from asyncrl.learner.distributed import Ranks, deepspeed, process_group
from asyncrl.learner.model.engine import gather_experts_together
from asyncrl.learner.model.loading import deepspeed_config
from asyncrl.weights.layout import WeightManifest

STEPS = 8
SECTIONS: dict[str, Any] = {
    "learner": {"zero_stage": 3},
    "generator": {"engine": "transformers", "kv_cache_bytes": 1 << 22, "engine_options": {"max_model_len": 64}},
    "steps": STEPS,
}


def train(folder: Path, ranks: Ranks, port: int) -> dict[str, Any]:
    """Returns the number of sends that were compared, the losses, and how many parameters of experts have changed."""
    config, places = make_config(folder, **SECTIONS), endpoints(port)
    trainer = make_trainer(config, ranks)
    sender = make_sender(config, WeightManifest.of(trainer.policy.sent_shapes()), ranks, places)
    receiver = engine = None
    if ranks.rank == 0:
        engine, receiver = TransformersEngine(config, seed=0), Received(places)
    first, expected, compared = dict[str, Tensor](), dict[str, Tensor](), 0
    for version in range(STEPS + 1):
        sender.send(version, trainer.policy.sent_slices(), copy_later=True)
        sender.copied()
        expected = copy_weights(trainer.policy)
        first = first or expected
        if receiver is not None and engine is not None:
            engine.swap(version, list(receiver.next(version).items()))
            loaded = dict(engine._decoder._model.named_parameters())
            assert loaded.keys() == expected.keys()
            assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items()), version
            compared += 1
        sender.wait()
        if version < STEPS:
            groups = make_groups(6, seed=version, version=version)[ranks.rank :: ranks.count]
            trainer.train(pack_groups(config, groups), step=version + 1)
    ranks.barrier()
    sender.close()
    if receiver is not None:
        receiver.close()
    changed = [name for name, weight in expected.items() if not torch.equal(weight, first[name])]
    return {"compared": compared, "changed": changed, "all": len(expected)}


class Block(nn.Module):
    """Two experts; the sign of a token's first number chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, tokens: Tensor) -> Tensor:
        chosen = (tokens[:, 0] > 0).long()
        output = tokens.clone()
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().flatten()
            output = output.index_add(0, rows, self.experts[number](tokens[rows]))
        return output


def train_apart(folder: Path, ranks: Ranks) -> int:
    """Trains experts of which each rank uses one. Returns the steps."""
    config = make_config(folder, **SECTIONS)
    torch.manual_seed(0)
    first = nn.Linear(8, 8)
    nn.init.eye_(first.weight)
    model: Any = nn.Sequential(first, Block(), Block(), nn.Linear(8, 1))
    model.config = SimpleNamespace(hidden_size=8)
    gather_experts_together(model)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=deepspeed_config(config, model)
    )
    for _ in range(3):
        tokens = torch.rand(4, 8) + 10.0
        engine.backward(engine(tokens if ranks.rank else -tokens).sum())
        engine.step()
    return 3


def main(rank: int, port: int, model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    with process_group(endpoints(port), rank, 2, start_timeout_s=60, timeout_s=TIMEOUT_S) as ranks:
        found = train_apart(model, ranks) if "apart" in model.name else train(model, ranks, port)
    (out / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
