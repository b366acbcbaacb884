"""An address of a store."""

from __future__ import annotations

import uuid

import pytest

from tests.helpers.sockets import socket_address


@pytest.fixture
def address() -> str:
    """The address of one test's sender."""
    return socket_address(f"weights-{uuid.uuid4().hex[:8]}")
