"""A free port, and things to end."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def cleanup() -> Iterator[list[Callable[[], object]]]:
    """Functions to call at the end, the last one first."""
    actions: list[Callable[[], object]] = []
    yield actions
    for action in reversed(actions):
        action()
