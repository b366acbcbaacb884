"""A generator's weight receiver in a process of its own: loads every version and prints it as a line of JSON.

    python receiver_process.py PORT RANK NUM_GENERATORS TIMEOUT_S [SIGNAL]

With SIGNAL (a name) it sends itself that signal inside its first broadcast.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch

from asyncrl.weights import receiver as module
from asyncrl.weights.receiver import WeightReceiver


def main() -> None:
    port, rank, num_generators = map(int, sys.argv[1:4])
    if len(sys.argv) > 5:

        def hit(*_: Any, **__: Any) -> int:
            os.kill(os.getpid(), signal.Signals[sys.argv[5]])
            time.sleep(60.0)
            raise AssertionError("unreachable")

        module.broadcast = hit
    receiver = WeightReceiver(
        ("127.0.0.1", port), rank=rank, num_generators=num_generators, transport="gloo", timeout_s=float(sys.argv[4])
    )
    receiver.start()
    while True:
        staged = receiver.staged()
        if staged is None:
            time.sleep(0.002)
            continue
        sums = {name: [str(tensor.dtype), list(tensor.shape), digest(tensor)] for name, tensor in staged.tensors}
        receiver.loaded(staged)
        print(json.dumps({"version": staged.version, "checksum": staged.checksum, "tensors": sums}), flush=True)


def digest(tensor: torch.Tensor) -> int:
    """A number that shows whether two tensors have the same bytes."""
    return hash(tensor.contiguous().view(torch.uint8).numpy().tobytes())


if __name__ == "__main__":
    main()
