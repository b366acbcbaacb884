"""Measures the replay queue with its journal: groups/s against the same queue without one, and how long the commit of a
step of hundreds of megabytes waits for the disk."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from asyncrl.replay.journal import ENTRY, WRITE_BACK_BYTES
from benchmarks.frame import Limit, Round, Row
from benchmarks.queue_load import GROUP_SIZE, PROMPT_TOKENS, TOKEN_BYTES, Load

SIZES = {"13 KB": 96, "200 KB": 1900}
"""Completion tokens by the resulting average size of a group."""
QUICK_SIZES = ("200 KB",)
WAYS, QUICK_WAYS = (None, "os", "step", "group"), (None, "step")
"""Values of `journal.flush`; None without a journal."""
WARM_S = 2.0
COMMIT_TOKENS, COMMIT_GROUPS, COMMIT_LEASES = 16_000, 512, 64
GROUP_BYTES = GROUP_SIZE * (PROMPT_TOKENS + COMMIT_TOKENS) * TOKEN_BYTES
COMMIT_BYTES_PER_S = 60e6
"""Rate of the groups of the large steps: a fraction of the disk's."""
COMMITS, QUICK_COMMITS = 4, 1
FLUSHES = 20


def through_queue(folder: Path, flush: str | None, tokens: int, seconds: float) -> float:
    """Returns groups trained per second."""
    settings = {"journal.flush": flush} if flush else {}
    load = Load(folder, completion_tokens=tokens, journaled=flush is not None, settings=settings)
    while load.client.status()["step"] < 1:
        time.sleep(0.05)
    time.sleep(WARM_S)
    before, began_s = load.client.status()["trained"], time.monotonic()
    time.sleep(seconds)
    rate = (load.client.status()["trained"] - before) / (time.monotonic() - began_s)
    load.end()
    return rate


def commits_s(folder: Path, count: int, *, journaled: bool) -> list[float]:
    """Returns the time of the commits of `count` steps of COMMIT_GROUPS groups each."""
    settings = {"replay.groups_per_step": COMMIT_GROUPS, "replay.max_staleness": 1}
    load = Load(
        folder, generators=1, leases=COMMIT_LEASES, group_s=COMMIT_LEASES * GROUP_BYTES / COMMIT_BYTES_PER_S,
        completion_tokens=COMMIT_TOKENS, settings=settings, journaled=journaled,
    )  # fmt: skip
    found: list[float] = []
    while len(found) < count:
        while load.client.status()["step"] <= len(found):
            time.sleep(0.1)
        time.sleep(0.1)
        found.append(load.commit_s.value)
    load.end()
    return found


def flush_s(folder: Path) -> float:
    """Returns the median time of one flush of what the journal writes before it starts one: stream, then sums."""
    times: list[float] = []
    data = os.urandom(WRITE_BACK_BYTES)
    with (folder / "stream").open("wb", buffering=0) as stream, (folder / "sums").open("wb", buffering=0) as sums:
        for _ in range(FLUSHES):
            stream.write(data)
            sums.write(data[: ENTRY.itemsize])
            began_s = time.monotonic()
            os.fdatasync(stream.fileno())
            os.fdatasync(sums.fileno())
            times.append(time.monotonic() - began_s)
    return statistics.median(times)


def measure(quick: bool) -> Iterator[Round]:
    seconds = 1.0 if quick else 5.0
    while True:
        one: Round = {}
        for size in QUICK_SIZES if quick else SIZES:
            rates = {
                way: _in_folder(through_queue, way, SIZES[size], seconds) for way in (QUICK_WAYS if quick else WAYS)
            }
            one |= {f"{way} of no journal, {size}": rates[way] / rates[None] for way in rates if way}
            one[f"groups/s without journal, {size}"] = rates[None]
        commits = QUICK_COMMITS if quick else COMMITS
        waited_s = statistics.median(_in_folder(commits_s, commits, journaled=True))
        alone_s = statistics.median(_in_folder(commits_s, commits, journaled=False))
        flushed_s = _in_folder(flush_s)
        one["flushes that a commit of 855 MB waits for"] = (waited_s - alone_s) / flushed_s
        one["ms until a commit of 855 MB"], one["ms without journal"] = waited_s * 1e3, alone_s * 1e3
        one["ms a flush"] = flushed_s * 1e3
        yield one


def _in_folder(run, *arguments, **options):  # type: ignore[no-untyped-def]
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), *arguments, **options)


ROW = Row(
    what="groups/s through the queue with its journal, and the wait of a commit",
    against="the same without a journal; for the commit in flushes of 4 MiB to the same disk",
    limits={
        "step of no journal, 13 KB": Limit(0.93, bound=True),
        "step of no journal, 200 KB": Limit(0.93, bound=True),
        "flushes that a commit of 855 MB waits for": Limit(2.0, at_most=True),
    },
    measure=measure,
    long=True,
)
