"""Scripts of tests as processes that start without imports: they are forked from one process of the test session."""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asyncrl.launch.fork_server import Forked, ForkServer, main
from tests.helpers.fork_servers import start_fork_server
from tests.helpers.sockets import socket_address

PRELOADED = (
    "asyncrl.learner.role",
    "asyncrl.learner.critic",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "asyncrl.weights.receiver",
    "transformers.models.qwen2.modeling_qwen2",
)


@functools.cache
def _fork_server() -> ForkServer:
    fork_server = start_fork_server("tests.helpers.forked_scripts")
    atexit.register(fork_server.close)
    return fork_server


def fork_script(script: Path, arguments: Iterable[object], output: int, folder: Path) -> Forked:
    """Runs a script as a process in `folder`, with both outputs in the file descriptor `output`."""
    socket_address("any")  # creates the folder of this process's sockets
    command = [str(script), *map(str, arguments)]
    return _fork_server().fork(command, {**os.environ, "PWD": str(folder)}, output)


def run_script(arguments: list[str]) -> int:
    """Runs a script with its arguments, and modules of its folder, in the folder that PWD names."""
    os.chdir(os.environ["PWD"])
    sys.path.insert(0, os.path.dirname(arguments[0]))
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


def print_json(fields: dict[str, Any]) -> None:
    """Prints a line in one write: other threads write their log to the same output."""
    os.write(sys.stdout.fileno(), (json.dumps(fields) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main(run_script, PRELOADED))
