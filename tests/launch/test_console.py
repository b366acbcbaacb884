"""Consoles whose terminal or pipe is closed."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest
from rich.console import Console

from asyncrl.launch.console import ignore_broken_pipe
from asyncrl.observe.live import LiveView

pytestmark = pytest.mark.timeout(240)


def test_a_terminal_that_was_closed_does_not_end_the_run() -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as file:
        console = ignore_broken_pipe(Console(file=file, force_terminal=True, width=100))
        console.print("before")
        assert b"before" in os.read(master, 1000)
        os.close(master)
        console.print("after")
        with LiveView(console, run="run", steps=3, max_staleness=1) as view:
            view.phase("starting ...")
        console.print("at the end")


def test_a_pipe_that_nobody_reads_does_not_change_the_exit_code() -> None:
    code = (
        "import sys\nfrom rich.console import Console\nfrom asyncrl.launch.console import ignore_broken_pipe\n"
        "console = ignore_broken_pipe(Console())\nsys.stdin.readline()\n"
        "for _ in range(100): console.print('x' * 1000)\nsys.exit(7)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdout.close()
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.wait(30) == 7
