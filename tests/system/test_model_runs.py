"""Whole runs of other models and number formats than the demo's."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import pytest

from tests.helpers.runs import SMALL, Launched, check_ledger

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]

Start = Callable[..., Launched]


@pytest.mark.bfloat16
def test_the_demo_trains_in_bfloat16(launch: Start) -> None:
    run = launch("--steps", "20", *SMALL, "model.dtype=bfloat16")
    code, output = run.end(timeout_s=200)
    assert code == 0, output
    rows = run.rows()
    assert len(rows) == 20
    assert fmean(row["correction/mismatch_kl"] for row in rows) < 0.05
    assert fmean(row["reward/mean"] for row in rows) > 0.15, "what the model could do before"
    check_ledger(run.summary())
