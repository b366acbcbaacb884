"""Fixtures for all tests of the learner: a model, the process group of a single rank, and a run of two ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from worlds import make_model

    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    from asyncrl.launch.machine import find_port

    return lambda: find_port()


@pytest.fixture(scope="session")
def one_rank(free_port: Callable[[], int]) -> Iterator[object]:
    """The process group of a single learner rank in this process."""
    from worlds import endpoints

    from asyncrl.learner.distributed import process_group

    with process_group(endpoints(free_port()), 0, 1, start_timeout_s=20, timeout_s=20) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def two_ranks(
    tiny_model: Path,
    free_port: Callable[[], int],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Path:
    """Folder with the results of `two_ranks.py`."""
    from worlds import spawn

    from tests.helpers.selection import selected_names

    out = tmp_path_factory.mktemp("two_ranks")
    names = selected_names(request, "two_ranks")
    spawn("two_ranks.py", tiny_model, out, free_port(), ranks=2, timeout_s=220, names=names)
    return out
