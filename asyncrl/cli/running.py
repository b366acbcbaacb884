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
        change_generators(run_dir, client, generators, console)
    finally:
        client.close()


def change_generators(run_dir: Path, client: LauncherClient, wanted: int, console: Console) -> None:
    """As `scale`, with the client of the run."""
    status, timeout_s = client.status(), load_config(run_dir / "config.yaml").launch.start_timeout_s
    before, version = status["generators_wanted"], status["step"]
    title = f"generators {before} -> {wanted}"
    joiners = set(range(before, wanted))
    leavers = set(range(wanted, before)) & _indices(status)
    start_s = time.monotonic()
    client.scale(wanted)
    if not joiners and not leavers:
        console.print(f"{title}: nothing to do", highlight=False, soft_wrap=True)
    while joiners or leavers:
        time.sleep(POLL_S)
        waited_s = time.monotonic() - start_s
        names = ", ".join(f"generator-{index}" for index in sorted(joiners | leavers))
        if not is_running(run_dir):
            raise RunError(f"{title}: the run ended meanwhile, without {names}")
        if waited_s > timeout_s:
            raise RunError(
                f"{title}: not {'up' if joiners else 'gone'} within launch.start_timeout_s = {timeout_s:g} s: {names}; "
                f"the run keeps trying, see {run_dir / 'logs'}"
            )
        try:
            status = client.status()
        except PeerTimeoutError:
            continue  # the replay queue may be restarting
        if status["generators_wanted"] != wanted:
            raise RunError(
                f"{title}: the run now wants {status['generators_wanted']}: another `asyncrl scale`, or too few "
                f"GPUs (see the run's output and {run_dir / 'logs' / 'launcher.jsonl'})"
            )
        # Heard since the request, and with weights at least as new as then: not an earlier generator of this number.
        up = {
            int(index)
            for index, generator in status["generators"].items()
            if generator["heard_ago_s"] < time.monotonic() - start_s and generator["version"] >= version
        }
        gone = leavers - _indices(status)
        for index in sorted(joiners & up):
            console.print(f"{title}: generator-{index} is up after {waited_s:.0f} s", highlight=False, soft_wrap=True)
        for index in sorted(gone):
            console.print(
                f"{title}: generator-{index} has left after {waited_s:.0f} s", highlight=False, soft_wrap=True
            )
        joiners -= up
        leavers -= gone


def _indices(status: dict[str, Any]) -> set[int]:
    return {int(index) for index in status["generators"]}


EVERY_S = 0.5
REWARD = "reward/mean"


def top(run_dir: Path, console: Console) -> None:
    """Shows the run until it ends or Ctrl-C; changes nothing. Raises ConfigError when it is not running."""
    client = LauncherClient(read_endpoints(run_dir))
    config = load_config(run_dir / "config.yaml")
    placement = place_roles(config, reward_model=uses_reward_model(config), hosts=read_hosts(run_dir))
    bottleneck = BottleneckMonitor(config, placement, first_s=0.0)
    curves = Curves(run_dir / METRICS_FILE, wanted=REWARD.__eq__)
    curves.read()
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
