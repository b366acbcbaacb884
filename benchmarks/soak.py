"""Runs the replay queue at full rate for a long time and measures the memory growth of every process.

PYTHONPATH=. python benchmarks/soak.py --minutes 30
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import psutil

from benchmarks.queue_load import Load

SAMPLE_S = 5.0
SETTLE = 0.2
"""Fraction of the time at the start that is excluded, since buffers grow to their final size."""


@dataclass
class Memory:
    """Resident memory of one process over time."""

    name: str
    process: BaseProcess
    times_s: list[float] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)

    def sample(self, now_s: float) -> None:
        assert self.process.is_alive(), f"{self.name} ended with code {self.process.exitcode}"
        self.times_s.append(now_s)
        self.rss_mib.append(psutil.Process(self.process.pid).memory_info().rss / 2**20)

    def slope(self) -> tuple[float, float]:
        """Returns the growth after the excluded start in MiB per hour, and its standard error, from means of tenths of
        the time."""
        keep = [i for i, t in enumerate(self.times_s) if t >= SETTLE * self.times_s[-1]]
        times, sizes = np.array(self.times_s)[keep], np.array(self.rss_mib)[keep]
        parts = [part for part in np.array_split(np.arange(len(times)), 10) if len(part)]
        x = np.array([times[part].mean() for part in parts]) / 3600
        y = np.array([sizes[part].mean() for part in parts])
        slope, start = np.polyfit(x, y, 1)
        rest = y - (slope * x + start)
        error = np.sqrt((rest @ rest) / max(len(x) - 2, 1) / ((x - x.mean()) ** 2).sum())
        return float(slope), float(error)

    def line(self) -> str:
        slope, error = self.slope()
        settled = next(i for i, t in enumerate(self.times_s) if t >= SETTLE * self.times_s[-1])
        return (
            f"{self.name:12} {self.rss_mib[settled]:7.1f} -> {self.rss_mib[-1]:7.1f} MiB after the first fifth, "
            f"{slope:+7.2f} +- {error:.2f} MiB an hour, exit code {self.process.exitcode}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--generators", type=int, default=2)
    parser.add_argument("--json", type=Path, help="File to write the samples to.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        load = Load(Path(folder), options.generators, settings={"journal.max_bytes": 2 << 30})
        memory = [Memory(name, process) for name, process in load.processes.items()]
        print(f"soaking for {options.minutes:g} minutes", flush=True)
        started_s, largest_bytes = time.monotonic(), 0
        while (now_s := time.monotonic() - started_s) < 60 * options.minutes:
            for one in memory:
                one.sample(now_s)
            largest_bytes = max(largest_bytes, load.client.status()["journal"]["bytes"])
            time.sleep(SAMPLE_S)
        summary = load.end()
    trained, elapsed_s = summary["ledger"]["trained"], time.monotonic() - started_s
    print(f"{summary['steps']:,} steps, {trained:,} groups trained, {trained / elapsed_s:,.0f} a second")
    print(f"journal at most {largest_bytes / 2**20:.0f} MiB on disk")
    print("\n".join(one.line() for one in memory))
    if options.json:
        samples = {one.name: {"times_s": one.times_s, "rss_mib": one.rss_mib} for one in memory}
        options.json.write_text(json.dumps({"summary": summary, "samples": samples}))


if __name__ == "__main__":
    main()
