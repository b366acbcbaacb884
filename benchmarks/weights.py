"""Bytes a second from the learner to its generators, and how long a swap holds an engine up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from asyncrl.launch.resources import reserve_ports
from benchmarks.demo import prepare_cold
from benchmarks.frame import CannotRun, Limit, Round, Row, one_thread

SIZES = {"1 MB": 10**6, "100 MB": 10**8, "1 GB": 10**9}
QUICK_SIZES = ("1 MB", "100 MB")
RECEIVERS = (1, 2, 4)
TIMEOUT_S = 300.0


def measured(measuring: list[Any], others: list[list[Any]]) -> Any:
    """What the measuring process prints, which has the first core; the others have the rest, and are ended after it."""
    first, *rest = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        for arguments in others:
            other = _start(arguments, rest or [first])
            stack.callback(other.wait)
            stack.callback(other.kill)
        process = _start(measuring, [first])
        stack.callback(process.wait)
        stack.callback(process.kill)
        out, _ = process.communicate(timeout=TIMEOUT_S)
        if process.returncode:
            raise CannotRun(f"{measuring[0]} ended with code {process.returncode}: {out[-1500:]}")
    return json.loads(out.splitlines()[-1])


def _start(arguments: list[Any], cores: list[int]) -> subprocess.Popen[str]:
    command = ["taskset", "-c", ",".join(map(str, cores)), sys.executable, "-m", "benchmarks.weights_sides"]
    return subprocess.Popen(
        [*command, *map(str, arguments)], env=one_thread(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def seconds_of(receivers: int, num_bytes: int, versions: int) -> tuple[float, float]:
    """Of ours and of a bare gloo broadcast."""
    (port,) = reserve_ports(0, 1)
    ranks = range(1, receivers + 1)
    ours = measured(["send", port, receivers, num_bytes, versions], [["receive", port, r, num_bytes] for r in ranks])
    (port,) = reserve_ports(0, 1)
    own = ["gloo", port, receivers, num_bytes, versions]
    return ours, measured([*own, 0], [[*own, rank] for rank in ranks])


def measure(quick: bool) -> Iterator[Round]:
    model = prepare_cold()
    while True:
        one: Round = {}
        for size in QUICK_SIZES if quick else SIZES:
            for receivers in RECEIVERS:
                if quick and receivers == 2:
                    continue
                versions = 3 if quick or size == "1 GB" else 10
                ours_s, gloo_s = seconds_of(receivers, SIZES[size], versions)
                one[f"of gloo, {size} to {receivers}"] = gloo_s / ours_s
                one[f"MB/s, {size} to {receivers}"] = SIZES[size] / ours_s / 1e6
        times = measured(["swap", model, 3 if quick else 10], [])
        one["stall"] = times["stall"] / (times["copy"] + times["step"])
        one["stall ms"] = times["stall"] * 1e3
        yield one


ROW = Row(
    what="bytes/s from the learner to 1, 2 and 4 generators; stall of an engine by a swap",
    against="a bare gloo broadcast; copying the bytes and one engine step",
    limits={
        **{f"of gloo, {size} to {receivers}": Limit(0.9) for size in SIZES for receivers in RECEIVERS},
        "stall": Limit(1.0, at_most=True),
    },
    measure=measure,
)
