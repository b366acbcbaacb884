"""A run of two learner ranks is killed and resumed with other numbers of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from asyncrl.launch.fork_server import ForkServer
from tests.helpers.preloaded import Command
from tests.helpers.runs import SMALL, Launched, start_launch
from tests.system.test_recovery_runs import check_complete, kill_launcher

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

Start = Callable[..., Launched]
Losses = dict[int, float]


@dataclass
class Killed:
    """The files of the launch that was killed."""

    run_dir: Path
    steps: int
    checkpoint: int
    losses: Losses


def losses(run: Launched, *, launch: int) -> Losses:
    """The loss of each step that learner rank 0 trained in a launch of the run."""
    events = run.events("learner-0")
    starts = [index for index, event in enumerate(events) if event["event"] == "started"]
    own = events[starts[launch] : [*starts, len(events)][launch + 1]]
    return {event["step"]: event["loss"] for event in own if event["event"] == "step done"}


@pytest.fixture(scope="module")
def killed(demo_folder: Path, preloaded: ForkServer) -> Killed:
    settings = ["--learners", "2", "--steps", "100000", *SMALL, "checkpoint.every_steps=4", "journal.retention=all"]
    run = start_launch(demo_folder, "two-ranks", *settings, preloaded=preloaded)
    try:
        run.wait_for_step(7)
        kill_launcher(run)
    finally:
        run.kill()
    checkpoint = max(int(path.name.removeprefix("step-")) for path in run.run_dir.glob("checkpoints/step-[0-9]*[0-9]"))
    return Killed(run.run_dir, len(run.rows()), checkpoint, losses(run, launch=0))


@pytest.mark.parametrize("ranks", [4, 2])
def test_each_ticket_is_trained_once_and_the_loss_is_the_same(
    launch: Start, killed: Killed, preloaded: ForkServer, demo_folder: Path, ranks: int
) -> None:
    name, steps = f"resumed-by-{ranks}", killed.steps + 3
    shutil.copytree(killed.run_dir, demo_folder / "runs" / name)
    run = launch("--resume", "--learners", str(ranks), "--steps", str(steps), run=name)
    code, output = run.end(timeout_s=300)
    assert code == 0, output
    check_complete(run, run.summary(), steps)
    again = losses(run, launch=1)
    assert min(again) == killed.checkpoint + 1
    repeated = {step: loss for step, loss in again.items() if step in killed.losses}
    assert len(repeated) >= 2
    # The first step begins with the same weights; after it they differ in their last bits.
    assert repeated[min(again)] == pytest.approx(killed.losses[min(again)], abs=1e-5)
    if ranks == 2:
        assert repeated == {step: killed.losses[step] for step in repeated}
    retrain = Command(preloaded, demo_folder, ["retrain", str(run.run_dir), "--out", f"again-by-{ranks}"])
    output, _ = retrain.communicate(timeout=200)
    assert retrain.returncode == 0, output
    told = "yes" if ranks == 2 else f"2 learner ranks have trained steps of the run, where {ranks} trained them here"
    assert told in output


def test_a_number_that_does_not_divide_the_groups_is_refused(launch: Start, killed: Killed, demo_folder: Path) -> None:
    shutil.copytree(killed.run_dir, demo_folder / "runs" / "resumed-by-3")
    code, output = launch("--resume", "--learners", "3", run="resumed-by-3").end(timeout_s=60)
    assert code == 2
    assert "launch.learners = 3 does not divide replay.groups_per_step = 8" in output
    assert "use 1, 2, 4, 8 learners" in output
