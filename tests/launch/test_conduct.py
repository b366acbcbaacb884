"""A run from start to end with fake processes instead of roles, and its console."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.errors import DataError
from asyncrl.launch.launcher import LocalLauncher
from asyncrl.launch.placement import place_roles
from asyncrl.launch.row_checks import PromptScan
from asyncrl.launch.run import LiveRun
from asyncrl.launch.worker import RoleSpec
from asyncrl.observe import console as console_module
from asyncrl.observe.console import (
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    Interrupts,
    ignore_broken_pipe,
    show_end,
)
from asyncrl.observe.live import LiveView
from tests.helpers.replay import loopback_endpoints, small_config
from tests.helpers.sockets import socket_address

pytestmark = pytest.mark.timeout(240)

REPLAY = str(Path(__file__).with_name("stand_in_replay.py"))
UNTIL = "import os, sys, time\nwhile time.time() < {until_s} and not os.path.exists({stopped!r}): time.sleep(0.02)\n"
CRASH = "import sys; print('it broke'); sys.exit({code})"

Codes = dict[str, list[int]]
"""Exit codes of the first starts of a role; later starts work normally."""


class StandIns(LocalLauncher):
    def __init__(self, folder: Path, codes: Codes, last_s: float) -> None:
        super().__init__()
        self.codes, self.until_s = codes, time.time() + last_s
        self.code = UNTIL.format(until_s=self.until_s, stopped=str(folder / "stopped"))

    def command(self, spec: RoleSpec) -> list[str]:
        crashes = self.codes.get(spec.name, [])
        if spec.start < len(crashes):
            return [sys.executable, "-c", CRASH.format(code=crashes[spec.start])]
        if spec.role == "replay":
            return [
                sys.executable,
                REPLAY,
                str(self.until_s),
                str(self.codes.get("end of replay", [0])[0]),
            ]
        return [sys.executable, "-c", self.code]


Conduct = Callable[..., tuple[int, LiveRun, str]]


@pytest.fixture
def conduct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Conduct:
    """Runs one generator and two learners. Returns the exit code, the run, and its output."""

    def start(
        codes: Codes,
        *,
        last_s: float = 1.5,
        interrupts: int = 0,
        bad_row: str = "",
        is_resumed: bool = False,
        **settings: object,
    ) -> tuple[int, LiveRun, str]:
        monkeypatch.chdir(tmp_path)
        folder = tmp_path / "runs" / "run"
        folder.mkdir(parents=True)
        config = small_config(**{"launch__learners": 2, "launch__stop_timeout_s": 5} | settings)
        spec = RoleSpec("", 0, str(folder), replace(loopback_endpoints(1), replay=socket_address(tmp_path.name)), (), 8)
        out = io.StringIO()
        caught = Interrupts()
        caught.count = interrupts
        launcher = StandIns(folder, codes, last_s)
        scan = PromptScan(config, limit_tokens=8, has_trained=is_resumed)
        scan.problem = DataError(bad_row) if bad_row else None
        run = LiveRun(config, place_roles(config), spec, Console(file=out, width=200), caught, launcher, scan)
        code = run.run()
        assert all(role.code is not None for role in run.processes.roles)
        return code, run, out.getvalue()

    return start


def test_run_finishes_though_every_role_dies_once(conduct: Conduct) -> None:
    code, run, output = conduct({"generator-0": [4], "replay": [4], "learner-1": [3]}, last_s=2.5)
    assert code == EXIT_DONE, run.summary
    assert run.summary["status"] == "finished"
    assert run.summary["steps"] == 3
    assert run.summary["restarts"] == {"generator": 1, "replay": 1, "learner": 1, "reward_model": 0}
    assert "generator-0 ended with code 4: it broke; restart 1 in 0 s" in output
    assert "learner-1 ended with code 3: it broke; restart 1 in 0 s" in output
    assert "step 3/3" in output


@pytest.mark.parametrize("code", [EXIT_FAILED, EXIT_CONFIG])
def test_final_error_ends_the_run(conduct: Conduct, code: int) -> None:
    got, run, _ = conduct({"learner-1": [code]}, last_s=600)
    assert got == code
    assert run.summary["status"] == "failed"
    assert run.summary["error"] == f"learner-1 ended with code {code}: it broke"


def test_a_bad_row_ends_a_run_before_its_first_step_and_is_named_later(conduct: Conduct) -> None:
    code, run, _ = conduct({}, last_s=600, bad_row="rows.jsonl, row 900: empty")
    assert code == EXIT_CONFIG and run.summary["error"] == "rows.jsonl, row 900: empty"


def test_interrupt_is_reported_once_the_queue_is_back(conduct: Conduct) -> None:
    code, run, output = conduct({"replay": [4]}, last_s=600, interrupts=1, launch__stop_timeout_s=20)
    assert code == EXIT_INTERRUPTED, run.summary
    assert run.summary["status"] == "stopped"
    assert "stopping after this step" in output


def test_stalled_training_fails_after_one_restart_of_the_learners(conduct: Conduct) -> None:
    code, run, output = conduct({}, last_s=600, launch__progress_timeout_s=1.0)
    assert code == EXIT_FAILED
    assert output.count("no optimizer step ended within launch.progress_timeout_s = 1 s: step 0") == 1
    assert run.summary["error"].startswith("no optimizer step ended within launch.progress_timeout_s = 1 s: step 0")
    assert run.summary["restarts"]["learner"] == 1


def test_an_incomplete_trace_is_a_failure(conduct: Conduct) -> None:
    code, run, _ = conduct({"end of replay": [5]})
    assert code == EXIT_FAILED
    assert run.summary["status"] == "failed" and run.summary["steps"] == 3
    error = run.summary["error"]
    assert error.startswith(
        "training is done and the model is saved, but the replay queue did not complete trace.parquet"
    )
    assert "no space is left on the disk" in error and "`asyncrl launch --resume` completes it" in error


def test_no_secret_of_a_role_reaches_a_file_or_the_console(conduct: Conduct, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "abc-123-abc-123")
    said = "import os; print('refused', os.environ['SOME_API_KEY'], flush=True); "
    monkeypatch.setattr(sys.modules[__name__], "CRASH", said + "import sys; sys.exit({code})")
    monkeypatch.setattr(sys.modules[__name__], "UNTIL", said + "\n" + UNTIL)
    code, run, output = conduct({"generator-0": [4], "learner-1": [1]}, last_s=600)
    assert code == EXIT_FAILED
    assert run.summary["error"] == "learner-1 ended with code 1: refused ***"
    assert "abc-123" not in output
    logs = {file.name: file.read_text() for file in Path("runs/run/logs").glob("*.out")}
    assert {"generator-0.out", "learner-0.out", "learner-1.out"} <= logs.keys()
    assert [name for name, text in logs.items() if "abc-123" in text] == []
    assert logs["learner-0.out"] == "refused ***\n", "it was killed"


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
