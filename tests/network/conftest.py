from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.network.hosts import Network, hosts_fault


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """A network without hosts."""
    if fault := hosts_fault():
        pytest.skip(f"no network namespaces here: {fault}")
    network = Network(tmp_path)
    yield network
    network.close()
