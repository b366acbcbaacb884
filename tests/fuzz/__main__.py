"""`python -m tests.fuzz --messages 1000000`: four fifths go to a replay server, one to clients. The seed is printed."""

from __future__ import annotations

import argparse
import secrets
import sys

from tests.fuzz.drive import FuzzError, fuzz_clients, fuzz_server


def main() -> int:
    """0 when nothing died, hung or grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, help="default: a random one")
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    clients = options.messages // 5
    try:
        for fuzz, count in ((fuzz_server, options.messages - clients), (fuzz_clients, clients)):
            print(fuzz(count, seed, lambda text: print(text, flush=True)), flush=True)
    except FuzzError as error:
        print(f"FAILED {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
