"""Complete runs in which critic, reward model and a weight receiver fail, and learner and replay queue are stopped."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.helpers.runs import SMALL, Launched, check_ledger
from tests.system.test_roles import make_reward_model

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

Start = Callable[..., Launched]


def check_complete(
    run: Launched, steps: int, groups_per_step: int, *, status: str = "finished"
) -> list[dict[str, Any]]:
    """Checks that the metrics have every step once, and that every group was trained once, in one step and no older
    than the limit. Returns the trace's rows of the trained groups."""
    summary = run.summary()
    assert (summary["status"], summary["steps"]) == (status, steps)
    check_ledger(summary)
    assert [row["step"] for row in run.rows()] == list(range(1, steps + 1))
    trace = pq.read_table(run.run_dir / "trace.parquet").to_pylist()
    trained = [row for row in trace if row["outcome"] == "trained"]
    assert len({row["ticket"] for row in trained}) == len(trained) == steps * groups_per_step
    limit = summary["staleness"]["limit"]
    assert all(0 <= row["train_version"] - row["start_version"] <= limit for row in trained)
    return trained


def failed_groups(run: Launched) -> int:
    return sum(event["event"] == "group failed" for event in run.events("replay"))


@pytest.mark.slow
def test_killed_critic_and_reward_model(launch: Start, demo_folder: Path, tmp_path: Path) -> None:
    make_reward_model(tmp_path / "rm", demo_folder / "demo" / "model")
    steps, groups = 24, 32
    run = launch(
        "--config", "ppo_gae", "--steps", str(steps), *SMALL, "generator.group_size=1",
        f"replay.groups_per_step={groups}", "critic.ranks=1", "algorithm.kl_loss_coef=0.01",
        "rewards={exact: 1.0, reward_model: 0.1}", f"reward_options={{reward_model: {{path: {tmp_path / 'rm'}}}}}",
        "generator.reward_timeout_s=1", "checkpoint.every_steps=4", "launch.progress_timeout_s=60",
    )  # fmt: skip
    run.wait_for_step(3)
    # A killed reward model may restart before a request fails; a stopped one does not.
    before, reward_model = failed_groups(run), run.pid("reward_model")
    os.kill(reward_model, signal.SIGSTOP)
    run.wait_until(lambda: failed_groups(run) > before, what="a group without a reward")
    os.kill(reward_model, signal.SIGKILL)
    run.wait_until(lambda: len(run.starts("reward_model")) == 2, what="another start of the reward model")
    run.wait_for_step(len(run.rows()) + 2)
    others = {name: run.starts(name) for name in ("generator-0", "replay", "reward_model")}
    os.kill(run.pid("critic-0"), signal.SIGKILL)
    code, output = run.end(timeout_s=200)
    assert code == 0, output
    assert run.left_over() == []
    assert "reward_model was killed by signal SIGKILL; restart 1 in 0 s" in output
    assert "critic-0 was killed by signal SIGKILL; restart 1 in 0 s" in output
    check_complete(run, steps, groups)
    summary = run.summary()
    assert summary["restarts"] == {"generator": 0, "replay": 0, "learner": 1, "reward_model": 1}
    failed = summary["ledger"]["refunded"]["failed"]
    assert failed == failed_groups(run) > before, "failures of the reward model are counted"
    assert summary["rewards_failed"] >= failed
    assert [len(run.starts(name)) for name in ("learner-0", "critic-0")] == [2, 2], "trained ranks start together"
    assert {name: run.starts(name) for name in others} == others, "the others continue"


FAILING_RECEIVER = '''
"""Has the weight receiver of a generator raise once, in its thread, when it has weights."""
import importlib.abc, importlib.machinery, os, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "asyncrl.weights.receiver":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            run_round = module.WeightReceiver._run_round
            def fail_once(self, *arguments):
                try:
                    os.close(os.open({marker!r}, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    return run_round(self, *arguments)
                raise MemoryError("no room for the weights")
            module.WeightReceiver._run_round = fail_once
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
'''


@pytest.mark.slow
def test_failing_receiver_and_stopped_learner_and_queue(
    launch: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAILING_RECEIVER.replace("{marker!r}", repr(str(tmp_path / "failed"))))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = launch(
        "--generators", "2", "--learners", "2", "--steps", "5000", *SMALL, "checkpoint.every_steps=4",
        "launch.progress_timeout_s=16", "launch.heartbeat_timeout_s=8", "weights.timeout_s=8", plain=True,
    )  # fmt: skip
    names = ("generator-0", "generator-1")
    run.wait_until(lambda: sum(len(run.starts(name)) for name in names) == 3, what="another start of a generator")
    for generator in (0, 1):
        run.await_tokens(generator)
    run.wait_for_step(len(run.rows()) + 2)
    os.kill(run.pid("learner-1"), signal.SIGSTOP)
    run.wait_until(lambda: len(run.starts("learner-1")) == 2, what="another start of the learner", timeout_s=60)
    run.wait_for_step(len(run.rows()) + 2)
    os.kill(run.pid("replay"), signal.SIGSTOP)
    run.wait_until(lambda: len(run.starts("replay")) == 2, what="another start of the queue", timeout_s=60)
    run.wait_for_step(len(run.rows()) + 2)
    run.process.send_signal(signal.SIGINT)
    code, output = run.end(timeout_s=120)
    assert code == 130, output
    assert run.left_over() == []
    assert re.search(
        r"generator-[01] ended with code 4: MemoryError: no room for the weights; restart 1 in 0 s", output
    )
    assert "replay did not answer within launch.heartbeat_timeout_s = 8 s; restart 1 in 0 s" in output
    trained = check_complete(run, len(run.rows()), 8, status="stopped")
    assert {row["generator"] for row in trained} == {0, 1}, "both generators have given groups"
    restarts = run.summary()["restarts"]
    assert (restarts["generator"], restarts["replay"]) == (1, 1)
    assert restarts["learner"] in (1, 2), "on a busy machine the queue restarts too late for them"
    deadlines = (
        "no optimizer step ended within launch.progress_timeout_s = 16 s",
        "another learner rank stopped or did",
    )
    assert any(deadline in output for deadline in deadlines), "of the launcher, or of the other rank's collective"
