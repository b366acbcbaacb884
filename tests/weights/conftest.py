"""An address of a store, and things to end."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from tests.helpers.sockets import socket_address


@pytest.fixture
def address() -> str:
    """The address of one test's sender."""
    return socket_address(f"weights-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def cleanup() -> Iterator[list[Callable[[], object]]]:
    """Functions to call at the end, the last one first."""
    actions: list[Callable[[], object]] = []
    yield actions
    for action in reversed(actions):
        action()
