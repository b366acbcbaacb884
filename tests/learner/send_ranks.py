"""Runs one of several learner ranks that send their slices of the weights to a generator's receiver in rank 0.

`cases.json` in the folder has the number of ranks and the sections of each case's config. A version is sent before and
after a step. Rank 0 compares what arrives with the gathered weights, or with the adapters alone, byte by byte, and
writes what it has compared.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from worlds import endpoints, make_config, make_groups, make_trainer, pack_groups

from asyncrl.config import Config
from asyncrl.learner.distributed import Ranks, process_group
from asyncrl.learner.trainer import Trainer
from asyncrl.weights.background import BackgroundSender
from asyncrl.weights.buckets import WeightManifest
from asyncrl.weights.rank_share_sender import RankShareSender
from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.sender import WeightSender
from asyncrl.wire.endpoints import Endpoints

BUCKET_BYTES = 1 << 16
TIMEOUT_S = 60.0


def make_sender(config: Config, trainer: Trainer, ranks: Ranks, places: Endpoints) -> BackgroundSender:
    manifest = WeightManifest.of(trainer.policy.sent_shapes())
    options: dict[str, Any] = {"bucket_bytes": BUCKET_BYTES, "timeout_s": TIMEOUT_S}
    options["copies"] = config.weights.staging != "buckets"
    if ranks.rank:
        return RankShareSender(manifest, places, rank=ranks.rank, ranks=ranks.count, **options)
    return WeightSender(
        places.weights, manifest, ranks=ranks.count, expected_generators=1, transport="gloo", run_id=places.run_id,
        **options,
    )  # fmt: skip


def next_tensors(receiver: WeightReceiver, version: int) -> dict[str, torch.Tensor]:
    deadline_s = time.monotonic() + TIMEOUT_S
    while (staged := receiver.staged()) is None:
        assert time.monotonic() < deadline_s, "nothing came"
        time.sleep(0.002)
    assert staged.version == version
    tensors = {name: tensor.clone() for name, tensor in staged.tensors}
    receiver.loaded(staged)
    return tensors


def check(config: Config, ranks: Ranks, places: Endpoints) -> int:
    """Returns the number of bytes that were compared."""
    trainer = make_trainer(config, ranks)
    sender = make_sender(config, trainer, ranks, places)
    receiver = None
    if ranks.rank == 0:
        receiver = WeightReceiver(
            places.weights, rank=1, transport="gloo", timeout_s=TIMEOUT_S, max_bytes=1 << 26, run_id=places.run_id
        )
        receiver.start()
        receiver.engine_is_up()
    compared, before = 0, dict[str, torch.Tensor]()
    for version in (0, 1):
        sender.send(version, trainer.policy.sent_slices(), copy_later=True)
        expected = {name: weight.clone() for name, weight in trainer.policy.sent_weights()}
        if receiver is not None:
            found = next_tensors(receiver, version)
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]), (version, name)
                compared += tensor.nbytes
            assert any(not torch.equal(tensor, before.get(name, tensor[:0])) for name, tensor in found.items())
            before = found
        ranks.barrier()  # without copies, a version is gone for a receiver that comes after `copied`
        sender.copied()
        sender.wait()
        groups = make_groups(6)[ranks.rank :: ranks.count]
        trainer.train(pack_groups(config, groups), step=version + 1)
    ranks.barrier()
    sender.close()
    if receiver is not None:
        receiver.close()
    return compared


def main(rank: int, port: int, model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    cases = json.loads((out / "cases.json").read_text())
    compared: list[int] = []
    with process_group(endpoints(port), rank, cases["ranks"], start_timeout_s=60, timeout_s=TIMEOUT_S) as ranks:
        for number, sections in enumerate(cases["sections"]):
            places = endpoints(port)
            config = make_config(model, **sections)
            compared.append(check(config, ranks, Endpoints("test", "", f"{places.weights}-{number}", "")))
    if rank == 0:
        (out / "compared.json").write_text(json.dumps(compared))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
