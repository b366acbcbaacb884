"""One of several learner ranks with ZeRO stage 3, or the generator, that measures its memory while versions are sent.

    python memory_ranks.py RANK RANKS ADDRESS MODEL OUT WAY

RANK is that of a learner rank, or RANKS for the generator: with whole a receiver, with buckets also an engine of two
worker processes. With files there is no generator: weights in float32, then in bfloat16, go to folders in OUT; those in
bfloat16 change, and are written as deltas. Each writes the peak of the memory of its processes above that before the
first version, in bytes, to OUT/RANK.json.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.config import Config
from asyncrl.learner.distributed import Ranks, process_group
from asyncrl.learner.model.policy import Policy
from asyncrl.weights.background import BackgroundSender
from asyncrl.weights.file_transport import FileSender, RankFileSender, Written
from asyncrl.weights.layout import WeightManifest
from asyncrl.weights.ranks import RankCoordinator, RankShareSender
from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.sender import WeightSender
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.store import StoreServer

BUCKET_BYTES = 8 << 20
TIMEOUT_S = 120.0
VERSIONS = 2
STORED = {"float32": 2, "bfloat16": 3}
"""Versions in folders, by dtype."""
LOOK_S = 0.001


def own_bytes(pid: int | str) -> int:
    """Anonymous and shared memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(number) << 10 for number in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status))


class Peak:
    """The highest memory of some processes since it was made, above that at first."""

    def __init__(self, *pids: int | str) -> None:
        self._pids = pids or ("self",)
        self._before_bytes = [own_bytes(pid) for pid in self._pids]
        self._most_bytes = list(self._before_bytes)
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._stop = False
        self._thread.start()

    def _look(self) -> None:
        while not self._stop:
            for number, pid in enumerate(self._pids):
                self._most_bytes[number] = max(self._most_bytes[number], own_bytes(pid))
            time.sleep(LOOK_S)

    def end(self) -> list[int]:
        self._stop = True
        self._thread.join()
        return [most - before for most, before in zip(self._most_bytes, self._before_bytes, strict=True)]


def make_sender(
    rank: int, ranks: int, places: Endpoints, manifest: WeightManifest, *, copies: bool
) -> BackgroundSender:
    options: dict[str, Any] = {"ranks": ranks, "bucket_bytes": BUCKET_BYTES, "timeout_s": TIMEOUT_S, "copies": copies}
    if rank:
        return RankShareSender(manifest, places, rank=rank, **options)
    sender = WeightSender(
        places.weights, manifest, expected_generators=1, transport="gloo", run_id=places.run_id, **options
    )
    sender._membership.await_members(1, TIMEOUT_S)
    return sender


def make_file_sender(rank: int, ranks: int, places: Endpoints, manifest: WeightManifest, url: str) -> BackgroundSender:
    if rank:
        return RankFileSender(manifest, url, places, rank=rank, ranks=ranks, timeout_s=TIMEOUT_S)
    store = StoreServer(places.weights, "shares of weights", run_id=places.run_id)
    others = RankCoordinator(store, ranks - 1, Written, timeout_s=TIMEOUT_S)
    return FileSender(
        manifest, url, lambda *_: [], keep=2, run_id=places.run_id, timeout_s=TIMEOUT_S, others=others
    )  # fmt: skip


def change(weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
    """Changes two of a hundred weights in bfloat16 to a neighbour."""
    for _, weight in weights:
        if weight.dtype == torch.bfloat16:
            weight.view(torch.int16).view(-1)[version::50] += 1


def make_policy(model: str, group: Ranks, dtype: str = "float32") -> Policy:
    config = Config.model_validate(
        {
            "model": {"path": model, "dtype": dtype},
            "data": {"train": "none.parquet"},
            "learner": {"zero_stage": 3},
            "launch": {"learners": group.count},
            "steps": 1,
        }
    )
    return Policy(config, group)


def send(group: Ranks, policy: Policy, sender: BackgroundSender, versions: int) -> dict[str, Any]:
    """Returns the memory that it takes to send this many versions, of which those in bfloat16 differ."""
    group.barrier()
    peak = Peak()
    for version in range(versions):
        sender.send(version, policy.sent_slices(), copy_later=True)
        sender.copied()
        sender.wait()
        change(policy.sent_slices(), version)
    found = {"extra_bytes": peak.end(), "sent": sender.stats.count}
    group.barrier()
    sender.close()
    return found


def learn(group: Ranks, places: Endpoints, model: str, *, copies: bool) -> dict[str, Any]:
    policy = make_policy(model, group)
    manifest = WeightManifest.of(policy.sent_shapes())
    sender = make_sender(group.rank, group.count, places, manifest, copies=copies)
    return send(group, policy, sender, VERSIONS) | {"weights_bytes": manifest.num_bytes}


def learn_to_files(group: Ranks, places: Endpoints, model: str, out: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype, versions in STORED.items():
        policy = make_policy(model, group, dtype)
        manifest = WeightManifest.of(policy.sent_shapes())
        own = replace(places, weights=f"{places.weights}-{dtype}")
        sender = make_file_sender(group.rank, group.count, own, manifest, str(out / dtype))
        found[dtype] = send(group, policy, sender, versions) | {"weights_bytes": manifest.num_bytes}
        del policy, sender
    return found


def make_receiver(places: Endpoints) -> WeightReceiver:
    return WeightReceiver(
        places.weights, rank=1, transport="gloo", timeout_s=TIMEOUT_S, max_bytes=1 << 30, run_id=places.run_id
    )


def receive(rank: int, places: Endpoints, out: Path) -> None:
    receiver = make_receiver(places)
    peak = Peak()
    receiver.start()
    receiver.engine_is_up()
    version = -1
    while version != VERSIONS - 1:
        if (staged := receiver.staged()) is not None:
            version = staged.version
            receiver.loaded(staged)
        time.sleep(0.005)
    (out / f"{rank}.json").write_text(json.dumps({"extra_bytes": peak.end()}))
    time.sleep(1.0)
    receiver.close()


def generate(rank: int, places: Endpoints, model: str, out: Path) -> None:
    from asyncrl.generator.engine import WeightSwaps
    from asyncrl.generator.vllm_backend.engine import VllmEngine

    config = Config.model_validate(
        {
            "model": {"path": model},
            "data": {"train": "none.parquet"},
            "generator": {"tensor_parallel": 2, "group_size": 2, "max_new_tokens": 8, "kv_cache_bytes": 16 << 20},
            "weights": {"staging": "buckets"},
            "steps": 1,
        }
    )
    engine = VllmEngine(config, seed=0)
    receiver = make_receiver(places)
    swaps = WeightSwaps(engine, receiver, timeout_s=TIMEOUT_S, meanwhile=lambda: True)
    peak = Peak("self", *(pid for pid in engine._workers.pids if pid is not None))
    receiver.start()
    receiver.engine_is_up(engine.loader)
    while engine.version != VERSIONS - 1:
        swaps.swap()
        time.sleep(0.001)
    (out / f"{rank}.json").write_text(json.dumps({"extra_bytes": peak.end()}))
    engine.add("a", [5, 6, 7])
    while engine.num_running:
        engine.step()
    receiver.close()
    engine.close()


def main() -> None:
    rank, ranks, address, out, way = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[5]), sys.argv[6]
    torch.set_num_threads(1)
    places = Endpoints("test", "", f"{address}-weights", f"{address}-learners")
    if rank == ranks and way == "buckets":
        generate(rank, places, sys.argv[4], out)
    elif rank == ranks:
        receive(rank, places, out)
    else:
        with process_group(places, rank, ranks, start_timeout_s=TIMEOUT_S, timeout_s=TIMEOUT_S) as group:
            if way == "files":
                found = learn_to_files(group, places, sys.argv[4], out)
            else:
                found = learn(group, places, sys.argv[4], copies=way == "whole")
        (out / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
