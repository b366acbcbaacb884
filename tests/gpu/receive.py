"""A receiver on the first GPU that this process sees: loads two versions and prints what it got.

python receive.py PORT TRANSPORT
"""

from __future__ import annotations

import json
import sys
import time

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
    for _ in range(2):
        while (staged := receiver.staged()) is None:
            time.sleep(0.01)
        sums = {name: float(tensor.double().sum()) for name, tensor in staged.tensors}
        devices = sorted({tensor.device.type for _, tensor in staged.tensors})
        receiver.loaded(staged)
        print(json.dumps({"version": staged.version, "sums": sums, "devices": devices}), flush=True)
    receiver.close()


if __name__ == "__main__":
    main()
