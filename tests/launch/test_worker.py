"""The spec of a role process, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from asyncrl import errors
from asyncrl.launch.launcher import LocalLauncher
from asyncrl.launch.placement import RoleResources
from asyncrl.launch.worker import EXIT_TERMINATED, FINAL_CODES, RoleSpec, exit_code
from asyncrl.observe.logs import last_error
from tests.helpers.replay import loopback_endpoints, small_config


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.PeerTimeoutError, 3),
        (errors.RunError, 1),
        (errors.JournalError, 1),
        (errors.InvariantError, 1),
        (errors.ConfigError, 2),
        (errors.DataError, 2),
    ],
)
def test_exit_code_says_whether_a_restart_may_help(error: type[errors.AsyncrlError], code: int) -> None:
    assert exit_code(error("it broke")) == code


def test_crash_ends_the_process_with_its_code_and_the_cause_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(small_config().to_yaml())
    cpus = tuple(os.sched_getaffinity(0))
    spec = RoleSpec("unheard_of", 0, str(tmp_path), loopback_endpoints(1, "run-1a2b3c4d"), cpus, 8, start=2)
    launcher = LocalLauncher()
    role = launcher.start(spec, RoleResources(cpus, threads=1))
    shown = psutil.Process(role.process.pid).cmdline()
    assert launcher.wait([role], 60.0) == [] and role.code == 4
    assert shown[1:] == ["-P", "-m", "asyncrl.launch.worker", "unheard_of-0", str(os.getpid())], (
        "every user can read these"
    )
    file = spec.logs / "unheard_of-0.jsonl"
    assert last_error(file) == "KeyError: 'unheard_of'"
    assert json.loads(file.read_text().splitlines()[0])["start"] == 2
    launcher.kill([role])


def test_role_without_a_spec_says_who_starts_roles() -> None:
    command = [sys.executable, "-c", "from asyncrl.launch import worker; worker.read_spec()"]
    ended = subprocess.run(command, timeout=60, input=b"[1]", capture_output=True, check=False)
    assert b"ConfigError: no role spec on standard input" in ended.stderr


def test_role_raises_its_limit_of_open_files(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(small_config().to_yaml())
    spec = RoleSpec("replay", 0, str(tmp_path), loopback_endpoints(1), (), 8)
    code = "import resource; from asyncrl.launch import worker\n"
    code += "worker.ROLES['replay'] = lambda *_: print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    code += f"worker.run_role(worker.RoleSpec.from_json({spec.to_json()!r}), 0)"
    command = ["prlimit", "--nofile=256:2000", sys.executable, "-c", code]
    ended = subprocess.run(command, timeout=60, capture_output=True, text=True, check=True)
    assert "(2000, 2000)" in ended.stdout


def test_spec_survives_the_pipe() -> None:
    endpoints = replace(loopback_endpoints(5), critics=("ipc:///x/critic-0",), critic_ranks="ipc:///x/ranks", keys="k")
    spec = RoleSpec("learner", 1, "runs/x", endpoints, (0, 1), 8, start=3, checkpoint="c", offline="runs/x/retrained/1")
    again = RoleSpec.from_json(spec.to_json())
    assert (again.endpoints, again.start, again.checkpoint) == (endpoints, 3, "c")
    assert again.logs == Path("runs/x/retrained/1/logs")
    assert replace(spec, offline="").logs == Path("runs/x/logs")


def test_last_error_can_be_looked_for_from_an_offset(tmp_path: Path) -> None:
    file = tmp_path / "role.jsonl"
    file.write_text('{"level": "error", "error": "first"}\n')
    first_bytes = file.stat().st_size
    assert last_error(file) == "first"
    assert last_error(file, start_bytes=first_bytes) == ""
    with file.open("a") as log:
        log.write('{"level": "error", "error": "second"}\n{"level": "info", "event": "ended"}\n')
    assert last_error(file, start_bytes=first_bytes) == "second"


WAITING = """
import sys, time
from asyncrl.launch import worker

def wait(config, spec, should_stop):
    print("here", flush=True)
    while not should_stop():
        time.sleep(0.01)

worker.ROLES["learner"] = wait
sys.exit(worker.main(sys.argv[1:]))
"""


def test_a_role_stopped_by_a_signal_has_not_succeeded(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(small_config().to_yaml())
    spec = RoleSpec("learner", 0, str(tmp_path), loopback_endpoints(1), tuple(os.sched_getaffinity(0)), 8)
    command = [sys.executable, "-c", WAITING, spec.name, str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(spec.to_json())
    process.stdin.close()
    assert process.stdout.readline() == "here\n"
    process.terminate()
    assert process.wait(30) == EXIT_TERMINATED
    assert last_error(spec.logs / "learner-0.jsonl") == "it was told to stop by signal SIGTERM"
    assert EXIT_TERMINATED not in FINAL_CODES


def test_output_that_cannot_be_cleaned_of_secrets_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "tell-nobody\nof-this")
    spec = RoleSpec("learner", 0, str(tmp_path), loopback_endpoints(1), (), 8)
    launcher = LocalLauncher()
    monkeypatch.setattr(launcher, "command", lambda _: ["printf", "%s", "\\xff a tell-nobody\nof-this"])
    resources = RoleResources((0,), threads=1)

    def ended() -> tuple[bytes, list[MutableMapping[str, Any]]]:
        role = launcher.start(spec, resources)
        assert launcher.wait([role], 20.0) == []
        with capture_logs() as events:
            launcher.kill([role])
        return role.output_file.read_bytes(), [event for event in events if event["log_level"] == "warning"]

    assert ended() == (b"\\xff a ***", [])
    monkeypatch.setattr("asyncrl.launch.launcher.REDACTED_BYTES", 20)
    output, warnings = ended()
    assert b"tell-nobody" in output
    assert [(event["file"], event["bytes"]) for event in warnings] == [(str(spec.logs / "learner-0.out"), len(output))]
    assert [file.name for file in spec.logs.iterdir()] == ["learner-0.out"]


def test_roles_have_separate_process_groups_in_the_launchers_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = LocalLauncher()
    monkeypatch.setattr(launcher, "command", lambda _: ["sleep", "60"])
    spec = RoleSpec("learner", 0, str(tmp_path), loopback_endpoints(1), (), 8)
    role = launcher.start(spec, RoleResources((0,), threads=1))
    try:
        assert os.getpgid(role.process.pid) == role.process.pid, "Ctrl-C in a terminal would reach it"
        assert os.getsid(role.process.pid) == os.getsid(0), "a new session may get no time on a busy core"
    finally:
        launcher.kill([role])
