"""Stall detection: when training that makes no progress is restarted, and when the run fails."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import RunError
from asyncrl.launch.supervisor import Progress
from tests.helpers.replay import small_config


def status(
    step: int, *, taken: bool, again: int | None = None, tokens: int = 0, finished: int = 1, refunded: int = 0
) -> dict[str, Any]:
    return {
        "refunded": {"environment": refunded},
        "generators": {"0": {"tokens": tokens}, "1": {"tokens": 7}},
        "step": step,
        "taken": taken,
        "leased": 3,
        "finished": finished,
        "eval": {"prompts_done": 0, "running": [{"version": 0, "done": 1, "prompts": 9}]},
        "catching_up": None if again is None else {"step": again, "of": step},
    }


def check(progress: Progress, told: dict[str, Any], now_s: float, started_s: float = 0.0) -> str:
    return progress.check(told, learners_started_s=started_s, missing=[], now_s=now_s)


def test_learners_that_hold_a_batch_are_blamed_once_for_a_step() -> None:
    progress = Progress(small_config(launch__progress_timeout_s=60), 0.0)
    assert check(progress, status(4, taken=True), 50.0) == ""
    assert check(progress, status(4, taken=True), 100.0) == ""
    reason = check(progress, status(4, taken=True), 111.0)
    assert reason.startswith("no optimizer step ended within launch.progress_timeout_s = 60 s: step 4, 3 groups leased")
    assert check(progress, status(4, taken=True), 150.0, started_s=112.0) == ""
    assert check(progress, status(4, taken=True, again=3), 170.0, started_s=112.0) == "", "repeated steps are progress"
    with pytest.raises(RunError, match="no optimizer step ended"):
        check(progress, status(4, taken=True, again=3), 231.0, started_s=112.0)


def test_without_a_batch_the_run_fails_and_says_what_is_awaited() -> None:
    progress = Progress(small_config(launch__progress_timeout_s=60, launch__start_timeout_s=90), 0.0)
    assert progress.check(status(0, taken=False), learners_started_s=0.0, missing=["generator-0"], now_s=1.0) == ""
    assert progress.check(status(0, taken=False), learners_started_s=0.0, missing=["generator-0"], now_s=90.0) == ""
    with pytest.raises(RunError, match="evaluation of version 0 at 1 of 9 prompts; not up: generator-0"):
        progress.check(status(0, taken=False), learners_started_s=0.0, missing=["generator-0"], now_s=92.0)


def test_the_time_restarts_once_all_are_up() -> None:
    progress = Progress(small_config(launch__progress_timeout_s=60, launch__start_timeout_s=120), 0.0)
    told = status(0, taken=False)
    assert progress.check(told, learners_started_s=0.0, missing=["generator-0"], now_s=110.0) == ""
    assert check(progress, told, 111.0) == ""
    assert check(progress, told, 169.0) == ""
    with pytest.raises(RunError, match="no optimizer step ended"):
        check(progress, told, 171.0)


def test_generated_tokens_count_while_no_batch_is_with_the_learners() -> None:
    progress = Progress(small_config(launch__progress_timeout_s=60), 0.0)
    for now_s in range(0, 1000, 50):
        assert check(progress, status(4, taken=False, tokens=now_s), now_s) == "", "a step may take long to generate"
    assert check(progress, status(4, taken=True, tokens=951), 1005.0) == ""
    assert check(progress, status(4, taken=True, tokens=2000), 1060.0) == ""
    assert check(progress, status(4, taken=True, tokens=3000), 1066.0).startswith("no optimizer step ended within")
    idle = Progress(small_config(launch__progress_timeout_s=60), 0.0)
    assert check(idle, status(4, taken=False, tokens=5), 50.0) == ""
    with pytest.raises(RunError, match=r"no optimizer step ended, and no token was generated, within launch.progress"):
        check(idle, status(4, taken=False, tokens=5), 111.0)


def test_learners_that_leave_a_batch_lying_are_blamed() -> None:
    progress = Progress(small_config(launch__progress_timeout_s=60), 0.0)
    assert check(progress, status(4, taken=False, tokens=1, finished=2), 1.0) == ""
    reason = check(progress, status(4, taken=False, tokens=900, finished=2), 62.0)
    assert reason.startswith("no optimizer step ended within")
    with pytest.raises(RunError, match="no optimizer step ended within"):
        check(progress, status(4, taken=False, tokens=900, finished=2), 124.0, started_s=63.0)


def test_refunded_groups_are_progress_while_there_is_no_batch() -> None:
    """The replay queue ends a run whose groups all fail."""
    progress = Progress(small_config(launch__progress_timeout_s=60), 0.0)
    for refunded in range(9):
        assert check(progress, status(4, taken=False, refunded=refunded), 50.0 * refunded) == ""
    with pytest.raises(RunError, match="no optimizer step ended"):
        check(progress, status(4, taken=False, refunded=8), 8 * 50.0 + 61)
