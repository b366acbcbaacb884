"""A role's process: its spec, its exit codes, and the process that it is forked from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from structlog.testing import capture_logs

from asyncrl import errors
from asyncrl.launch.fork_server import ForkServer, ForkServerError
from asyncrl.launch.launcher import LocalLauncher, RoleProcess
from asyncrl.launch.placement import RoleResources
from asyncrl.launch.worker import EXIT_CRASHED, EXIT_TERMINATED, FINAL_CODES, RoleSpec, exit_code
from asyncrl.observe.logs import last_error
from tests.helpers.fork_servers import start_fork_server
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
    code = "import msgspec, resource; from asyncrl.launch import worker\n"
    code += "worker.ROLES['replay'] = lambda *_: print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    code += f"worker.run_role(msgspec.json.decode({msgspec.json.encode(spec)!r}, type=worker.RoleSpec), 0)"
    command = ["prlimit", "--nofile=256:2000", sys.executable, "-c", code]
    ended = subprocess.run(command, timeout=60, capture_output=True, text=True, check=True)
    assert "(2000, 2000)" in ended.stdout


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
    process.stdin.write(msgspec.json.encode(spec).decode())
    process.stdin.close()
    assert process.stdout.readline() == "here\n"
    process.terminate()
    assert process.wait(30) == EXIT_TERMINATED
    assert last_error(spec.logs / "learner-0.jsonl") == "stopped by SIGTERM"
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


CPUS = tuple(sorted(os.sched_getaffinity(0)))


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    """A fork server that has imported only torch, and whose children run Python code from their arguments."""
    fork_server = start_fork_server("tests.launch.fork_server_process")
    yield fork_server
    fork_server.close()


def wait_for(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def run(fork_server: ForkServer, code: str, output: Path, stdin: bytes = b"", **environment: str) -> int:
    with output.open("wb") as file:
        child = fork_server.fork(["-c", code], environment, file.fileno())
    with child.stdin:
        child.stdin.write(stdin)
    assert psutil.Process(child.pid).ppid() == os.getpid()
    return child.wait()


def test_a_forked_child_has_its_own_streams_environment_group_and_threads(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    code = (
        "import os, sys, torch; print(sys.stdin.read(), dict(os.environ), torch.get_num_threads(),"
        " os.getpgrp() == os.getpid(), len(os.listdir('/proc/self/fd')), flush=True);"
        " print(open('/proc/self/cmdline').read().strip(chr(0))[-11:], file=sys.stderr); sys.exit(7)"
    )
    assert run(fork_server, code, tmp_path / "out", b"spec", OMP_NUM_THREADS="3") == 7
    # The fourth descriptor is open for the listing itself.
    assert (tmp_path / "out").read_text() == "spec {'OMP_NUM_THREADS': '3'} 3 True 4\nsys.exit(7)\n"


def test_the_ways_that_a_child_ends(fork_server: ForkServer, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(fork_server, "pass", out) == 0
    assert run(fork_server, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", out) == -signal.SIGKILL
    assert run(fork_server, "raise KeyError('lost')", out) == 1
    assert "KeyError: 'lost'" in out.read_text()


def test_random_numbers_of_two_children_differ(fork_server: ForkServer, tmp_path: Path) -> None:
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    said = set[str]()
    for _ in range(2):
        assert run(fork_server, code, tmp_path / "out") == 0
        said |= set((tmp_path / "out").read_text().split())
    assert len(said) == 4


def test_a_child_does_nothing_before_it_has_its_input(tmp_path: Path) -> None:
    fork_server = start_fork_server("tests.launch.fork_server_process")
    with (tmp_path / "out").open("wb") as file:
        child = fork_server.fork(["-c", "import sys; print('input', sys.stdin.read())"], {}, file.fileno())
    os.kill(fork_server.pid, signal.SIGKILL)
    time.sleep(0.1)
    assert (tmp_path / "out").read_bytes() == b"", "the child does not need the fork server"
    child.stdin.close()
    assert child.wait() == 0
    assert (tmp_path / "out").read_text() == "input \n"
    fork_server.close()


THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"


@pytest.mark.parametrize(
    ("module", "code", "says"),
    [
        ("starts_a_thread", THREAD, "imports have started threads, which do not survive a fork: asyncrl forker"),
        ("broken", "import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("dies", "import os; os._exit(9)", "it ended with code 9"),
    ],
    ids=["threads", "import", "end"],
)
def test_a_fork_server_that_cannot_fork_says_why(
    module: str, code: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FORK_SERVER_IMPORTS", module)
    fork_server = start_fork_server("tests.launch.fork_server_process")
    try:
        with (tmp_path / "out").open("wb") as file, pytest.raises(ForkServerError, match=says):
            fork_server.fork(["-c", "pass"], {}, file.fileno())
    finally:
        fork_server.close()


def start_role(
    launcher: LocalLauncher, folder: Path, name: str = "unheard_of", gpus: tuple[str, ...] = ()
) -> RoleProcess:
    (folder / "config.yaml").write_text(small_config().to_yaml())
    spec = RoleSpec(name, 0, str(folder), loopback_endpoints(1), CPUS, 8)
    return launcher.start(spec, RoleResources(CPUS, 1, gpus))


def test_a_launcher_forks_roles_and_starts_those_with_gpus(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    launcher.fork_server = fork_server = start_fork_server("tests.launch.fork_server_process")
    try:
        forked, started = start_role(launcher, tmp_path), start_role(launcher, tmp_path, gpus=("0",))
        assert [type(role.process).__name__ for role in (forked, started)] == ["Forked", "Popen"]
        for role in (forked, started):
            assert launcher.wait([role], 60.0) == [] and role.code == EXIT_CRASHED
        assert last_error(forked.spec.logs / "unheard_of-0.jsonl") == "KeyError: 'unheard_of'"
        os.kill(fork_server.pid, signal.SIGKILL)
        again = start_role(launcher, tmp_path)
        assert type(again.process).__name__ == "Popen" and launcher.fork_server is None
        assert launcher.wait([again], 60.0) == [] and again.code == EXIT_CRASHED
    finally:
        launcher.kill(list(launcher.roles))
        fork_server.close()


LEAVES_ORPHANS = """
import os, signal, subprocess
for session in (False, True):
    subprocess.Popen(["sleep", "600"], start_new_session=session)
print("here", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_orphans_of_a_role_are_ended_with_its_group_and_leave_no_zombies(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    with (tmp_path / "out").open("wb") as file:
        child = fork_server.fork(["-c", LEAVES_ORPHANS], {"PATH": os.environ["PATH"]}, file.fileno())
    child.stdin.close()
    wait_for(lambda: (tmp_path / "out").read_text())
    grouped, apart = psutil.Process(child.pid).children()
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert apart.ppid() == os.getpid()
    apart.kill()
    wait_for(lambda: fork_server.reap() or not (grouped.is_running() or apart.is_running()))


DIES_WITH_IT = """
import os, sys, time
from pathlib import Path
from asyncrl.launch.fork_server import ForkServer
from asyncrl.util.processes import end_with_parent
fork_server = start_fork_server("tests.launch.fork_server_process")
code = f"from asyncrl.util import processes; processes.end_with_parent({os.getpid()}); import time; time.sleep(600)"
child = fork_server.fork(["-c", code], {}, 1)
child.stdin.close()
print(fork_server.pid, child.pid, flush=True)
time.sleep(600)
"""


def test_a_killed_launcher_ends_all_processes() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", DIES_WITH_IT], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    family = [psutil.Process(int(pid)) for pid in launcher.stdout.readline().split()]
    time.sleep(0.2)
    assert all(one.is_running() for one in family)
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family))
