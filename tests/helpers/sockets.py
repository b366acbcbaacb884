"""Sockets of tests: unix sockets in one folder with a short path that ends with the test process, and ports."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

VARIABLE = "ASYNCRL_TEST_SOCKETS"


def socket_address(name: object) -> str:
    """The ZeroMQ address of that name, the same one in this process and in those that it starts."""
    return f"ipc://{_folder() / str(name)}"


def _folder() -> Path:
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = tempfile.mkdtemp(prefix="asyncrl-tests-")
        atexit.register(shutil.rmtree, os.environ[VARIABLE], ignore_errors=True)
    return Path(os.environ[VARIABLE])


def free_port() -> int:
    """A port of the loopback interface on which nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def await_port(port: int, within_s: float = 60.0) -> None:
    """Waits until somebody listens on the port."""
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            assert time.monotonic() < deadline_s, f"nobody listens on port {port} after {within_s:g} s"
            time.sleep(0.05)
