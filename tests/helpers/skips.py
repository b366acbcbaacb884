"""Pytest's hooks that fail a skipped test where nothing may be skipped."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import TypeVar

import pytest

MAY_SKIP = os.environ.get("ASYNCRL_MAY_SKIP", "1") != "0"
"""Without it a skipped test is a failed one: what CI never ran, it must not report as passed."""
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _refuse_skip((yield))


def _refuse_skip(report: Report) -> Report:
    if report.skipped and not MAY_SKIP and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{reason}\nNothing may be skipped here (ASYNCRL_MAY_SKIP=0): run it where this works."
    return report
