"""A learner's weight sender in a process of its own: does what the lines of its standard input say.

    python sender_process.py ADDRESS TIMEOUT_S

"send VERSION" sends the test's weights of that version, "wait" prints the stats when they arrived, "close" ends it.
"""

from __future__ import annotations

import sys
from dataclasses import asdict

from weight_parts import BUCKET_BYTES, manifest_of, weights

from asyncrl.weights.sender import WeightSender
from tests.helpers.forked_scripts import print_json


def main() -> None:
    sender = WeightSender(
        sys.argv[1],
        manifest_of(weights(0)),
        expected_generators=1,
        transport="auto",
        bucket_bytes=BUCKET_BYTES,
        timeout_s=float(sys.argv[2]),
    )
    for line in sys.stdin:
        match line.split():
            case ["send", version]:
                sender.send(int(version), weights(int(version)))
            case ["wait"]:
                sender.wait()
                print_json(asdict(sender.stats))
            case _:
                sender.close()
                return


if __name__ == "__main__":
    main()
