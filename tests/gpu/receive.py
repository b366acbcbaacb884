"""A receiver on the first GPU that this process sees: loads two versions, or more, and prints what it got.

python receive.py PORT TRANSPORT [VERSIONS]
"""

from __future__ import annotations

import hashlib
import json
import sys
import time

import torch
from torch import Tensor

from asyncrl.weights.receiver import WeightReceiver


def main() -> None:
    receiver = WeightReceiver(
        f"tcp://127.0.0.1:{sys.argv[1]}",
        rank=1,
        transport=sys.argv[2],
        timeout_s=60.0,
        max_bytes=1 << 30,
        device="cuda:0",
    )
    receiver.start()
    receiver.engine_is_up()
    for _ in range(int(sys.argv[3]) if sys.argv[3:] else 2):
        while (staged := receiver.staged()) is None:
            time.sleep(0.01)
        sums = {name: float(tensor.double().sum()) for name, tensor in staged.tensors}
        devices = sorted({tensor.device.type for _, tensor in staged.tensors})
        digest = digest_of(staged.tensors)
        receiver.loaded(staged)
        print(json.dumps({"version": staged.version, "sums": sums, "devices": devices, "digest": digest}), flush=True)
    receiver.close()


def digest_of(weights: list[tuple[str, Tensor]]) -> str:
    """A hash of all bits."""
    found = hashlib.sha256()
    for _, tensor in weights:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
