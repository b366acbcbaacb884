"""Measures bytes/s from the learner to its generators, and the time that a weight swap stalls an engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

from asyncrl.launch.resources.placement import reserve_ports
from asyncrl.wire.socket_folder import socket_folder
from benchmarks.demo import prepare_cold
from benchmarks.frame import Limit, Round, Row
from benchmarks.worker import Worker

SIDES = "benchmarks.weights_sides"
SIZES = {"1 MB": 10**6, "100 MB": 10**8, "1 GB": 10**9}
PAIRS = {"1 MB": 20, "100 MB": 8, "1 GB": 3}
"""Number of versions sent in a round, each by asyncrl and by a bare broadcast."""
RECEIVERS = (1, 2, 4)
QUICK_SIZES, QUICK_RECEIVERS = ("1 MB", "100 MB"), (1,)


class Ranks:
    """The learner's process on the first core and the generators' processes on the others, which follow instructions
    until the stack ends."""

    def __init__(self, stack: ExitStack, receivers: int) -> None:
        self._sockets = stack.enter_context(socket_folder())
        first, *rest = sorted(os.sched_getaffinity(0))
        self._workers = [
            Worker(SIDES, "rank", rank, cores=rest or [first] if rank else [first], stack=stack)
            for rank in range(receivers + 1)
        ]

    def measure(self, receivers: int, num_bytes: int, pairs: int) -> dict[str, float]:
        """Returns the median seconds per version by asyncrl and by a bare broadcast to the first `receivers` ranks."""
        (bare_port,) = reserve_ports(0, 1)
        for worker in self._workers[: receivers + 1]:
            worker.tell([bare_port, f"ipc://{self._sockets}/{bare_port}", receivers, num_bytes, pairs])
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
    sizes, counts = (QUICK_SIZES, QUICK_RECEIVERS) if quick else (tuple(SIZES), RECEIVERS)
    while True:
        one: Round = {}
        with ExitStack() as stack:
            ranks = Ranks(stack, max(counts))
            for size in sizes:
                for receivers in counts:
                    times = ranks.measure(receivers, SIZES[size], PAIRS[size])
                    one[f"of gloo, {size} to {receivers}"] = times["bare"] / times["own"]
                    for name, seconds in times.items():
                        one[f"{name} MB/s, {size} to {receivers}"] = SIZES[size] / seconds / 1e6
        yield one | stall(model, 5 if quick else 20)


ROW = Row(
    what="bytes/s from the learner to 1, 2 and 4 generators; stall of an engine by a swap",
    against="a bare gloo broadcast; copying the bytes and one engine step",
    limits={
        **{f"of gloo, {size} to {receivers}": Limit(0.9, bound=True) for size in SIZES for receivers in RECEIVERS},
        "stall": Limit(1.0, at_most=True),
    },
    measure=measure,
)
