"""Tests of what only a GPU can show; `make gpu-check` runs them, and nothing else does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import torch

from asyncrl.launch.machine import find_port
from asyncrl.learner.distributed import Ranks, process_group
from tests.gpu_check import report
from tests.helpers.runs import Launched

for area in ("learner", "weights", "generator"):
    sys.path.append(str(Path(__file__).parents[1] / area))


@pytest.fixture(scope="session", autouse=True)
def gpu() -> torch.device:
    """The first GPU."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    return torch.device("cuda", 0)


@pytest.fixture(scope="module")
def one_rank(gpu: torch.device) -> Iterator[Ranks]:
    """The process group of a single learner rank in this process."""
    from worlds import endpoints

    with process_group(endpoints(find_port()), 0, 1, start_timeout_s=60, timeout_s=60) as ranks:
        yield ranks


@pytest.fixture
def started() -> Iterator[list[Launched]]:
    """Runs that are ended with the test."""
    runs: list[Launched] = []
    yield runs
    for run in runs:
        run.kill()


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str, float], None]:
    """A function that records a figure, with its unit in the name."""
    return record_property


def pytest_collection_finish(session: pytest.Session) -> None:
    """Reports the names of all checks, for the case that the process does not live to run them."""
    if session.items:
        report({"names": [_name(item.nodeid) for item in session.items]})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports a check when its outcome is known."""
    result = yield
    if result.failed or result.skipped or result.when == "call":
        reason = ""
        if result.skipped and isinstance(result.longrepr, tuple):
            reason = result.longrepr[2].removeprefix("Skipped: ")
        elif result.failed:
            reason = _cause(result.longreprtext)
        report(
            {
                "name": _name(item.nodeid),
                "outcome": result.outcome,
                "reason": reason,
                "seconds": round(result.duration, 2),
                "figures": dict(item.user_properties),
            }
        )
    return result


def _cause(text: str) -> str:
    """Returns the first line of the last error of a report."""
    lines = text.strip().splitlines()
    errors = [line for line in lines if line.startswith("E  ")]
    firsts = [
        line for line, before in zip(lines, ["", *lines], strict=False) if line in errors and before not in errors
    ]
    return (firsts or lines)[-1].removeprefix("E").strip()


def _name(nodeid: str) -> str:
    return nodeid.rpartition("/")[2]
