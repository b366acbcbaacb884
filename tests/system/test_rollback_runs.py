"""Complete runs of the demo that collapse, and go back with a smaller learning rate."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from asyncrl.config.load import load_config
from asyncrl.launch.rollback import MAX_ROLLBACKS
from asyncrl.observe.collapse import read_rollbacks
from asyncrl.observe.curves import read_metrics
from tests.helpers.runs import SMALL, Launched, check_ledger

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]
LR = 6e-3
COLLAPSES = [
    "--steps", "30", *SMALL, "replay.groups_per_step=16", f"learner.lr={LR}", "learner.warmup_steps=16",
    "learner.on_collapse=rollback", "checkpoint.every_steps=1", "replay.min_staleness=1", "replay.max_staleness=2",
    "replay.zero_variance=train",
]  # fmt: skip
"""The rate increases until the policy has left the one that sampled its tokens. The reward of this many completions
falls by more than its noise."""


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_run_that_collapses_is_rolled_back(launch: Callable[..., Launched], *, is_killed: bool) -> None:
    """It ends finished after a rollback or two, or failed after two; also if its launcher is killed in the first."""
    name = f"collapses-{is_killed}"
    last = launch(*COLLAPSES, run=name)
    if is_killed:
        last.wait_until(lambda: bool(read_rollbacks(last.run_dir)), what="the first rollback")
        last.note_tree()
        last.process.kill()
        last.process.wait()
        assert last.left_over(within_s=5) == []
        last = launch("--resume", run=name)
    code, output = last.end(timeout_s=400)
    summary = last.summary()
    records = summary["rollbacks"]
    assert 1 <= len(records) <= MAX_ROLLBACKS, output
    if summary["status"] == "finished":
        assert code == 0, output
    else:
        assert code == 1 and len(records) == MAX_ROLLBACKS and summary["collapse"]["stopped"], output
        assert "After 2 rollbacks " in summary["error"] and summary["error"] in output
    rates = [LR / 2**number for number in range(len(records) + 1)]
    assert [(one["lr_before"], one["lr_after"]) for one in records] == list(pairwise(rates))
    assert load_config(last.run_dir / "config.yaml").learner.lr == rates[-1]
    assert records == read_rollbacks(last.run_dir)
    check_ledger(summary)
    assert [row["step"] for row in last.rows()] == list(range(1, summary["steps"] + 1))
    for one in records:
        taken_back = [row["step"] for row in read_metrics(last.run_dir / one["aside"] / "metrics.jsonl")]
        assert taken_back == list(range(one["to_step"] + 1, one["stopped_at_step"] + 1))
        assert one["trained_tokens"] > 0 and one["to_step"] < one["collapsed_at_step"]
    assert (last.run_dir / "report.html").is_file()
