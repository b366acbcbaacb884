"""Runs of the demo whose weights travel through a folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.runs import SMALL, Launched, check_ledger

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

Start = Callable[..., Launched]


def versions(store: Path) -> list[str]:
    return sorted(path.name for path in store.iterdir() if path.is_dir())


def check_run(run: Launched, steps: int) -> None:
    summary = run.summary()
    assert (summary["status"], summary["steps"]) == ("finished", steps)
    check_ledger(summary)
    assert [row["step"] for row in run.rows()] == list(range(1, steps + 1))


@pytest.mark.slow
def test_weights_through_a_folder_with_a_generator_and_a_learner_killed(launch: Start, tmp_path: Path) -> None:
    run = launch(
        "--generators", "2", "--steps", "100000", *SMALL, "weights.transport=files", f"weights.url={tmp_path}",
        "checkpoint.every_steps=4",
    )  # fmt: skip
    run.wait_for_step(2)
    for role in ("generator-0", "learner-0"):
        starts = len(run.starts(role))
        os.kill(run.pid(role), signal.SIGKILL)
        run.wait_until(lambda role=role, starts=starts: len(run.starts(role)) > starts, what=f"a start of {role}")
        run.wait_for_step(len(run.rows()) + 3)
        run.await_tokens(0)
    run.process.send_signal(signal.SIGINT)
    code, output = run.end(timeout_s=60)
    assert code == 130, output
    steps = run.summary()["steps"] + 2
    again = launch("--resume", "--steps", str(steps), run=run.run)
    code, output = again.end(timeout_s=200)
    assert code == 0, output
    check_run(again, steps)
    left = versions(tmp_path / run.run)
    # The launch that resumes publishes two versions, and those of steps that it trains again.
    assert left[-1].startswith(f"v{steps - 1:06d}-") and 2 <= len(left) <= 4, "float32 weights are always full"


@pytest.mark.slow
@pytest.mark.bfloat16
def test_deltas_of_bfloat16_weights(launch: Start, capsys: pytest.CaptureFixture[str]) -> None:
    steps = 6
    run = launch("--steps", str(steps), *SMALL, "weights.transport=files", "model.dtype=bfloat16", "learner.lr=1e-6")
    code, output = run.end(timeout_s=200)
    assert code == 0, output
    check_run(run, steps)
    store = run.run_dir / "weights"
    full = sum(path.stat().st_size for path in store.rglob("full-*.bin"))
    last = steps - 1  # nobody generates with the version after the last step
    deltas = [next(store.glob(f"v{version:06d}-*/delta-0.bin")) for version in range(1, last + 1)]
    shares = [path.stat().st_size / full for path in deltas]
    with capsys.disabled():
        print(
            f"\nbytes of the demo's deltas in bfloat16: {' '.join(f'{share:.4f}' for share in shares)} of the full ones"
        )
    assert full > 1_000_000 and 0 < max(shares) <= 0.03
