"""The replay role with prompts that need no data: `python -m tests.replay.replay_process FOLDER PORT STEPS [KEYS]`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.journal import Journal
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.server import run_replay
from tests.helpers.replay import EndlessPrompts, loopback_endpoints, small_config

MAX_STALENESS = 2


def main(folder: Path, port: int, steps: int, keys: str = "") -> None:
    endpoints = replace(loopback_endpoints(port), keys=keys)
    journal = Journal(folder / "journal", flush="step", segment_bytes=30_000)
    trace = TraceWriter(folder / "trace.parquet")
    config = small_config(steps=steps, replay__max_staleness=MAX_STALENESS)
    queue = ReplayQueue(config, EndlessPrompts(), trace, journal=journal, run_id=endpoints.run_id)
    run_replay(queue, endpoints, lambda: False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
