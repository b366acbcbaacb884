"""Measures groups/s of the replay queue with its journal against the same queue without one, through its sockets.

PYTHONPATH=. python benchmarks/journal.py --rounds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.queue_load import Load

SIZES = {"13 KB": 96, "200 KB": 1900}
"""Completion tokens by the resulting average size of a group."""
WAYS = (None, "os", "step", "group")
WARM_S = 2.0


def measure(folder: Path, flush: str | None, tokens: int, seconds: float) -> tuple[float, float]:
    """Returns groups trained per second, and microseconds of the replay process's CPU time per group."""
    settings = {"journal.flush": flush} if flush else {}
    load = Load(folder, completion_tokens=tokens, journaled=flush is not None, settings=settings)
    while load.client.status()["step"] < 1:
        time.sleep(0.05)
    time.sleep(WARM_S)
    process = psutil.Process(load.processes["replay"].pid)
    before, cpu, started_s = load.client.status()["trained"], sum(process.cpu_times()[:2]), time.monotonic()
    time.sleep(seconds)
    after, spent_s = load.client.status()["trained"] - before, sum(process.cpu_times()[:2]) - cpu
    rate = after / (time.monotonic() - started_s)
    load.end()
    return rate, spent_s / after * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="Duration of each measurement.")
    parser.add_argument("--folder", type=Path, help="Folder for journals; by default the temporary folder.")
    parser.add_argument("--json", type=Path, help="File to write the results to.")
    options = parser.parse_args()
    results: list[dict[str, object]] = []
    print("| group | journal.flush | groups/s | rate against no journal | processor time of a group |")
    print("|---|---|---|---|---|")
    for size, tokens in SIZES.items():
        rounds: list[dict[str | None, tuple[float, float]]] = []
        for _ in range(options.rounds):
            rounds.append({})
            for way in WAYS:
                with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                    rounds[-1][way] = measure(Path(folder), way, tokens, options.seconds)
        for way in WAYS:
            rate, ratio = (
                statistics.median(one[way][0] / (1.0 if plain else one[None][0]) for one in rounds)
                for plain in (True, False)
            )
            cpu_us = statistics.median(one[way][1] for one in rounds)
            name = way or "no journal"
            print(f"| {size} | {name} | {rate:,.0f} | {ratio:.3f} | {cpu_us:.0f} us |", flush=True)
            results.append({"group": size, "flush": name, "rate": rate, "ratio": ratio, "cpu_us": cpu_us})
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
