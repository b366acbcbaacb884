"""Fork servers of modules in tests, which are not installed."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

from asyncrl.launch.fork_server import ForkServer


def start_fork_server(module: str) -> ForkServer:
    """Starts the module as a fork server; its children have the environment that each is given."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(paths)}):
        return ForkServer(module)
