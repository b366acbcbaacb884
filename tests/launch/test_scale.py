"""`asyncrl scale` against a scripted replay queue."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.cli.running import change_generators
from asyncrl.errors import PeerTimeoutError, RunError
from asyncrl.launch.run_dir import RunFolder
from tests.helpers.replay import loopback_endpoints, small_config

pytestmark = pytest.mark.timeout(240)

Heard = dict[str, tuple[float, int]]


class ScriptedQueue:
    """Returns one status after the other, then repeats the last one; None means no answer."""

    def __init__(self, *statuses: dict[str, Any] | None) -> None:
        self.statuses = list(statuses)
        self.wanted: list[int] = []

    def status(self) -> dict[str, Any]:
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if status is None:
            raise PeerTimeoutError("the replay queue did not answer")
        return status

    def scale(self, generators: int) -> None:
        self.wanted.append(generators)


def status(wanted: int, generators: Heard, step: int = 5) -> dict[str, Any]:
    """Returns a status with the seconds since the last heartbeat of each generator, and its version."""
    told = {index: {"heard_ago_s": ago_s, "version": version} for index, (ago_s, version) in generators.items()}
    return {"generators_wanted": wanted, "generators": told, "step": step}


TWO: Heard = {"0": (0.0, 5), "1": (0.0, 4)}


def change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wanted: int, queue: ScriptedQueue, **settings: Any) -> str:
    """Scales a live run and returns the output, without the number of seconds that it took."""
    monkeypatch.chdir(tmp_path)
    out = io.StringIO()
    with RunFolder(small_config(run="one", **settings)) as folder:
        folder.begin(folder.config, loopback_endpoints(1), [])
        console = Console(file=out, width=200)
        change_generators(folder.path, queue, wanted, console)  # type: ignore[arg-type]
    return re.sub(r"after \d+ s", "after some s", out.getvalue())


def test_joiners_are_awaited_until_they_have_the_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    queue = ScriptedQueue(
        status(2, TWO),
        status(3, TWO),
        None,
        status(3, TWO | {"2": (900.0, 5)}),  # an earlier generator with this number
        status(3, TWO | {"2": (0.0, -1)}),
        status(3, TWO | {"2": (0.0, 5)}, step=6),
    )
    output = change(monkeypatch, tmp_path, 3, queue)
    assert output == "generators 2 -> 3: generator-2 is up after some s\n"
    assert (queue.wanted, len(queue.statuses)) == ([3], 1)


def test_leavers_are_awaited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    queue = ScriptedQueue(status(2, TWO), status(1, TWO), status(1, {"0": (0.0, 5)}))
    assert change(monkeypatch, tmp_path, 1, queue) == "generators 2 -> 1: generator-1 has left after some s\n"
    assert change(monkeypatch, tmp_path, 2, ScriptedQueue(status(2, TWO))) == "generators 2 -> 2: nothing to do\n"


def test_a_change_that_does_not_happen_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    queue = ScriptedQueue(status(2, TWO), status(3, TWO))
    with pytest.raises(
        RunError, match=r"generators 2 -> 3: not up within launch.start_timeout_s = 0.5 s: generator-2; the run"
    ):
        change(monkeypatch, tmp_path, 3, queue, launch__start_timeout_s=0.5)
    with pytest.raises(RunError, match="generators 2 -> 3: the run now wants 2"):
        change(monkeypatch, tmp_path, 3, ScriptedQueue(status(2, TWO)))


def test_run_that_ends_meanwhile_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with RunFolder(small_config(run="one")) as folder:
        folder.begin(folder.config, loopback_endpoints(1), [])
    queue = ScriptedQueue(status(2, TWO), status(3, TWO))
    with pytest.raises(RunError, match="generators 2 -> 3: the run ended meanwhile, without generator-2"):
        change_generators(folder.path, queue, 3, Console(quiet=True))  # type: ignore[arg-type]
