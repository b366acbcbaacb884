"""Commands on a live run: `asyncrl scale` changes its number of generators, `asyncrl top` shows it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console

from asyncrl.config.load import load_config
from asyncrl.config.sections import MAX_GENERATORS, too_many_generators
from asyncrl.errors import ConfigError, PeerTimeoutError, RunError
from asyncrl.launch.bottleneck import BottleneckMonitor
from asyncrl.launch.placement import place_roles
from asyncrl.launch.run_dir import is_running, read_endpoints, read_hosts
from asyncrl.observe.curves import Curves
from asyncrl.observe.live import LiveView
from asyncrl.observe.sample_watch import ShownSamples
from asyncrl.observe.trackers import METRICS_FILE
from asyncrl.replay.client import LauncherClient
from asyncrl.rewards.reward_model import uses_reward_model

POLL_S = 0.2


def scale(run_dir: Path, generators: int, console: Console) -> None:
    """Asks the run in this folder for `generators` generators; returns when the joining ones have weights and the
    leaving ones have left.

    Raises ConfigError when the run is unknown or not running, and RunError when the change takes longer than
    `launch.start_timeout_s`.
    """
    if generators < 1:
        raise ConfigError(f"--generators {generators}: a run needs at least 1")
    if generators > MAX_GENERATORS:
        raise ConfigError(f"--generators {generators}: {too_many_generators()}")
    client = LauncherClient(read_endpoints(run_dir))
    try:
        ScaleChange(run_dir, client, generators, console).await_all()
    finally:
        client.close()


class ScaleChange:
    """A change of the number of generators: tracks the ones that have yet to join or to leave."""

    def __init__(self, run_dir: Path, client: LauncherClient, wanted: int, console: Console) -> None:
        status = client.status()
        before = status["generators_wanted"]
        self.title = f"generators {before} -> {wanted}"
        self.version = status["step"]
        """Version that a joiner must have loaded: the newest weights at the time of the request."""
        self.joiners = set(range(before, wanted))
        self.leavers = set(range(wanted, before)) & _indices(status)
        self._run_dir = run_dir
        self._client = client
        self._wanted = wanted
        self._console = console
        self._started_s = time.monotonic()
        self._timeout_s = load_config(run_dir / "config.yaml").launch.start_timeout_s
        client.scale(wanted)

    def await_all(self) -> None:
        """Returns when all joiners are up and all leavers have ended. Raises RunError as `scale` does."""
        if not self.joiners and not self.leavers:
            self._say("nothing to do")
        while self.joiners or self.leavers:
            time.sleep(POLL_S)
            self._check()
            try:
                status = self._client.status()
            except PeerTimeoutError:
                continue  # the replay queue may be restarting
            self._take(status)

    def _take(self, status: dict[str, Any]) -> None:
        waited_s = time.monotonic() - self._started_s
        if status["generators_wanted"] != self._wanted:
            raise RunError(
                f"{self.title}: the run now wants {status['generators_wanted']}: another `asyncrl scale`, or too few "
                f"GPUs (see the run's output and {self._run_dir / 'logs' / 'launcher.jsonl'})"
            )
        for index, generator in status["generators"].items():
            fresh = generator["heard_ago_s"] < waited_s and generator["version"] >= self.version
            if int(index) in self.joiners and fresh:
                self.joiners.remove(int(index))
                self._say(f"generator-{index} is up after {waited_s:.0f} s")
        for index in self.leavers - _indices(status):
            self.leavers.remove(index)
            self._say(f"generator-{index} has left after {waited_s:.0f} s")

    def _check(self) -> None:
        names = ", ".join(f"generator-{index}" for index in sorted(self.joiners | self.leavers))
        if not is_running(self._run_dir):
            raise RunError(f"{self.title}: the run ended meanwhile, without {names}")
        if time.monotonic() - self._started_s > self._timeout_s:
            state = "up" if self.joiners else "gone"
            raise RunError(
                f"{self.title}: not {state} within launch.start_timeout_s = {self._timeout_s:g} s: {names}; the run "
                f"keeps trying, see {self._run_dir / 'logs'}"
            )

    def _say(self, text: str) -> None:
        self._console.print(f"{self.title}: {text}", highlight=False, soft_wrap=True)


def _indices(status: dict[str, Any]) -> set[int]:
    return {int(index) for index in status["generators"]}


EVERY_S = 0.5
READ_S = 2.0
"""Time for reading the rewards so far."""
REWARD = "reward/mean"


def top(run_dir: Path, console: Console) -> None:
    """Shows the run until it ends or Ctrl-C; changes nothing. Raises ConfigError when it is not running."""
    client = LauncherClient(read_endpoints(run_dir))
    config = load_config(run_dir / "config.yaml")
    placement = place_roles(config, reward_model=uses_reward_model(config), hosts=read_hosts(run_dir))
    bottleneck = BottleneckMonitor(config, placement, first_s=0.0)
    curves = Curves(run_dir / METRICS_FILE, wanted=REWARD.__eq__)
    curves.read(READ_S)
    view = LiveView(
        console,
        run=run_dir.name,
        steps=config.steps,
        max_staleness=config.replay.max_staleness,
        rewards=curves.line(REWARD)[1],
    )
    samples = ShownSamples(run_dir, config)
    try:
        with view:
            view.phase("waiting for the first step ...")
            while is_running(run_dir):
                try:
                    status = client.status()
                except PeerTimeoutError:
                    view.phase("the replay queue does not answer; it may be starting ...")
                    continue
                if status["step"]:
                    if sentence := bottleneck.update(status):
                        view.judge(sentence)
                    view.show_samples(samples.update())
                    view.update(status)
                time.sleep(EVERY_S)
    except KeyboardInterrupt:
        return
    finally:
        client.close()
    console.print(f"the run has ended; see {run_dir / 'report.html'}", highlight=False, soft_wrap=True)
