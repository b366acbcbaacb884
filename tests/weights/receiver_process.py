"""A generator's weight receiver in a process of its own: loads every version and prints it as a line of JSON.

    python receiver_process.py ADDRESS RANK TIMEOUT_S TRANSPORT [SIGNAL[:BUCKET]]

With SIGNAL (a name) it sends itself that signal inside a broadcast, after so many buckets of all versions (2).
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from weight_parts import described

from asyncrl.weights import buffers as buckets
from asyncrl.weights.receiver import WeightReceiver
from tests.helpers.forked_scripts import print_json


def main() -> None:
    address, rank, timeout_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    if len(sys.argv) > 5:
        name, _, bucket = sys.argv[5].partition(":")
        hit_once(signal.Signals[name], int(bucket or 2))
    receiver = WeightReceiver(
        address,
        rank=rank,
        transport=sys.argv[4],
        timeout_s=timeout_s,
        max_bytes=1 << 26,
    )
    receiver.start()
    receiver.engine_is_up()
    while True:
        staged = receiver.staged()
        if staged is None:
            time.sleep(0.002)
            continue
        report = {"version": staged.version, "tensors": described(staged.tensors)}
        receiver.loaded(staged)
        print_json(report)


def hit_once(number: int, after: int) -> None:
    checksum, calls = buckets.checksum, 0

    def hit(bucket: torch.Tensor, first_byte: int) -> int:
        nonlocal calls
        calls += 1
        if calls == after:
            os.kill(os.getpid(), number)
        return checksum(bucket, first_byte)

    buckets.checksum = hit


if __name__ == "__main__":
    main()
