"""The demo's data and model, and the fork server of launches, created once for all system tests."""

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
    """Starts launches named after the test; remaining processes are killed at the end."""
    started: list[Launched] = []

    def start(*arguments: str, run: str | None = None, plain: bool = False) -> Launched:
        """Starts a launch. With `plain` it is started as a user does: only then it has a PYTHONPATH set by the test."""
        name = run or request.node.name.replace("[", "-").replace("]", "")
        started.append(start_launch(demo_folder, name, *arguments, preloaded=None if plain else preloaded))
        return started[-1]

    yield start
    for launched in started:
        launched.kill()


@pytest.fixture
def asyncrl(demo_folder: Path, preloaded: ForkServer) -> Callable[..., str]:
    """Runs a command, which must succeed, and returns its output."""

    def run(*arguments: str, timeout_s: float = 100.0) -> str:
        output, _ = (command := Command(preloaded, demo_folder, list(arguments))).communicate(timeout_s)
        assert command.returncode == 0, output
        return output

    return run
