"""Runs one of several learner ranks that send their slices of the weights to a generator's receiver in rank 0, or
write them to a folder from which rank 0 reads.

`cases.json` in the folder has the number of ranks and the sections of each case's config. A version is sent before and
after a step. Rank 0 compares what arrives with the gathered weights, or with the adapters alone, byte by byte, and
writes what it has compared.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from worlds import endpoints, make_config, make_groups, make_trainer, pack_groups

from asyncrl.config.config import Config
from asyncrl.learner.distributed import Ranks, process_group
from asyncrl.learner.model.engine import TrainedModel
from asyncrl.weights.background import BackgroundSender
from asyncrl.weights.files import FileSender, RankFileSender, Written
from asyncrl.weights.layout import WeightManifest
from asyncrl.weights.ranks import RankCoordinator, RankShareSender
from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.sender import WeightSender
from asyncrl.weights.version_store import Folder, Reader, manifest_key
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.messages import Announced, Follower
from asyncrl.wire.store import StoreServer

BUCKET_BYTES = 1 << 16
TIMEOUT_S = 60.0


class Stored:
    """Reads what rank 0 announces of a folder."""

    def __init__(self, folder: Path, manifest: WeightManifest, places: Endpoints) -> None:
        self._manifest = manifest
        self._buffer = torch.empty(manifest.num_bytes, dtype=torch.uint8)
        key = manifest_key(places.run_id)
        self._reader = Reader(Folder(str(folder)), manifest, self._buffer.numpy(), key=key)
        self._announced: SimpleQueue[Announced] = SimpleQueue()

    def announce(self, announced: Announced, check: Any) -> list[Follower]:
        self._announced.put(announced)
        return []

    def next(self, version: int) -> dict[str, torch.Tensor]:
        while (announced := self._announced.get(timeout=TIMEOUT_S)).version != version:
            pass
        self._reader.fetch(announced, lambda: None)
        return {name: tensor.clone() for name, tensor in self._manifest.views(self._buffer)}

    def close(self) -> None: ...


class Received:
    """Takes what comes over a link."""

    def __init__(self, places: Endpoints) -> None:
        self._receiver = WeightReceiver(
            places.weights, rank=1, transport="gloo", timeout_s=TIMEOUT_S, max_bytes=1 << 26, run_id=places.run_id
        )
        self._receiver.start()
        self._receiver.engine_is_up()
        self.close = self._receiver.close

    def next(self, version: int) -> dict[str, torch.Tensor]:
        deadline_s = time.monotonic() + TIMEOUT_S
        while (staged := self._receiver.staged()) is None:
            assert time.monotonic() < deadline_s, "nothing came"
            time.sleep(0.002)
        assert staged.version == version
        tensors = {name: tensor.clone() for name, tensor in staged.tensors}
        self._receiver.loaded(staged)
        return tensors


def make_file_sender(
    manifest: WeightManifest, ranks: Ranks, places: Endpoints, stored: Stored, folder: Path
) -> BackgroundSender:
    if ranks.rank:
        return RankFileSender(manifest, str(folder), places, rank=ranks.rank, ranks=ranks.count, timeout_s=TIMEOUT_S)
    others = None
    if ranks.count > 1:
        store = StoreServer(places.weights, "shares", run_id=places.run_id)
        others = RankCoordinator(store, ranks.count - 1, Written, timeout_s=TIMEOUT_S)
    return FileSender(
        manifest, str(folder), stored.announce, keep=2, run_id=places.run_id, timeout_s=TIMEOUT_S, others=others
    )


def make_sender(config: Config, manifest: WeightManifest, ranks: Ranks, places: Endpoints) -> BackgroundSender:
    options: dict[str, Any] = {"bucket_bytes": BUCKET_BYTES, "timeout_s": TIMEOUT_S}
    options["copies"] = config.weights.staging != "buckets"
    if ranks.rank:
        return RankShareSender(manifest, places, rank=ranks.rank, ranks=ranks.count, **options)
    return WeightSender(
        places.weights, manifest, ranks=ranks.count, expected_generators=1, transport="gloo", run_id=places.run_id,
        **options,
    )  # fmt: skip


def gathered(policy: TrainedModel) -> dict[str, torch.Tensor]:
    """Returns copies of the complete parameters that generators get."""
    named = dict(policy._sent())
    with policy._gathered(list(named.values())):
        return {name: parameter.detach().clone() for name, parameter in named.items()}


def check(config: Config, ranks: Ranks, places: Endpoints, folder: Path) -> int:
    """Returns the number of bytes that were compared. The folder is one for weights."""
    trainer = make_trainer(config, ranks)
    manifest = WeightManifest.of(trainer.policy.sent_shapes())
    if config.weights.transport == "files":
        receiver = Stored(folder, manifest, places)
        sender = make_file_sender(manifest, ranks, places, receiver, folder)
    else:
        sender = make_sender(config, manifest, ranks, places)
        receiver = Received(places) if ranks.rank == 0 else None
    compared, before = 0, dict[str, torch.Tensor]()
    for version in (0, 1):
        sender.send(version, trainer.policy.sent_slices(), copy_later=True)
        expected = gathered(trainer.policy)
        if receiver is not None and ranks.rank == 0:
            found = receiver.next(version)
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
            places = Endpoints("test", "", f"{places.weights}-{number}", "")
            compared.append(check(config, ranks, places, out / f"weights-{number}"))
    if rank == 0:
        (out / "compared.json").write_text(json.dumps(compared))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
