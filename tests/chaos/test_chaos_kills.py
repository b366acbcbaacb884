"""SIGKILL at random moments, of single processes and of all at once."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from tests.chaos.runs import Chaos, check_complete

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(3000)]

Make = Callable[..., Chaos]
KINDS = ("generator", "learner", "replay")
NOISE = 0.08
"""Difference of the final reward between two runs with different random numbers."""


def test_processes_killed_at_random(chaos: Make, figure: Callable[[str], None], full: bool) -> None:
    kills, steps = (50, 300) if full else (4, 28)
    dice = random.Random(7)
    run = chaos("launch.generators=2", "launch.learners=2", f"steps={steps}")
    run.start()
    killed: dict[str, int] = {}
    started_s = time.monotonic()
    for number in range(kills):
        at = 2 + number * (steps - 10) // kills
        assert run.wait_for_step(at), "the run ended before all kills"
        time.sleep(dice.uniform(0.0, 2.0 if full else 0.3))
        roles = sorted((name, pid) for name, pid in run.roles().items() if name.startswith(KINDS[number % 3]))
        if not roles:  # the run is already down
            continue
        name, pid = dice.choice(roles)
        os.kill(pid, signal.SIGKILL)
        killed[name] = killed.get(name, 0) + 1
    summary = run.finish(timeout_s=300)
    elapsed_s = time.monotonic() - started_s
    check_complete(run, summary, steps)
    # A role that dies during the last step is not restarted.
    assert sum(summary["restarts"].values()) >= sum(killed.values()) - 1 >= kills * 0.7, summary["restarts"]
    if not full:
        return
    undisturbed = chaos("launch.generators=2", "launch.learners=2", f"steps={steps}", name="undisturbed")
    undisturbed.start()
    plain = undisturbed.finish(timeout_s=900)
    figure(f"{kills} kills {dict(sorted(killed.items()))}, restarts {summary['restarts']}, {elapsed_s:.0f} s")
    figure(
        f"reward {summary['reward_first']:.3f} -> {summary['reward_last']:.3f}, "
        f"undisturbed {plain['reward_first']:.3f} -> {plain['reward_last']:.3f}"
    )
    assert summary["reward_last"] > plain["reward_last"] - NOISE


def test_everything_killed_and_resumed(chaos: Make, figure: Callable[[str], None], full: bool) -> None:
    kills, steps = (20, 300) if full else (2, 40)
    dice = random.Random(11)
    run = chaos("launch.generators=2", f"steps={steps}")
    charged: list[int] = []
    for number in range(kills):
        run.start()
        before = run.step
        # Some kills hit the start of a launch, some its middle.
        if dice.random() < 0.2:
            time.sleep(dice.uniform(0.5, 4.0))
        else:
            run.wait_for_step(before + max(1, (steps - before) // (kills - number + 1)))
            time.sleep(dice.uniform(0.0, 0.3))
        assert run.launched is not None and run.launched.process.poll() is None, f"it ended before kill {number + 1}"
        run.kill_all()
        charged.append(run.step)
    assert len(charged) == kills and charged[-1] < steps, charged
    run.start()
    summary = run.finish(timeout_s=600)
    check_complete(run, summary, steps)
    figure(
        f"{len(charged)} kills of everything, at steps {charged}; reward {summary['reward_first']:.3f} -> "
        f"{summary['reward_last']:.3f}; duplicates {summary['duplicates']}"
    )
    if full:
        assert summary["reward_last"] > 0.8
