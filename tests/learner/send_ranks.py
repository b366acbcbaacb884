"""Runs one of several learner ranks that compare their slices of the weights with the gathered weights, or with the
adapters alone, bit for bit, before and after a step.

`cases.json` in the folder has the number of ranks and the sections of each case's config. Rank 0 writes the number of
bytes that were compared in each case.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from worlds import endpoints, make_config, make_groups, make_trainer, pack_groups

from asyncrl.config.config import Config
from asyncrl.learner.distributed import Ranks, process_group
from asyncrl.learner.model.engine import TrainedModel
from asyncrl.weights.layout import slice_of


def gathered(policy: TrainedModel) -> dict[str, torch.Tensor]:
    """Returns copies of the complete parameters that generators get."""
    named = dict(policy._sent())
    with policy._gathered(list(named.values())):
        return {name: parameter.detach().clone() for name, parameter in named.items()}


def compare(config: Config, ranks: Ranks) -> int:
    trainer = make_trainer(config, ranks)
    compared, before = 0, dict[str, torch.Tensor]()
    for version in (0, 1):
        expected = gathered(trainer.policy)
        slices = dict(trainer.policy.sent_slices())
        assert slices.keys() == expected.keys()
        assert trainer.policy.sent_shapes() == [(name, t.dtype, tuple(t.shape)) for name, t in expected.items()]
        for name, weight in expected.items():
            first, last = slice_of(weight.numel(), ranks.rank, ranks.count)
            assert slices[name].dtype == weight.dtype, name
            assert torch.equal(slices[name].reshape(-1), weight.view(-1)[first:last]), (version, name)
            compared += slices[name].nbytes
        assert any(not torch.equal(weight, before.get(name, weight[:0])) for name, weight in expected.items())
        before = expected
        trainer.train(pack_groups(config, make_groups(6)[ranks.rank :: ranks.count]), step=version + 1)
    return compared


def main(rank: int, port: int, model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    cases = json.loads((out / "cases.json").read_text())
    with process_group(endpoints(port), rank, cases["ranks"], start_timeout_s=60, timeout_s=60) as ranks:
        compared = [compare(make_config(model, **sections), ranks) for sections in cases["sections"]]
        ranks.barrier()
    if rank == 0:
        (out / "compared.json").write_text(json.dumps(compared))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
