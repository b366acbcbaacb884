"""Complete runs whose generator divides the model among worker processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.helpers.runs import Launched, check_ledger

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 60


def workers(run: Launched) -> list[list[int]]:
    """The process ids of the workers, for each start of the engine."""
    return [event["pids"] for event in run.events("generator-0") if event["event"].startswith("worker processes")]


def test_the_demo_learns_on_two_workers_that_load_buckets_and_of_which_one_is_killed(
    launch: Callable[..., Launched],
) -> None:
    names = set(os.listdir("/dev/shm"))
    buckets = "weights.staging=buckets"
    run = launch("--config", "demo", "--steps", str(STEPS), "generator.tensor_parallel=2", buckets)
    run.wait_for_step(8)
    (pids,) = workers(run)
    assert len(pids) == 2
    os.kill(pids[1], signal.SIGKILL)
    run.wait_until(lambda: len(workers(run)) == 2, what="another engine")
    assert not any(map(psutil.pid_exists, pids))
    code, output = run.end(timeout_s=400)
    assert code == 0, output
    assert run.left_over() == []
    assert f"process {pids[1]} was killed by signal SIGKILL" in output and "restart 1 in 0 s" in output
    summary = run.summary()
    assert (summary["status"], summary["steps"]) == ("finished", STEPS)
    assert summary["restarts"] == {"generator": 1, "replay": 0, "learner": 0, "reward_model": 0}
    check_ledger(summary)
    assert summary["reward_last"] > summary["reward_first"] + 0.2, "the model learns"
    left = {name for name in set(os.listdir("/dev/shm")) - names if name.startswith(("psm_", "vllm_dist_"))}
    assert not {name for name in left if is_unused(Path("/dev/shm", name))}


def is_unused(file: Path) -> bool:
    """True if no process has mapped the file: other tests may run at the same time."""
    return not any(str(file) in maps_of(pid) for pid in psutil.pids())


def maps_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""
