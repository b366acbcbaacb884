"""A fork server that imports torch and the modules in FORK_SERVER_IMPORTS. Children are roles or run Python code."""

from __future__ import annotations

import os
import sys

from asyncrl.launch import worker
from asyncrl.launch.fork_server import main


def run(arguments: list[str]) -> int:
    if arguments[0] == "-m":
        return worker.main(arguments[2:])
    exec(arguments[1], {})
    return 0


if __name__ == "__main__":
    more = os.environ.get("FORK_SERVER_IMPORTS")
    sys.exit(main(run, ["torch", *([more] if more else [])]))
