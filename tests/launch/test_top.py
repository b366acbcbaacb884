"""`asyncrl top` with a scripted replay queue."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.cli import running as top_module
from asyncrl.cli.running import top
from asyncrl.errors import ConfigError, PeerTimeoutError
from asyncrl.launch.run_dir import RunFolder
from tests.helpers.replay import loopback_endpoints, small_config

pytestmark = pytest.mark.timeout(240)

STATUS: dict[str, Any] = {
    "step": 3, "reward": 0.5, "staleness_mean": 1.5, "staleness_max": 2, "tokens_per_s": 1234.0,
    "generator_idle": 0.1, "generator_environments": 0.0, "learner_idle": 0.02,
    "leased": 4, "finished": 5, "trained": 6, "refunded": {},
    "metrics": {}, "generators": {}, "eval": {"prompts_done": 0, "last": None, "running": []},
    "generators_wanted": 0, "catching_up": None, "collapse": {},
}  # fmt: skip


class ScriptedQueue:
    """Returns one status after the other, then raises as on Ctrl-C; None means no answer."""

    def __init__(self, statuses: Iterable[dict[str, Any] | None]) -> None:
        self.statuses = iter(statuses)
        self.closed = False

    def status(self) -> dict[str, Any]:
        try:
            status = next(self.statuses)
        except StopIteration:
            raise KeyboardInterrupt from None
        if status is None:
            raise PeerTimeoutError("no answer")
        return status

    def close(self) -> None:
        self.closed = True


def test_it_shows_the_run_until_ctrl_c(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    out = io.StringIO()

    def until_it_is_judged() -> Iterator[dict[str, Any] | None]:
        yield from (STATUS | {"step": 0}, None)
        deadline_s = time.monotonic() + 60
        while "learner-bound" not in out.getvalue() and time.monotonic() < deadline_s:
            yield STATUS

    queue = ScriptedQueue(until_it_is_judged())
    monkeypatch.setattr(top_module, "LauncherClient", lambda endpoints: queue)
    monkeypatch.setattr(top_module, "EVERY_S", 0.01)
    with RunFolder(small_config(run="one")) as folder:
        folder.begin(folder.config, loopback_endpoints(1), [])
        top(folder.path, Console(file=out, width=200))
    lines = out.getvalue().splitlines()
    assert lines[0] == "waiting for the first step ..."
    assert lines[1] == "the replay queue does not answer; it may be starting ..."
    assert lines[2].startswith("step 3/3  reward 0.500")
    assert any(line.startswith("learner-bound: generators idle 10%") for line in lines), "the bottleneck is shown"
    assert queue.closed


def test_a_run_that_is_not_live_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="runs/none: there is no such run"):
        top(Path("runs/none"), Console())
