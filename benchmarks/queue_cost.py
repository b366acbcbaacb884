"""Measures the replay process's CPU time per group, from lease to commit with its journal: at full load, when rounds
are large, and at a few groups a second, when each group is a round of its own."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.frame import Limit, Round, Row
from benchmarks.queue_load import GROUP_SIZE, PROMPT_TOKENS, TOKEN_BYTES, Load, processor_s

TOKENS = 1000
"""Average number of completion tokens per trajectory."""
GROUP_BYTES = GROUP_SIZE * (PROMPT_TOKENS + TOKENS) * TOKEN_BYTES
BYTES_US = GROUP_BYTES / 1e3
"""What the limits allow for the bytes of a group: 1 ns each, a little more than five copies take."""
FEW_PER_S, LEASES = 10.0, 16
WARM_S = 2.0
FEW = {"leases": LEASES, "group_s": LEASES / FEW_PER_S, "settings": {"replay.groups_per_step": 32}}
"""A load of FEW_PER_S groups a second."""


def cost_us(seconds: float, **load: object) -> tuple[float, float]:
    """Returns microseconds of CPU time per group, and groups per second."""
    with tempfile.TemporaryDirectory() as folder:
        queue = Load(Path(folder), generators=1, completion_tokens=TOKENS, **load)  # type: ignore[arg-type]
        while queue.client.status()["step"] < 1:
            time.sleep(0.05)
        time.sleep(WARM_S)
        pid = queue.processes["replay"].pid or 0
        before, used_s, began_s = _groups(queue), processor_s(pid), time.monotonic()
        time.sleep(seconds)
        groups = _groups(queue) - before
        used_s, took_s = processor_s(pid) - used_s, time.monotonic() - began_s
        queue.end()
    return used_s / groups * 1e6, groups / took_s


def _groups(queue: Load) -> int:
    status = queue.client.status()
    return status["trained"] + status["finished"]


def measure(quick: bool) -> Iterator[Round]:
    while True:
        full_us, rate = cost_us(1.0 if quick else 5.0)
        few_us, few_rate = cost_us(3.0 if quick else 10.0, **FEW)
        yield {
            "us a group at full load": full_us,
            "us a group at 10 groups/s": few_us,
            "groups/s at full load": rate,
            "groups/s of the few": few_rate,
        }


ROW = Row(
    what=f"processor time of a group of {GROUP_SIZE} x {TOKENS} tokens in the replay process",
    against="300 and 600 us, and 1 ns a byte",
    limits={
        "us a group at full load": Limit(round(300 + BYTES_US), at_most=True),
        "us a group at 10 groups/s": Limit(round(600 + BYTES_US), at_most=True),
    },
    measure=measure,
)
