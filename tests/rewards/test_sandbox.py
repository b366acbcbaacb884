"""The sandbox: real programs that try to do harm, as root and as a normal user."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import psutil
import pytest
import structlog

from asyncrl.errors import ConfigError, RunError
from asyncrl.sandbox import confine
from asyncrl.sandbox import run_program as sandbox
from asyncrl.sandbox.run_program import ProgramLimits, ProgramOutcome, Sandbox, check_sandbox, run_program
from tests.helpers.kernel import why_not_confined

WHY_NOT = why_not_confined()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def run(source: str, *, time_s: float = 2.0, stdin: str = "", cases: list | None = None) -> ProgramOutcome:
    return run_program(source, limits=ProgramLimits(time_s=time_s), within_s=20.0, stdin=stdin, cases=cases)


TRY = """
try:
    {statement}
    print("done")
except OSError as error:
    print(error.errno)
"""


def attempt(statement: str) -> str:
    """Returns the output of a sandboxed program that tries the statement: "done", or the number of the error."""
    outcome = run(TRY.format(statement=statement))
    assert (outcome.ended, outcome.exit_code) == ("exited", 0)
    return outcome.output.decode().strip()


def attempt_outside(statement: str, folder: Path) -> str:
    """The same in a process that nothing confines."""
    command = [sys.executable, "-S", "-c", TRY.format(statement=statement)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30)
    return done.stdout.strip() or done.stderr


def test_a_good_program_reads_and_prints() -> None:
    outcome = run("import sys, collections\nprint(sum(map(int, sys.stdin)))\nprint('ü')", stdin="1\n2\n3")
    assert outcome == ProgramOutcome("exited", 0, "6\nü\n".encode(), {}, 0)


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


LIBC = "import ctypes, os; c = ctypes.CDLL(None, use_errno=True)"
CALL = "r = c.{call}; e = ctypes.get_errno(); os.strerror(e) if r >= 0 else exec('raise OSError(e, str())')"
REFUSED = (str(errno.EPERM), str(errno.EACCES))
HARM = {
    "fork": "import os; p = os.fork() or os._exit(0); os.waitpid(p, 0)",
    "posix_spawn": "import os; os.waitpid(os.posix_spawn('/bin/true', ['true'], {{}}), 0)",
    "subprocess": "import subprocess; subprocess.run(['/bin/true'])",
    "exec": "import os; os.execv('/bin/echo', ['echo', 'done'])",
    "multiprocessing": "import multiprocessing as m; p = m.get_context('fork').Process(); p.start(); p.join()",
    "socket": "import socket; socket.socket()",
    "socketpair": "import socket; socket.socketpair()",
    "connect": "import socket; socket.create_connection(('127.0.0.1', {port}))",
    "kill": "import os; os.kill({victim}, 9)",
    "signal by F_SETOWN": "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getpid())",
    "setrlimit": f"{LIBC}; {CALL.format(call='setrlimit(4, bytes(16))')}",
    "prlimit": "import resource; resource.prlimit(0, resource.RLIMIT_CORE, (0, 0))",
    "setuid": "import os; os.setuid(os.getuid())",
    "nice": "import os; os.nice(1)",
    "priority": "import os; os.getpriority(os.PRIO_PROCESS, 0)",
    "chmod": "import os; os.chmod('.', 0o777)",
    "a folder that cannot be listed": "import os; os.mkdir('unlisted', 0o300)",
    "memfd": "import os; os.memfd_create('x')",
    "symlink": "import os; os.symlink('/etc/passwd', 'p')",
    "fifo": "import os; os.mkfifo('f')",
    "write outside": "open('{outside}/new', 'w')",
    "mkdir outside": "import os; os.mkdir('{outside}/folder')",
    "rename from outside": "import os; os.rename('{outside}/stand-in', 'h')",
    "unlink outside": "import os; os.unlink('{outside}/stand-in')",
    "truncate by open": "import os; os.open('{outside}/stand-in', os.O_RDONLY | os.O_TRUNC)",
    "append outside": "open('{outside}/stand-in', 'a')",
    "truncate": "import os; os.truncate('{outside}/stand-in', 0)",
    "read outside": "open('{outside}/stand-in').read()",
    "read the users": "open('/etc/passwd').read()",
    "read its own environment": "open('/proc/self/environ').read()",
    "read another's environment": "open('/proc/{victim}/environ').read()",
    "list the root": "import os; os.listdir('/')",
    "read an installed package": "open({package!r}).read()",
    "unshare": f"{LIBC}; {CALL.format(call='unshare(0x400)')}",
    "ptrace": f"{LIBC}; {CALL.format(call='ptrace(0, 0, 0, 0)')}",
    "inotify": f"{LIBC}; {CALL.format(call='inotify_init()')}",
    "prctl": f"{LIBC}; {CALL.format(call='prctl(1, 0, 0, 0, 0)')}",
}
"""Each succeeds in a process that nothing confines, and harms at most a process and files of the test."""


@pytest.mark.parametrize("what", HARM)
def test_what_could_do_harm_is_refused(what: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    with subprocess.Popen(["sleep", "60"]) as victim, socket.create_server(("127.0.0.1", 0)) as server:
        # Next to the standard library, where a virtual environment's own packages are not.
        beside = Path(sys.base_prefix, "lib").glob("python*/*-packages/*/*.py")
        package = str(next(beside, pytest.__file__))
        facts = {"victim": victim.pid, "port": server.getsockname()[1], "outside": outside, "package": package}
        statement = HARM[what].format(**facts)
        try:
            _make_stand_in(outside)
            assert attempt(statement) in (*REFUSED, str(errno.EXDEV) if what == "rename from outside" else "")
            assert victim.poll() is None
            assert [(file.name, file.read_text()) for file in outside.iterdir()] == [("stand-in", "harmless")]
            assert attempt_outside(statement, tmp_path) == "done"
        finally:
            victim.kill()


def test_what_a_program_makes_can_always_be_removed() -> None:
    source = "import os\ntry: os.umask(0o777)\nexcept OSError: pass\nos.mkdir('d'); print(oct(os.stat('d').st_mode))"
    assert run(source).output == b"0o40700\n"


def test_other_users_of_the_kernel_are_refused() -> None:
    """io_uring, which not every machine has to begin with."""
    assert attempt(f"{LIBC}; {CALL.format(call='syscall(425, 8, 0)')}") == str(errno.EPERM)


def _make_stand_in(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    (folder / "stand-in").write_text("harmless")


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
            confine.confine(
                confine.readable_files(), folder, cpu_s=5, memory_bytes=1 << 40, file_bytes=1 << 20, open_files=200
            )
            refused = (
                os.fork,
                lambda: os.getpriority(os.PRIO_PROCESS, 0),
                lambda: os.mkdir(f"{outside}/x"),
                lambda: os.mkdir(f"{folder}/unlisted", 0o300),
                lambda: os.umask(0o777),
            )
            bad = sum(not fails(action) for action in refused)
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
    except OSError:
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
    source = "import time\ndef wait(): time.sleep(0.2)"
    outcome = run_program(source, limits=ProgramLimits(time_s=2.0), within_s=2.0, cases=cases)
    assert outcome.ended == "cut off" and 0 < len(outcome.values) == outcome.answered < 50
    assert time.monotonic() - started < 12.0  # a hundred times 0.2 s would be 20


def test_memory_is_bounded() -> None:
    limits = ProgramLimits(time_s=20.0, memory_bytes=128 << 20)
    for size, reached in ((64 << 20, b"done\n"), (10 << 30, b"")):
        outcome = run_program(f"x = bytearray({size})\nprint('done')", limits=limits, within_s=20.0)
        assert (outcome.ended, outcome.output) == ("exited", reached)
    piecewise = "x = []\nwhile True: x.append(bytearray(1 << 20)); print(len(x), flush=True)"
    outcome = run_program(piecewise, limits=limits, within_s=20.0)
    assert outcome.exit_code == 1 and 10 < int(outcome.output.split()[-1]) < 128


def test_a_fork_bomb_and_a_thread_bomb_leave_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", time_s=0.5)
    sleeper = "threading.Thread(target=time.sleep, args=(99,)).start()"
    assert (
        run(f"import threading, time\nthreading.stack_size(32768)\nwhile True: {sleeper}").ended == "too many threads"
    )
    assert below(tmp_path) == []


def below(folder: Path) -> list[int]:
    """Processes that work in the folder, whoever started them."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd().startswith(str(folder)):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def runs(process: psutil.Process) -> bool:
    """False for a process that has ended, also if nobody has reaped it yet."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_process_that_works_in_the_folder_is_found(tmp_path: Path) -> None:
    """Also one whose folder was removed, and whose parent has ended."""
    inside = tmp_path / "sandbox"
    inside.mkdir()
    orphan = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3).pid)"
    done = subprocess.run([sys.executable, "-S", "-c", orphan], cwd=inside, capture_output=True, text=True, timeout=30)
    inside.rmdir()
    try:
        assert below(tmp_path) == [int(done.stdout)]
    finally:
        os.kill(int(done.stdout), signal.SIGKILL)


HIDE = """
import mmap, os, time
held = []
for _ in range(20):
    file = open("hidden", "w+b", 0)
    file.write(bytes(1 << 19))
    held.append({held})
    os.unlink("hidden")
    {then}
    time.sleep(0.02)
time.sleep(1)
print("all")
"""


FIRST_THREAD_ENDS = """
import ctypes, threading
def hide():
    {hide}
threading.Thread(target=hide).start()
ctypes.CDLL(None).syscall(60, 0)
"""


@pytest.mark.parametrize("thread", ["first", "second"])
@pytest.mark.parametrize(("held", "then"), [("file", "pass"), ("mmap.mmap(file.fileno(), 4096)", "file.close()")])
def test_files_that_were_removed_and_are_still_held_count(held: str, then: str, thread: str) -> None:
    limits = ProgramLimits(time_s=5.0, file_bytes=1 << 20)
    source = HIDE.format(held=held, then=then)
    if thread == "second":
        source = FIRST_THREAD_ENDS.format(hide=source.replace("\n", "\n    "))
    outcome = run_program(source, limits=limits, within_s=5.0)
    assert (outcome.ended, outcome.output) == ("folder too large", b"")


def test_a_process_that_the_kernel_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "KILL_S", 0.1)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda handle, number: None)
    with pytest.raises(RunError, match=r"process \d+ did not end within 0.1 s of SIGKILL"):
        run("while True: pass", time_s=0.2)


def test_what_cannot_be_removed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patched, structlog.testing.capture_logs() as logs:
        patched.setattr(os, "rmdir", refuse)
        run("print(1)")
    left = [line["path"] for line in logs if line["event"] == "a temporary file is not removed"]
    assert str(next(tmp_path.iterdir())) in left


def test_output_and_folder_are_bounded_and_the_folder_is_removed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    limits = ProgramLimits(time_s=5.0, file_bytes=1 << 20)
    output = run_program("while True: print('x' * 1000)", limits=limits, within_s=5.0)
    assert output.exit_code != 0 and len(output.output) <= 1 << 20
    files = "i = 0\nwhile True:\n    i += 1\n    open(str(i), 'wb').write(b'x' * 100000)"
    assert run_program(files, limits=limits, within_s=5.0).ended == "folder too large"
    empty = "i = 0\nwhile True:\n    i += 1\n    open(str(i), 'wb')"
    assert run_program(empty, limits=limits, within_s=5.0).ended == "folder too large"
    assert list(tmp_path.iterdir()) == []


def test_a_program_ends_with_its_worker_and_the_next_start_removes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "run_program('while 1: pass', limits=ProgramLimits(60.0), within_s=60.0)"
    worker = f"from asyncrl.sandbox.run_program import *\n{program}"
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", worker], cwd=Path(__file__).parents[2], env=env) as parent:
        programs = []
        deadline_s = time.monotonic() + 30
        while not programs and time.monotonic() < deadline_s:
            programs = psutil.Process(parent.pid).children(recursive=True)
            programs = programs if any(program.cpu_times().user > 0.3 for program in programs) else []
            time.sleep(0.05)
        parent.kill()
    assert len(programs) == 2  # the interpreter and its program
    _, alive = psutil.wait_procs(programs, timeout=10)
    assert [program for program in alive if runs(program)] == []
    (leftover,) = tmp_path.iterdir()
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "tempdir", str(tmp_path))
        with Sandbox() as used:
            check_sandbox("the test")
            assert [folder.name for folder in tmp_path.iterdir()] == [used._folder.name] != [leftover.name]


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
FIND_NONCE = """
import os, sys, time
frame = sys._getframe()
while frame and "nonce" not in frame.f_locals: frame = frame.f_back
nonce, result = frame.f_locals["nonce"], frame.f_locals["result_file"]
"""


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


def test_a_program_that_knows_the_harness_answers_no_other_case_and_no_large_value() -> None:
    flood = """os.write(result, f'{nonce} 7 {{"value": 1}}\\n{nonce} 0 {{"value": 5}}\\n'.encode())
os.write(result, f'{nonce} 1 {{"value": [{"[]," * 10**6}[]]}}\\n'.encode())
def f(): return 6
"""
    before = psutil.Process().memory_info().rss
    outcome = run(FIND_NONCE + flood, cases=[{"evaluate": "f()"}] * 3)
    assert (outcome.values, outcome.answered) == ({0: 5, 2: 6}, 3)
    assert psutil.Process().memory_info().rss - before < 64 << 20


def test_a_program_cannot_restart_its_clock() -> None:
    started = time.monotonic()
    noise = "while True:\n os.write(result, b'x'); os.write(result, f'\\n{nonce} 0 1\\n'.encode()); time.sleep(0.05)"
    outcome = run(FIND_NONCE + noise, time_s=0.5, cases=[{"evaluate": "1"}])
    assert outcome.ended == "out of time" and time.monotonic() - started < 5.0


def test_time_in_which_a_program_waits_for_a_core_does_not_count() -> None:
    """Three busy processes on its core: it gets a quarter of it."""
    cores = os.sched_getaffinity(0)
    spin = [sys.executable, "-S", "-c", "while True: pass"]
    work = "import time\nwhile time.process_time() < 1.2: pass\nprint('done')"
    os.sched_setaffinity(0, {min(cores)})
    busy = [subprocess.Popen(spin) for _ in range(3)]
    try:
        started = time.monotonic()
        assert run(work, time_s=1.5).output == b"done\n"
        assert time.monotonic() - started > 1.5
        assert run("while True: pass", time_s=0.5).ended == "out of time"
    finally:
        os.sched_setaffinity(0, cores)
        for process in busy:
            process.kill()
            process.wait(10)


def test_an_interpreter_runs_many_programs_which_know_nothing_of_each_other() -> None:
    """And each is seen to end, at whatever moment of its end it is looked at."""
    source = "import os, sys\nprint(os.listdir(), 'mark' in vars(sys))\nopen('file', 'w')\nsys.mark = 1"
    with Sandbox() as many:
        outcomes = [many.run(source, limits=ProgramLimits(), within_s=20.0) for _ in range(100)]
        ended = many.run("while True: pass", limits=ProgramLimits(), within_s=0.0)
        late = many.run(source, limits=ProgramLimits(), within_s=20.0)
    assert {(one.ended, one.exit_code, one.output) for one in [*outcomes, late]} == {("exited", 0, b"[] False\n")}
    assert ended.ended == "cut off"


def test_nothing_runs_where_the_kernel_does_not_confine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A copy of the harness next to a `confine` that finds no Landlock."""
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
        check_sandbox("rewards: the code reward")


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
    thread = confine.CLONE_THREAD | confine.CLONE_FILES | 0x100
    assert decide(machine, clone, arch, [thread]) == confine.ALLOW
    assert decide(machine, clone, arch, [thread & ~confine.CLONE_FILES]) == denied
    mkdirat = confine.MKDIRAT[list(confine.AUDIT_ARCH).index(machine)]
    assert (
        decide(machine, mkdirat, arch, [0, 0, 0o777]) == decide(machine, mkdirat, arch, [0, 0, 0o700]) == confine.ALLOW
    )
    for mode in (0o300, 0o500, 0o600, 0):
        assert decide(machine, mkdirat, arch, [0, 0, mode]) == denied
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
