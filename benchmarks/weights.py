"""Measures the time of a version from the learner to its generators, and for which a weight swap stalls an engine.

A version may take 10 ms and 1.15 times a bare gloo broadcast of its bytes, which is measured in turn with it, and hold
the learner for a copy of one bucket. Every receiver has a core of its own, as hosts have; numbers of receivers that the
machine has no cores for are not measured. A version in buckets (`weights.staging`) to one receiver, until it is loaded,
is compared with one that is staged, and not loaded yet. A version of 1 MB has no limit: its 5 ms are off every critical
path.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

from asyncrl.launch.machine import find_port
from asyncrl.wire.socket_folder import socket_folder
from benchmarks.demo import prepare_cold
from benchmarks.frame import CannotRun, Limit, Round, Row
from benchmarks.worker import Worker

SIDES = "benchmarks.weights_sides"
SIZES = {"1 MB": 10**6, "100 MB": 10**8, "1 GB": 10**9}
PAIRS = {"1 MB": 20, "100 MB": 8, "1 GB": 3}
"""Number of versions sent in a round, each by asyncrl and by a bare broadcast."""
BUCKET_PAIRS = 3
"""The same for versions in buckets."""
RECEIVERS = (1, 2, 4)
JUDGED = ("100 MB", "1 GB")
OWN_S, LINK_FACTOR = 0.01, 1.15
MAY_TAKE, MAY_HOLD = "of 10 ms + 1.15 links", "learner held, of a bucket's copy"
QUICK_SIZES, QUICK_RECEIVERS = ("1 MB", "100 MB"), (1,)


class Ranks:
    """The learner's process and the generators' processes, on a core each, which follow instructions until the stack
    ends."""

    def __init__(self, stack: ExitStack, receivers: int) -> None:
        self._sockets = stack.enter_context(socket_folder())
        cores = sorted(os.sched_getaffinity(0))
        self._workers = [Worker(SIDES, "rank", rank, cores=[cores[rank]], stack=stack) for rank in range(receivers + 1)]

    def measure(self, receivers: int, num_bytes: int, pairs: int, staging: str = "whole") -> dict[str, float]:
        """Returns the median seconds of a version to the first `receivers` ranks, by what takes them."""
        bare_port = find_port()
        for worker in self._workers[: receivers + 1]:
            worker.tell([bare_port, f"ipc://{self._sockets}/{bare_port}", receivers, num_bytes, pairs, staging])
        return self._workers[0].answer()


def stall(model: str, swaps: int) -> Round:
    """Returns the swap figures of an engine that runs alone on the first core."""
    with ExitStack() as stack:
        times = Worker(SIDES, "swap", model, swaps, cores=[min(os.sched_getaffinity(0))], stack=stack).answer()
    return {
        "stall": times["stall"] / (times["copy"] + times["step"]),
        **{f"{name} ms": 1e3 * seconds for name, seconds in times.items()},
    }


def measure(quick: bool) -> Iterator[Round]:
    model = prepare_cold()
    sizes, cores = QUICK_SIZES if quick else tuple(SIZES), len(os.sched_getaffinity(0))
    counts = [count for count in (QUICK_RECEIVERS if quick else RECEIVERS) if count < cores]
    if not counts:
        raise CannotRun("needs 2 cores: one for the learner, and one for a generator")
    while True:
        one: Round = {}
        with ExitStack() as stack:
            ranks = Ranks(stack, max(counts))
            for size in sizes:
                for receivers in counts:
                    whole = ranks.measure(receivers, SIZES[size], PAIRS[size])
                    one |= figures(size, receivers, whole)
                    if receivers == 1 and size in JUDGED:
                        buckets = ranks.measure(receivers, SIZES[size], BUCKET_PAIRS, "buckets")
                        one[f"into the engine in buckets, of whole, {size}"] = buckets["own"] / whole["own"]
                        one[f"into the engine in buckets ms, {size}"] = 1e3 * buckets["own"]
        yield one | stall(model, 5 if quick else 20)


def figures(size: str, receivers: int, times: dict[str, float]) -> Round:
    """Returns the figures of a size: against what it may take and hold the learner, and in ms."""
    name = f"{size} to {receivers}"
    ratios: Round = {}
    if size in JUDGED:
        ratios[f"{MAY_TAKE}, {name}"] = times["own"] / (OWN_S + LINK_FACTOR * times["bare"])
        if receivers == 1:
            ratios[f"{MAY_HOLD}, {size}"] = times["held"] / times["bucket"]
    return ratios | {f"{part} ms, {name}": 1e3 * seconds for part, seconds in times.items()}


ROW = Row(
    what="time of a version from the learner to 1, 2 and 4 generators, and for which it holds the learner; stall of an "
    "engine by a swap",
    against="10 ms and 1.15 bare gloo broadcasts; copying one bucket; copying the bytes and one engine step",
    limits={
        **{
            f"{MAY_TAKE}, {size} to {receivers}": Limit(1.0, at_most=True, cores=receivers + 1)
            for size in JUDGED
            for receivers in RECEIVERS
        },
        **{f"{MAY_HOLD}, {size}": Limit(1.0, at_most=True, cores=2) for size in JUDGED},
        "stall": Limit(1.0, at_most=True),
    },
    measure=measure,
)
