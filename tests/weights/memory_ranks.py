"""One of several learner ranks with ZeRO stage 3, or the generator, that measures its memory while versions are sent.

    python memory_ranks.py RANK RANKS ADDRESS MODEL OUT STAGING

RANK is that of a learner rank, or RANKS for the generator's receiver. Each writes the peak of its anonymous memory
above that before the first version, in bytes, to OUT/RANK.json.
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


def anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


class Peak:
    """The highest anonymous memory since it was made, above that at first."""

    def __init__(self) -> None:
        self.before_bytes = self.most_bytes = anonymous_bytes()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._stop = False
        self._thread.start()

    def _look(self) -> None:
        while not self._stop:
            self.most_bytes = max(self.most_bytes, anonymous_bytes())
            time.sleep(LOOK_S)

    def end(self) -> int:
        self._stop = True
        self._thread.join()
        return self.most_bytes - self.before_bytes


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


def generate(rank: int, places: Endpoints, out: Path) -> None:
    receiver = WeightReceiver(
        places.weights, rank=1, transport="gloo", timeout_s=TIMEOUT_S, max_bytes=1 << 30, run_id=places.run_id
    )
    peak = Peak()
    receiver.start()
    receiver.engine_is_up()
    for version in range(VERSIONS):
        while (staged := receiver.staged()) is None:
            time.sleep(0.005)
        assert staged.version == version
        receiver.loaded(staged)
    (out / f"{rank}.json").write_text(json.dumps({"extra_bytes": peak.end()}))
    time.sleep(1.0)
    receiver.close()


def main() -> None:
    rank, ranks, address, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[5])
    torch.set_num_threads(1)
    places = Endpoints("test", "", f"{address}-weights", f"{address}-learners")
    if rank == ranks:
        generate(rank, places, out)
    else:
        learn(rank, ranks, places, sys.argv[4], out, copies=sys.argv[6] == "whole")


if __name__ == "__main__":
    main()
