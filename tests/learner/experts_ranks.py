"""Runs one of two learner ranks of ZeRO stage 3 that train mixture-of-experts models.

The model of the folder is trained for STEPS steps, and sent to a transformers engine in rank 0 after each. The engine
then has the learner's weights under the same names.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from send_ranks import TIMEOUT_S, Received, make_sender
from torch import Tensor
from worlds import copy_weights, endpoints, make_config, make_groups, make_trainer, pack_groups

from asyncrl.generator.transformers_backend.engine import TransformersEngine
from asyncrl.learner.distributed import Ranks, process_group
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


def main(rank: int, port: int, model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    with process_group(endpoints(port), rank, 2, start_timeout_s=60, timeout_s=TIMEOUT_S) as ranks:
        found = train(model, ranks, port)
    (out / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
