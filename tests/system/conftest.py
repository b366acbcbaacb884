"""The demo's data and model, and the process that launches are forked from, once for all system tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.launch.fork_server import ForkServer
from tests.helpers.preloaded import Command
from tests.helpers.runs import Launched, start_launch


@pytest.fixture
def launch(
    demo_folder: Path, preloaded: ForkServer, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Launched]]:
    """Starts launches named after the test; whatever is left of them is ended."""
    started: list[Launched] = []

    def start(*arguments: str, run: str | None = None, plain: bool = False) -> Launched:
        """`plain` starts it as a user does: only then does it see a PYTHONPATH that the test sets."""
        name = run or request.node.name.replace("[", "-").replace("]", "")
        started.append(start_launch(demo_folder, name, *arguments, preloaded=None if plain else preloaded))
        return started[-1]

    yield start
    for launched in started:
        launched.kill()


@pytest.fixture
def asyncrl(demo_folder: Path, preloaded: ForkServer) -> Callable[..., str]:
    """Runs a command to its end, which must be a good one, and gives what it prints."""

    def run(*arguments: str, timeout_s: float = 100.0) -> str:
        output, _ = (command := Command(preloaded, demo_folder, list(arguments))).communicate(timeout_s)
        assert command.returncode == 0, output
        return output

    return run
