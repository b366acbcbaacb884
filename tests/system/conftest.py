"""The demo's data and model, made once for all system tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.demo import make_demo
from tests.helpers.runs import Launched, start_launch


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo(tmp_path_factory.mktemp("demo"))


@pytest.fixture
def launch(demo_folder: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Launched]]:
    """Starts launches named after the test; whatever is left of them is ended."""
    started: list[Launched] = []

    def start(*arguments: str, run: str | None = None) -> Launched:
        name = run or request.node.name.replace("[", "-").replace("]", "")
        started.append(start_launch(demo_folder, name, *arguments))
        return started[-1]

    yield start
    for launched in started:
        launched.kill()
