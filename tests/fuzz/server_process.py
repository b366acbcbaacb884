"""A real replay server in a separate process: `python -m tests.fuzz.server_process PORT FOLDER`."""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys
from pathlib import Path

import structlog

from asyncrl.observe.trace import TraceWriter
from asyncrl.replay import live_group as refunds
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.server import run_replay
from asyncrl.types import Prompt, PromptPosition
from tests.fuzz.frames import GROUP_SIZE, RUN_ID, prompt
from tests.helpers.replay import loopback_endpoints, small_config


class Prompts:
    """Prompts without end."""

    skipped_rows = 0
    filtered_rows = 0
    num_rows = 1 << 16

    def __init__(self) -> None:
        self._row = -1

    def __next__(self) -> Prompt:
        self._row += 1
        return prompt(self._row % self.num_rows)

    def prompt(self, row: int) -> Prompt:
        return prompt(row)

    @property
    def position(self) -> PromptPosition:
        return PromptPosition(drawn=self._row + 1)

    def seek(self, position: PromptPosition) -> None:
        self._row = position.drawn - 1


def main(port: int, folder: Path) -> None:
    faulthandler.register(signal.SIGUSR1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    config = small_config(
        launch__generators=2,
        steps=(1 << 31) - 1,
        data__eval="eval.parquet",
        eval__every_steps=50,
        generator__group_size=GROUP_SIZE,
        launch__heartbeat_timeout_s=1.0,
    )
    refunds.MAX_REFUNDS_IN_A_ROW = 1 << 40
    queue = ReplayQueue(config, Prompts(), TraceWriter(folder / "trace.parquet"), [prompt(0), prompt(1)])
    run_replay(queue, loopback_endpoints(port, RUN_ID), lambda: False)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
