"""Measures the replay process's CPU time per group by the number of connected generators, at the same total rate of
groups."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.frame import Limit, Round, Row
from benchmarks.queue_load import Load, processor_s

GENERATORS, QUICK_GENERATORS = (1, 16, 64, 256), (1, 256)
LEASES = 4
"""Number of leases of each generator, independent of the number of generators."""
GROUPS_PER_S = 300.0
"""Total rate of all generators."""
SETTINGS = {"replay.max_staleness": 1000, "replay.groups_per_step": 32}
WARM_S, SECONDS = 1.0, 4.0


def cost_us(generators: int) -> float:
    """Returns microseconds of the replay process's CPU time per group, from lease to commit."""
    with tempfile.TemporaryDirectory() as folder:
        group_s = generators * LEASES / GROUPS_PER_S
        load = Load(
            Path(folder), generators, in_one_process=True, leases=LEASES, group_s=group_s, settings=SETTINGS
        )  # fmt: skip
        while load.client.status()["step"] < 2:
            time.sleep(0.05)
        time.sleep(WARM_S + 2 * group_s)
        pid = load.processes["replay"].pid or 0
        before, cpu_s = load.client.status()["trained"], processor_s(pid)
        time.sleep(SECONDS)
        groups = load.client.status()["trained"] - before
        cpu_s = processor_s(pid) - cpu_s
        load.end()
    return cpu_s / groups * 1e6


def measure(quick: bool) -> Iterator[Round]:
    while True:
        costs = {generators: cost_us(generators) for generators in (QUICK_GENERATORS if quick else GENERATORS)}
        ratios = {f"cost at {generators}": cost / costs[1] for generators, cost in costs.items() if generators > 1}
        yield ratios | {f"us a group at {generators}": cost for generators, cost in costs.items()}


ROW = Row(
    what="processor time of a group in the replay process with 16, 64 and 256 generators",
    against="the same with 1",
    limits={f"cost at {GENERATORS[-1]}": Limit(1.3, at_most=True)},
    measure=measure,
)
