"""The sandbox: real programs that try to do harm, as root and as a normal user."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import psutil
import pytest

from asyncrl.errors import ConfigError, RunError
from asyncrl.rewards import confine, sandbox
from asyncrl.rewards.sandbox import Limits, Outcome, check_sandbox, run_program
from tests.helpers.kernel import why_not_confined

WHY_NOT = why_not_confined()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def run(source: str, *, time_s: float = 2.0, stdin: str = "", cases: list | None = None) -> Outcome:
    return run_program(source, limits=Limits(time_s=time_s), within_s=20.0, stdin=stdin, cases=cases)


def attempt(statement: str) -> str:
    """What the program says after it tried: "done", or the error."""
    source = f"try:\n    {statement}\n    print('done')\nexcept BaseException as error:\n    print(repr(error))"
    outcome = run(source)
    assert (outcome.ended, outcome.exit_code) == ("exited", 0)
    return outcome.output.decode().strip()


def test_a_good_program_reads_and_prints() -> None:
    outcome = run("import sys, collections\nprint(sum(map(int, sys.stdin)))\nprint('ü')", stdin="1\n2\n3")
    assert outcome == Outcome("exited", 0, "6\nü\n".encode(), {})


def test_a_good_program_may_use_its_folder_threads_and_deep_recursion() -> None:
    source = """
import os, sys, tempfile, threading
open("a.txt", "w").write("hello")
os.makedirs("d"); os.rename("a.txt", "b.txt"); print(open("b.txt").read(), os.listdir())
with tempfile.NamedTemporaryFile("w") as f: f.write("x")
sys.setrecursionlimit(10**5); threading.stack_size(64 << 20)
def down(n): return 0 if n == 0 else 1 + down(n - 1)
t = threading.Thread(target=lambda: print(down(50000))); t.start(); t.join()
"""
    outcome = run(source)
    assert outcome.output.decode().split("\n")[:2] == ["hello ['b.txt', 'd']", "50000"]


@pytest.mark.parametrize(
    "statement",
    [
        "import os; os.fork()",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import os; os.execv('/bin/true', ['true'])",
        "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
        "import socket; socket.socket()",
        "import socket; socket.socketpair()",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.kill(-1, 9)",
        "import fcntl, os; r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, os.getppid())",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "import resource; resource.prlimit(0, resource.RLIMIT_CPU, (100, 100))",
        "import os; os.setsid()",
        "import os; os.setuid(0)",
        "import os; os.nice(-5)",
        "import os; os.chmod('.', 0o777)",
        "import os; os.memfd_create('x')",
        "import os; os.symlink('/etc/passwd', 'p')",
        "import os; os.mkfifo('f')",
        "open('/tmp/asyncrl-escape', 'w')",
        "open('../asyncrl-escape', 'w')",
        "import os; os.mkdir('/tmp/asyncrl-escape')",
        "import os; os.rename('/etc/hostname', 'h')",
        "import os; os.unlink('/etc/hostname')",
        "import os; os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
        "import os; open(os.__file__, 'a')",
        "import os; os.truncate(os.__file__, 0)",
        "open('/etc/passwd').read()",
        "open('/proc/self/environ').read()",
        "import os; open(f'/proc/{os.getppid()}/environ').read()",
        "import os; os.listdir('/')",
        "import ctypes; c = ctypes.CDLL(None, use_errno=True); assert c.unshare(0x10000000) == 0, 'EPERM'",
        "import ctypes; c = ctypes.CDLL(None, use_errno=True); assert c.ptrace(16, 1, 0, 0) == 0, 'EPERM'",
        "import ctypes; c = ctypes.CDLL(None, use_errno=True); assert c.syscall(425, 8, 0) >= 0, 'EPERM'",
        "import ctypes; c = ctypes.CDLL(None, use_errno=True); assert c.prctl(1, 0, 0, 0, 0) == 0, 'EPERM'",
    ],
)
def test_what_could_do_harm_is_refused(statement: str) -> None:
    said = attempt(statement)
    assert "Error" in said or "EPERM" in said
    assert not Path("/tmp/asyncrl-escape").exists()


@pytest.mark.parametrize("user", ["own", "nobody"])
def test_the_kernel_confines_root_and_a_normal_user(user: str) -> None:
    """Here in a copy of this process, as a normal user may not reach this interpreter's files."""
    folder = tempfile.mkdtemp()
    os.chmod(folder, 0o777)
    outside = tempfile.mkdtemp()
    os.chmod(outside, 0o777)
    child = os.fork()
    if child == 0:
        bad = 100
        try:
            os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # they would count against the limit
            if user == "nobody" and os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            confine.confine(folder, cpu_s=5, memory_bytes=1 << 40, file_bytes=1 << 20, open_files=200)
            bad = sum(not fails(action) for action in (os.fork, os.getpgid, lambda: os.mkdir(f"{outside}/x")))
            os.mkdir(f"{folder}/x")
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(bad)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.listdir(folder) == ["x"] and os.listdir(outside) == []


def fails(action) -> bool:
    try:
        action()
    except (OSError, TypeError):
        return True
    return False


def test_secrets_of_the_environment_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    assert b"secret" not in run("import os; print(dict(os.environ))").output


def test_descriptors_of_the_worker_are_not_there(tmp_path: Path) -> None:
    with open(tmp_path / "secret", "w+") as file:
        os.set_inheritable(file.fileno(), True)
        source = "import os\nfor fd in range(3, 100):\n try: os.fstat(fd); print(fd)\n except OSError: pass"
        assert run(source).output == b""


def test_a_loop_ends_at_its_time_limit() -> None:
    started = time.monotonic()
    assert run("while True: pass", time_s=0.5).ended == "out of time"
    assert run("import time; time.sleep(100)", time_s=0.5).ended == "out of time"
    assert run("import signal\nsignal.signal(24, signal.SIG_IGN)\nwhile True: pass", time_s=0.5).ended == "out of time"
    assert time.monotonic() - started < 10.0


def test_the_whole_time_is_bounded_however_often_the_program_answers() -> None:
    started = time.monotonic()
    cases = [{"evaluate": "wait()"}] * 100
    source = "import time\ndef wait(): time.sleep(0.1)"
    outcome = run_program(source, limits=Limits(time_s=1.0), within_s=1.0, cases=cases)
    assert outcome.ended == "out of time" and 2 < len(outcome.values) < 12
    assert time.monotonic() - started < 2.0


def test_memory_is_bounded() -> None:
    limits = Limits(time_s=20.0, memory_bytes=128 << 20)
    for size, reached in ((64 << 20, b"done\n"), (10 << 30, b"")):
        outcome = run_program(f"x = bytearray({size})\nprint('done')", limits=limits, within_s=20.0)
        assert (outcome.ended, outcome.output) == ("exited", reached)
    piecewise = "x = []\nwhile True: x.append(bytearray(1 << 20)); print(len(x), flush=True)"
    outcome = run_program(piecewise, limits=limits, within_s=20.0)
    assert outcome.exit_code == 1 and 10 < int(outcome.output.split()[-1]) < 128


def test_a_fork_bomb_and_a_thread_bomb_leave_nobody() -> None:
    run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", time_s=0.5)
    sleeper = "threading.Thread(target=time.sleep, args=(99,)).start()"
    assert (
        run(f"import threading, time\nthreading.stack_size(32768)\nwhile True: {sleeper}").ended == "too many threads"
    )
    inside = [p for p in psutil.process_iter(["cmdline"]) if str(sandbox.INSIDE) in (p.info["cmdline"] or [])]
    assert [p for p in inside if p.ppid() == os.getpid()] == []


def test_output_and_folder_are_bounded_and_the_folder_is_removed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    limits = Limits(time_s=5.0, file_bytes=1 << 20)
    output = run_program("while True: print('x' * 1000)", limits=limits, within_s=5.0)
    assert output.exit_code != 0 and len(output.output) <= 1 << 20
    files = "i = 0\nwhile True:\n    i += 1\n    open(str(i), 'wb').write(b'x' * 100000)"
    assert run_program(files, limits=limits, within_s=5.0).ended == "folder too large"
    empty = "i = 0\nwhile True:\n    i += 1\n    open(str(i), 'wb')"
    assert run_program(empty, limits=limits, within_s=5.0).ended == "folder too large"
    assert list(tmp_path.iterdir()) == []


def test_a_program_ends_with_its_worker(tmp_path: Path) -> None:
    worker = "from asyncrl.rewards.sandbox import *\nrun_program('while 1: pass', limits=Limits(60.0), within_s=60.0)"
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", worker], cwd=Path(__file__).parents[2], env=env) as parent:
        programs = []
        deadline_s = time.monotonic() + 30
        while not programs and time.monotonic() < deadline_s:
            programs = [p for p in psutil.Process(parent.pid).children() if p.cpu_times().user > 0.3]
            time.sleep(0.05)
        parent.kill()
    assert len(programs) == 1
    _, alive = psutil.wait_procs(programs, timeout=10)
    assert alive == []


def test_values_of_cases_come_back_with_their_types() -> None:
    source = "import sys\nprint('noise')\ndef f(x): return x\ndef g(): sys.exit(0)\nclass A: pass"
    cases = [
        {"call": "f", "arguments": [[1, 2.5]]},
        {"evaluate": "(1, {'a': {2, 1}})"},
        {"execute": "assert f(1) == 2"},
        {"evaluate": "g()"},
        {"evaluate": "A()"},
        {"evaluate": "f(None)"},
    ]
    outcome = run(source, cases=cases)
    assert outcome.values == {
        0: {"list": [1, 2.5]},
        1: {"tuple": [1, {"dict": [["a", {"set": [1, 2]}]]}]},
        4: {"other": "A"},
        5: None,
    }


EVERY_FILE = "import os\nfor fd in range(3, 30):\n try:"
FORGED = '{"case": 0, "value": 42}\\n'


@pytest.mark.parametrize(
    "source",
    [
        f"{EVERY_FILE} os.write(fd, b'{FORGED}')\n except OSError: pass\nos._exit(0)",
        f"print('{FORGED}')\nraise SystemExit(0)",
        f"{EVERY_FILE} os.ftruncate(fd, 0)\n except OSError: pass\nos._exit(0)",
    ],
)
def test_a_program_that_writes_its_own_verdict_has_none(source: str) -> None:
    assert run(source, cases=[{"evaluate": "f()"}]).values == {}


def test_nothing_runs_where_the_kernel_does_not_confine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A copy of the harness beside a `confine` that finds no Landlock."""
    (tmp_path / "inside.py").write_text(sandbox.INSIDE.read_text())
    broken = confine.__file__
    text = (
        Path(broken)
        .read_text()
        .replace("LANDLOCK_RESTRICT_SELF = 444, 445, 446", "LANDLOCK_RESTRICT_SELF = 999, 445, 446")
    )
    (tmp_path / "confine.py").write_text(text)
    monkeypatch.setattr(sandbox, "INSIDE", tmp_path / "inside.py")
    mark = tmp_path / "mark"
    with pytest.raises(RunError, match=r"it lacks Landlock .Linux 5.13 or later.*Function not implemented"):
        run(f"open({str(mark)!r}, 'w')")
    assert not mark.exists()
    with pytest.raises(ConfigError, match="rewards: the code reward cannot be used here: the kernel does not confine"):
        check_sandbox()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_refuses_other_machines_and_processes_on_both_machines(machine: str) -> None:
    numbers = {
        "x86_64": {"socket": 41, "execve": 59, "kill": 62, "read": 0},
        "aarch64": {"socket": 198, "execve": 221, "kill": 129, "read": 63},
    }[machine]
    clone, arch = confine.CLONE[list(confine.AUDIT_ARCH).index(machine)], confine.AUDIT_ARCH[machine]
    denied = confine.DENY | 1
    answers = {name: decide(machine, number, arch) for name, number in numbers.items()}
    assert answers == {"socket": denied, "execve": denied, "kill": denied, "read": confine.ALLOW}
    assert decide(machine, numbers["read"], 0x40000003) == confine.KILL
    assert decide(machine, numbers["read"] | 0x40000000, arch) == confine.KILL
    assert decide(machine, clone, arch, [17]) == denied
    assert decide(machine, clone, arch, [confine.CLONE_THREAD | 0x100]) == confine.ALLOW
    assert decide(machine, 435, arch) == confine.DENY | 38


def decide(machine: str, number: int, arch: int, arguments: list[int] | None = None) -> int:
    """The filter's answer, by an interpreter of its instructions."""
    data = {0: number, 4: arch} | {16 + 8 * i: value for i, value in enumerate(arguments or [0] * 6)}
    program, place, word = confine.filter_program(machine), 0, 0
    while True:
        code, yes, no, operand = program[place]
        place += 1
        if code == confine.RETURN:
            return operand
        if code == confine.LOAD:
            word = data.get(operand, 0)
        else:
            holds = {
                confine.EQUAL: word == operand,
                confine.AT_LEAST: word >= operand,
                confine.ANY_BIT: bool(word & operand),
            }[code]
            place += yes if holds else no
