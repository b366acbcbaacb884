"""Learner ranks that send shares of the test's weights, in this process and in processes of their own.

    python rank_parts.py RANK RANKS ADDRESS TIMEOUT_S TRANSPORT

"send VERSION" sends the rank's slices of the weights of that version, "wait" prints the stats when they arrived, or the
error. "hit SIGNAL N" sends itself a signal before the Nth bucket from now on; "close" ends it.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import asdict

import torch
from weight_parts import BUCKET_BYTES, manifest_of, sliced, weights

from asyncrl.errors import AsyncrlError
from asyncrl.weights import buffers as buckets
from asyncrl.weights.background import BackgroundSender
from asyncrl.weights.ranks import RankShareSender
from asyncrl.weights.sender import WeightSender
from asyncrl.wire.endpoints import Endpoints
from tests.helpers.forked_scripts import print_json


def make_rank(
    rank: int, ranks: int, address: str, *, timeout_s: float = 20.0, transport: str = "gloo", copies: bool = True
) -> BackgroundSender:
    """The sender of a rank. That of rank 0 comes first: the others look for it."""
    manifest = manifest_of(weights(0))
    if rank == 0:
        return WeightSender(
            address, manifest, ranks=ranks, expected_generators=1, transport=transport,
            bucket_bytes=BUCKET_BYTES, timeout_s=timeout_s, copies=copies,
        )  # fmt: skip
    return RankShareSender(
        manifest, Endpoints("", "", address, ""), rank=rank, ranks=ranks, bucket_bytes=BUCKET_BYTES,
        timeout_s=timeout_s, start_timeout_s=60.0, copies=copies,
    )  # fmt: skip


def slices(version: int, rank: int, ranks: int) -> list[tuple[str, torch.Tensor]]:
    """Returns the part of a version's weights that the rank has."""
    return sliced(weights(version), rank, ranks)


def hit(number: int, after: int) -> None:
    checksum, calls = buckets.checksum, 0

    def hitting(bucket: torch.Tensor, first_byte: int) -> int:
        nonlocal calls
        calls += 1
        if calls == after:
            os.kill(os.getpid(), number)
        return checksum(bucket, first_byte)

    buckets.checksum = hitting


def main() -> None:
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    sender = make_rank(rank, ranks, sys.argv[3], timeout_s=float(sys.argv[4]))
    for line in sys.stdin:
        try:
            match line.split():
                case ["send", version]:
                    sender.send(int(version), slices(int(version), rank, ranks))
                case ["hit", name, count]:
                    hit(signal.Signals[name], int(count))
                case ["wait"]:
                    sender.wait()
                    print_json(asdict(sender.stats))
                case _:
                    sender.close()
                    return
        except AsyncrlError as error:
            print_json({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
