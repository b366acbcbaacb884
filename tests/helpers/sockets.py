"""Unix sockets of tests, in one folder with a short path that ends with the test process."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
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
