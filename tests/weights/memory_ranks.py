"""One of several learner ranks with ZeRO stage 3, or the generator, that measures its memory while versions are sent.

    python memory_ranks.py RANK RANKS ADDRESS MODEL OUT STAGING

RANK is that of a learner rank, or RANKS for the generator: with whole a receiver, with buckets also an engine of two
worker processes. Each writes the peak of the memory of its processes above that before the first version, in bytes, to
OUT/RANK.json.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from pathlib import Path

import torch

from asyncrl.config import Config
from asyncrl.learner.distributed import process_group
from asyncrl.learner.model.policy import Policy
from asyncrl.weights.buckets import WeightManifest
from asyncrl.weights.rank_share_sender import RankShareSender
from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.sender import WeightSender
from asyncrl.wire.endpoints import Endpoints

BUCKET_BYTES = 8 << 20
TIMEOUT_S = 120.0
VERSIONS = 2
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


def learn(rank: int, ranks: int, places: Endpoints, model: str, out: Path, *, copies: bool) -> None:
    config = Config.model_validate(
        {
            "model": {"path": model},
            "data": {"train": "none.parquet"},
            "learner": {"zero_stage": 3},
            "launch": {"learners": ranks},
            "steps": 1,
        }
    )
    with process_group(places, rank, ranks, start_timeout_s=TIMEOUT_S, timeout_s=TIMEOUT_S) as group:
        policy = Policy(config, group)
        manifest = WeightManifest.of(policy.sent_shapes())
        if rank == 0:
            sender = WeightSender(
                places.weights, manifest, ranks=ranks, expected_generators=1, transport="gloo",
                bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S, run_id=places.run_id, copies=copies,
            )  # fmt: skip
            sender._membership.await_members(1, TIMEOUT_S)
        else:
            sender = RankShareSender(
                manifest, places, rank=rank, ranks=ranks, bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S, copies=copies
            )
        group.barrier()
        peak = Peak()
        for version in range(VERSIONS):
            sender.send(version, policy.sent_slices(), copy_later=True)
            sender.copied()
            sender.wait()
        (out / f"{rank}.json").write_text(
            json.dumps({"extra_bytes": peak.end(), "weights_bytes": manifest.num_bytes, "sent": sender.stats.count})
        )
        group.barrier()
        sender.close()


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
    from asyncrl.generator.vllm_backend.engine import VllmEngine
    from asyncrl.generator.weight_swaps import WeightSwaps

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
    receiver.engine_is_up(engine)
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
    rank, ranks, address, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[5])
    torch.set_num_threads(1)
    places = Endpoints("test", "", f"{address}-weights", f"{address}-learners")
    if rank == ranks and sys.argv[6] == "buckets":
        generate(rank, places, sys.argv[4], out)
    elif rank == ranks:
        receive(rank, places, out)
    else:
        learn(rank, ranks, places, sys.argv[4], out, copies=sys.argv[6] == "whole")


if __name__ == "__main__":
    main()
