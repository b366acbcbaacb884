"""The size of the chaos suite, and the figures that it prints at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.launch.fork_server import ForkServer
from tests.chaos.runs import Chaos

FULL = bool(os.environ.get("CHAOS"))
"""Set by `make chaos`; otherwise each test runs in a short form."""
FIGURES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash[FIGURES]:
        terminalreporter.write_line(line)


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Records a line of figures that is printed after all tests."""
    return lambda text: request.config.stash[FIGURES].append(f"{request.node.name}: {text}")


@pytest.fixture
def full() -> bool:
    return FULL


@pytest.fixture
def chaos(demo_folder: Path, preloaded: ForkServer, request: pytest.FixtureRequest) -> Iterator[Callable[..., Chaos]]:
    """Creates runs of the demo for fault injection; remaining processes are killed at the end."""
    made: list[Chaos] = []

    def make(*settings: str, name: str = "", folder: Path = demo_folder, seen_from: Path = Path("/")) -> Chaos:
        own = request.node.name.replace("[", "-").replace("]", "")
        made.append(Chaos(folder, name or own, settings, preloaded, seen_from))
        return made[-1]

    yield make
    for one in made:
        one.kill()
