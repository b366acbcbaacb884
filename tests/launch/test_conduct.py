"""A run from start to end with fake processes instead of roles."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.errors import DataError
from asyncrl.launch.console import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, Interrupts
from asyncrl.launch.launcher import LocalLauncher
from asyncrl.launch.placement import place_roles
from asyncrl.launch.row_checks import PromptScan
from asyncrl.launch.run import Run
from asyncrl.launch.worker import RoleSpec
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


Conduct = Callable[..., tuple[int, Run, str]]


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
    ) -> tuple[int, Run, str]:
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
        run = Run(config, place_roles(config), spec, Console(file=out, width=200), caught, launcher, scan)
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


def test_a_bad_row_does_not_end_a_run_that_has_trained(conduct: Conduct) -> None:
    code, _, output = conduct({}, bad_row="rows.jsonl, row 900: empty", is_resumed=True)
    assert code == EXIT_DONE
    assert "warning: rows.jsonl, row 900: empty; the run ends when it is the turn of this row" in output


def test_role_that_dies_again_and_again_ends_the_run(conduct: Conduct) -> None:
    code, run, _ = conduct({"replay": [3] * 9}, last_s=600, launch__max_restarts=2)
    assert code == EXIT_FAILED
    assert run.summary["error"].startswith("replay ended with code 3: it broke; it was restarted 2 times within")


@pytest.mark.parametrize("name", ["generator-0", "learner-1"])
def test_role_that_never_works_for_one_cause_ends_the_run_at_once(conduct: Conduct, name: str) -> None:
    code, run, _ = conduct({name: [4] * 9}, last_s=600)
    assert code == EXIT_FAILED
    assert run.summary["error"] == (
        f"{name} ended with code 4: it broke; it has never worked and failed twice for this reason: another start "
        "would only repeat it"
    )
    assert run.summary["restarts"] == dict.fromkeys(("generator", "replay", "learner", "reward_model"), 0) | {
        name.partition("-")[0]: 1
    }


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
