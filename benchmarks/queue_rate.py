"""Measures trajectories/s through the replay queue, from lease to commit with its journal, against other queues that
only move as many bytes, and against the journal's disk."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.frame import Limit, Round, Row
from benchmarks.peers import PEERS
from benchmarks.queue_load import GROUP_SIZE, PROMPT_TOKENS, Load

TOKEN_BYTES = 13
"""Bytes per token: token id, log-prob, version, and action mask."""
SIZES = {"1k": 1_000, "16k": 16_000}
"""Average number of completion tokens per trajectory."""
QUICK_SIZES = ("1k",)
BESIDES, QUICK_BESIDES = ("Redis", "Ray", "mp.Queue"), ("Redis",)
"""Queues compared at the smaller size only, which favors them."""
WARM_S, LOOK_S = 1.0, 0.01


def through_queue(folder: Path, tokens: int, seconds: float, *, journaled: bool) -> float:
    """Returns trajectories trained per second."""
    load = Load(folder, generators=1, completion_tokens=tokens, journaled=journaled)
    while load.client.status()["step"] < 1:
        time.sleep(0.02)
    time.sleep(WARM_S)
    before, started_s = _after_a_step(load)
    time.sleep(seconds)
    after, ended_s = _after_a_step(load)
    load.end()
    return GROUP_SIZE * (after - before) / (ended_s - started_s)


def _after_a_step(load: Load) -> tuple[int, float]:
    """Waits for the end of the next step; returns the number of trained groups, and the time."""
    step = load.client.status()["step"]
    while (status := load.client.status())["step"] == step:
        time.sleep(LOOK_S)
    return status["trained"], time.monotonic()


def measure(quick: bool) -> Iterator[Round]:
    seconds, sizes, besides = (1.0, QUICK_SIZES, QUICK_BESIDES) if quick else (4.0, tuple(SIZES), BESIDES)
    while True:
        one: Round = {}
        for size in sizes:
            tokens = SIZES[size]
            message_bytes = TOKEN_BYTES * (PROMPT_TOKENS + tokens)
            ours, plain = (_in_folder(through_queue, tokens, seconds, journaled=way) for way in (True, False))
            raw, disk = (_in_folder(PEERS[name], message_bytes, seconds) for name in ("raw zmq", "disk"))
            one[f"of raw zmq, {size}"] = ours / raw
            one[f"of raw zmq without journal, {size}"] = plain / raw
            one[f"of the disk, {size}"] = ours / disk
            one[f"groups/s, {size}"] = ours / GROUP_SIZE
            one[f"MB/s, {size}"] = ours * message_bytes / 1e6
            one[f"raw zmq MB/s, {size}"] = raw * message_bytes / 1e6
            one[f"disk MB/s, {size}"] = disk * message_bytes / 1e6
            if size == "1k":
                for peer in besides:
                    one[f"of {peer}, {size}"] = ours / _in_folder(PEERS[peer], message_bytes, seconds)
        yield one


def _in_folder(run, *arguments, **options) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), *arguments, **options)


ROW = Row(
    what="trajectories/s through lease, finish, take and commit, with the journal",
    against="raw pyzmq, Redis streams, Ray's queue and multiprocessing.Queue with as many bytes",
    limits={
        "of raw zmq, 1k": Limit(0.7, bound=True),
        "of raw zmq, 16k": Limit(0.7, bound=True),
        "of Redis, 1k": Limit(3.0),
        "of Ray, 1k": Limit(50.0),
    },
    measure=measure,
)
