"""`asyncrl top`: the live view of a run that goes on, from another terminal."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from asyncrl.config import load_config
from asyncrl.errors import PeerTimeoutError
from asyncrl.launch.folder import goes_on, read_endpoints
from asyncrl.launch.judge import Judge
from asyncrl.launch.resources import plan_resources
from asyncrl.observe.live import LiveView
from asyncrl.replay.client import LauncherClient
from asyncrl.rewards.reward_model import uses_reward_model

EVERY_S = 0.5


def top(run_dir: Path, console: Console) -> None:
    """Shows the run until it ends, or Ctrl-C; asks and changes nothing. Raises ConfigError when it is not going on."""
    client = LauncherClient(read_endpoints(run_dir))
    config = load_config(run_dir / "config.yaml")
    judge = Judge(config, plan_resources(config, reward_model=uses_reward_model(config)), first_s=0.0)
    view = LiveView(console, run=run_dir.name, steps=config.steps, max_staleness=config.replay.staleness_limit)
    try:
        with view:
            view.phase("waiting for the first step ...")
            while goes_on(run_dir):
                try:
                    status = client.status()
                except PeerTimeoutError:
                    view.phase("the replay queue does not answer; it may be starting ...")
                    continue
                if status["step"]:
                    if sentence := judge.look(status):
                        view.judge(sentence)
                    view.update(status)
                time.sleep(EVERY_S)
    except KeyboardInterrupt:
        return
    finally:
        client.close()
    console.print(f"the run has ended; see {run_dir / 'report.html'}", highlight=False, soft_wrap=True)
