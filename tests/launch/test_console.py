"""Consoles whose terminal or pipe is closed."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from asyncrl.observe import console as console_module
from asyncrl.observe.console import Interrupts, ignore_broken_pipe, show_end
from asyncrl.observe.live import LiveView

pytestmark = pytest.mark.timeout(240)


def test_a_terminal_that_was_closed_does_not_end_the_run() -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as file:
        console = ignore_broken_pipe(Console(file=file, force_terminal=True, width=100))
        console.print("before")
        assert b"before" in os.read(master, 1000)
        os.close(master)
        console.print("after")
        with LiveView(console, run="run", steps=3, max_staleness=1) as view:
            view.phase("starting ...")
        console.print("at the end")


def test_a_pipe_that_nobody_reads_does_not_change_the_exit_code() -> None:
    code = (
        "import sys\nfrom rich.console import Console\nfrom asyncrl.observe.console import ignore_broken_pipe\n"
        "console = ignore_broken_pipe(Console())\nsys.stdin.readline()\n"
        "for _ in range(100): console.print('x' * 1000)\nsys.exit(7)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdout.close()
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.wait(30) == 7


def test_a_burst_of_sigterm_is_one_interrupt_and_every_sigint_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = Interrupts()
    with interrupts.caught():
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert interrupts.count == 1
        monkeypatch.setattr(console_module, "TERM_S", 0.0)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert interrupts.count == 4


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    """As SIGHUP is under nohup, and SIGINT in the background of a script."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        interrupts = Interrupts()
        with interrupts.caught():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
        assert interrupts.count == 1
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


SUMMARY = {
    "status": "finished", "attempts": 1, "wall_s": 5.0, "reward_first": 0.1, "reward_last": 0.2, "steps": 3,
    "tokens_per_s": 9.0, "tokens_trained": 45, "staleness": {"mean": 0.0, "max": 0, "limit": 2},
    "weight_sync": {"count": 3, "stall_ms_mean": 1.0, "stall_ms_max": 2.0}, "bottleneck": "", "restarts": {},
    "ledger": {"leased": 3, "trained": 3, "refunded": {}, "in_flight": 0}, "bias": [], "skipped_rows": 0,
    "filtered_rows": 0,
}  # fmt: skip


def test_the_end_of_a_run_names_completions_without_a_reward() -> None:
    for failed, line in ((0, ""), (1372, "failed     1,372 completions have no reward")):
        text = io.StringIO()
        show_end(Console(file=text, width=200), SUMMARY | {"rewards_failed": failed})
        assert line in text.getvalue() and ("no reward" in text.getvalue()) == bool(failed)


@pytest.mark.parametrize(("is_active", "bottleneck"), [(True, "collapsed at step 12 [x]"), (False, "learner-bound")])
def test_the_end_of_a_run_tells_of_a_collapse_before_the_bottleneck(is_active: bool, bottleneck: str) -> None:
    text, sentence = io.StringIO(), "collapsed at step 12 [x]"
    collapse = {"active": is_active, "stopped": False, "sentence": sentence}
    show_end(Console(file=text, width=200), SUMMARY | {"collapse": collapse, "bottleneck": bottleneck})
    assert ("bottleneck " in text.getvalue()) != is_active, "not twice"
    assert f"\ncollapse   {sentence}\n" in text.getvalue().partition("bottleneck")[0]
