"""Runs untrusted Python programs, each in its own confined process.

The process is forked from a fresh interpreter (`inside.py`) and has only the standard library, an empty environment and
a temporary folder. It cannot open sockets, start processes, signal other processes, or read files other than the
interpreter's; it can write only in its folder, which is removed afterwards (`confine`: Landlock, seccomp and resource
limits; with and without root). This side limits its time, its threads and its disk space, including deleted files that
it holds open. A kernel that cannot confine it is an error: nothing runs unconfined. The program can still see the
machine's clock, its kernel version, and names and sizes of files.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Self

import structlog

from asyncrl.errors import ConfigError, RunError
from asyncrl.sandbox.inside import READY
from asyncrl.util.locks import remove_leftovers, temporary_folder, warn_not_removed

log = structlog.get_logger()

INSIDE = Path(__file__).with_name("inside.py")
PREFIX = "asyncrl-sandbox-"
TICK_S = 0.02
"""Pause between two checks of a running program."""
MAX_THREADS = 32
MAX_FOLDER_FILES = 100
OPEN_FILES = 32
START_S = 20.0
"""Deadline for the interpreter to start on a busy machine; the start does not count towards the program's time."""

KILL_S = 5.0
"""Deadline for the kernel to end a process."""

Ended = Literal["exited", "out of time", "cut off", "too many threads", "folder too large"]
"""out of time: it exceeded its own limit; cut off: the caller's time ended before."""


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """The limits of one program."""

    time_s: float = 2.0
    """Time of a script, or of each case of a module; time in which it waits for a processor core does not count."""
    memory_bytes: int = 1 << 30
    """Address space of the process, interpreter included."""
    file_bytes: int = 8 << 20
    """Largest file, including the program's output, and size of its folder."""
    value_bytes: int = 64 << 10
    """Largest value of a case, as JSON."""


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """The end of a program, and its results."""

    ended: Ended
    exit_code: int
    """Negative: ended by that signal."""
    output: bytes
    values: dict[int, Any]
    """Values of the cases, by number, in the form of `inside.plain`; a case that raised or did not run is missing."""
    answered: int
    """Number of cases that ended, by a value or by raising."""


class Sandbox:
    """An interpreter for untrusted programs, which it runs one after the other. Each has a process and a folder of its
    own and knows nothing of the others.

        with Sandbox() as sandbox:
            outcomes = [sandbox.run(source, stdin=text, limits=ProgramLimits(), within_s=10.0) for text in inputs]

    The interpreter takes about 0.1 s to start, a program in it some milliseconds.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def __enter__(self) -> Self:
        self._folder = self._stack.enter_context(temporary_folder(PREFIX, Path(tempfile.gettempdir())))
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._stack.close()

    def run(
        self,
        source: str,
        *,
        limits: ProgramLimits,
        within_s: float,
        stdin: str = "",
        cases: list[dict[str, Any]] | None = None,
    ) -> ProgramOutcome:
        """Runs a program once, as a script on `stdin`, or as a module whose functions `cases` use.

        A case is {"call": function, "arguments": [...]}, {"evaluate": expression} or {"execute": statement}. The run
        ends within `within_s` seconds. Raises RunError when the program could not be confined, and so did not run, or
        when the kernel does not kill it.
        """
        deadline_s = time.monotonic() + within_s
        with ExitStack() as stack:
            folder = Path(tempfile.mkdtemp(dir=self._folder))
            stack.callback(shutil.rmtree, folder, onerror=warn_not_removed)
            task, given, output, result = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(4))
            nonce = secrets.token_hex(16)
            _write(task, json.dumps(_task(source, cases, nonce, str(folder), limits, within_s)))
            _write(given, stdin)
            ready, ready_write = os.pipe()
            stack.callback(os.close, ready)
            try:
                descriptors = [task.fileno(), given.fileno(), output.fileno(), ready_write, result.fileno()]
                program = self._fork(descriptors, deadline_s)
            finally:
                os.close(ready_write)
            if program is None:
                return ProgramOutcome("cut off", -signal.SIGKILL, b"", {}, 0)
            pid, handle = program
            stack.callback(os.close, handle)
            answers = _Answers(result, nonce, len(cases or ()), limits)
            try:
                ended = _watch(pid, handle, ready, answers, folder, limits, deadline_s)
            finally:
                exit_code = self._end(pid, handle)
            _check_confined(ready, ended)
            answers.read()
            output.seek(0)
            return ProgramOutcome(ended, exit_code, output.read(limits.file_bytes), answers.values, answers.count)

    def _fork(self, descriptors: list[int], deadline_s: float) -> tuple[int, int] | None:
        """The process for a task and its pidfd; None if there is none before the deadline."""
        if self._control is None:
            self._control = self._start()
        wait_s = min(deadline_s - time.monotonic(), START_S)
        self._control.settimeout(max(wait_s, 0.001))
        handles: list[int] = []
        try:
            socket.send_fds(self._control, [b"t"], descriptors)
            text, handles, *_ = socket.recv_fds(self._control, 32, 1)
        except TimeoutError:
            self._stop()
            if wait_s < START_S:
                return None
        except OSError:  # it has ended, or closed the socket
            pass
        if handles:
            return int(text), handles[0]
        self._stop()
        raise RunError(f"the sandbox's interpreter {sys.executable} did not start a process")

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
        # One heap, since address space is limited; a fixed hash seed, so that a program always gets the same reward.
        environment |= {"MALLOC_ARENA_MAX": "1", "PYTHONHASHSEED": "0"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-B", str(INSIDE), str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        return ours

    def _end(self, pid: int, handle: int) -> int:
        """Kills the program, unless it has ended, and returns its exit code. Raises RunError when the kernel does not
        end it."""
        assert self._control is not None
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        self._control.settimeout(KILL_S)
        try:
            text = self._control.recv(32)
        except TimeoutError:
            self._stop()
            raise RunError(f"the sandbox's process {pid} did not end within {KILL_S:g} s of SIGKILL") from None
        except OSError:
            text = b""
        if not text:
            self._stop()
            raise RunError(f"the sandbox's interpreter {sys.executable} ended while it ran a program")
        return int(text)

    def _stop(self) -> None:
        """Ends the interpreter; the kernel ends its program with it."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            try:
                self._process.wait(KILL_S)
            except subprocess.TimeoutExpired:
                log.warning("the sandbox's interpreter does not end", pid=self._process.pid)
            self._process = None


def run_program(
    source: str, *, limits: ProgramLimits, within_s: float, stdin: str = "", cases: list[dict[str, Any]] | None = None
) -> ProgramOutcome:
    """Runs a program in a separate `Sandbox`; see `Sandbox.run`."""
    with Sandbox() as sandbox:
        return sandbox.run(source, limits=limits, within_s=within_s, stdin=stdin, cases=cases)


def check_sandbox(what: str) -> None:
    """Raises ConfigError, about `what` needs it, when this machine cannot confine a program."""
    if sys.platform != "linux":
        raise ConfigError(f"{what} needs Linux to confine programs, this is {sys.platform}")
    remove_leftovers(PREFIX, Path(tempfile.gettempdir()))
    try:
        outcome = run_program("print(6 * 7)", limits=ProgramLimits(time_s=30.0), within_s=30.0)
    except (OSError, RunError) as error:
        raise ConfigError(f"{what} cannot be used here: {error}") from None
    if outcome.output.strip() != b"42":
        raise ConfigError(
            f"{what} cannot be used here: a program that prints 42 in the sandbox {outcome.ended} "
            f"(exit code {outcome.exit_code}) with the output {outcome.output!r}"
        )


def _task(
    source: str, cases: list[dict[str, Any]] | None, nonce: str, folder: str, limits: ProgramLimits, within_s: float
) -> dict[str, Any]:
    return {
        "source": source,
        "cases": cases,
        "nonce": nonce,
        "folder": folder,
        "limits": {
            "cpu_s": int(min(within_s, limits.time_s * len(cases or [1]))) + 2,
            "memory_bytes": limits.memory_bytes,
            "file_bytes": limits.file_bytes,
            "open_files": OPEN_FILES,
        },
    }


class _Answers:
    """The records of a module's process about its cases. Only the line of the next case counts, so that the program can
    neither restart its clock at will nor answer what it was not asked."""

    def __init__(self, result: IO[bytes], nonce: str, num_cases: int, limits: ProgramLimits) -> None:
        self.values: dict[int, Any] = {}
        self.count = 0
        self._file = result
        self._nonce = nonce
        self._num_cases = num_cases
        self._limits = limits
        self._rest = b""
        self._offset = 0

    def read(self) -> bool:
        """Reads new records; True if a case has ended."""
        new = os.pread(self._file.fileno(), self._limits.file_bytes - self._offset, self._offset)
        self._offset += len(new)
        before = self.count
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            prefix = f"{self._nonce} {self.count} ".encode()
            if self.count < self._num_cases and line.startswith(prefix):
                self._keep(line.removeprefix(prefix))
                self.count += 1
        return self.count > before

    def _keep(self, text: bytes) -> None:
        if len(text) > self._limits.value_bytes:
            return
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):  # the program has damaged the harness
            return
        if isinstance(answer, dict) and "value" in answer:
            self.values[self.count] = answer["value"]


def _watch(
    pid: int, handle: int, ready: int, answers: _Answers, folder: Path, limits: ProgramLimits, deadline_s: float
) -> Ended:
    """Waits until the process ends or exceeds a limit."""
    end, start = select.poll(), select.poll()
    end.register(handle, select.POLLIN)
    start.register(ready, select.POLLIN)
    started, since_s, waited_s = False, time.monotonic(), 0.0
    while not end.poll(TICK_S * 1000):
        now_s = time.monotonic()
        if (not started and start.poll(0)) or answers.read():  # it starts, or is done with a case
            started, since_s, waited_s = True, now_s, _waited_s(pid)
        violation: Ended | None = None
        if now_s > deadline_s:
            violation = "cut off"
        elif started and now_s - since_s > limits.time_s + _waited_s(pid) - waited_s:
            violation = "out of time"
        elif len(_threads(pid)) > MAX_THREADS:
            violation = "too many threads"
        elif _is_full(folder, limits.file_bytes) or _hidden_bytes(pid, folder, limits) > limits.file_bytes:
            violation = "folder too large"
        if violation and not end.poll(0):  # once it has ended, its number may be another's
            return violation
    return "exited"


def _threads(pid: int) -> list[str]:
    """The folders of the threads of a process in /proc; none once it has ended."""
    try:
        return [f"/proc/{pid}/task/{thread}" for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _waited_s(pid: int) -> float:
    """Seconds for which the process was ready to run and had no processor core; 0 where the kernel does not count."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _is_full(folder: Path, max_bytes: int) -> bool:
    """True if the folder holds more than `max_bytes` bytes or MAX_FOLDER_FILES files."""
    count = total = 0
    for _, folders, files, handle in os.fwalk(folder):
        count += len(folders) + len(files)
        if count > MAX_FOLDER_FILES:
            return True
        for file in files:
            try:
                total += os.stat(file, dir_fd=handle, follow_symlinks=False).st_size
            except FileNotFoundError:  # removed since
                continue
        if total > max_bytes:
            return True
    return False


def _hidden_bytes(pid: int, folder: Path, limits: ProgramLimits) -> int:
    """Bytes of deleted files of the folder that the process still has open or mapped."""
    sizes: dict[str, int] = {}
    # Threads share their files, but one that has ended shows none, and to a normal user raises.
    for thread in _threads(pid):
        try:
            with open(f"{thread}/maps") as file:
                lines = [line for line in file if line.endswith("(deleted)\n") and str(folder) in line]
            handles = os.listdir(f"{thread}/fd")
        except OSError:
            continue
        # The size of a mapped file is unknown; no file is larger than the limit.
        sizes |= {line.split()[4]: limits.file_bytes for line in lines}
        for number in handles:
            try:
                status = os.stat(f"{thread}/fd/{number}")
                if not status.st_nlink and os.readlink(f"{thread}/fd/{number}").startswith(str(folder)):
                    sizes.setdefault(str(status.st_ino), status.st_size)
            except OSError:  # closed since
                continue
    return sum(sizes.values())


def _check_confined(ready: int, ended: Ended) -> None:
    said = os.read(ready, 1000)
    if not said and ended != "cut off":
        raise RunError(f"the sandbox's interpreter {sys.executable} did not confine a process ({ended})")
    if said not in (b"", READY):
        raise RunError(f"the kernel does not confine programs: it lacks {said.decode()}")


def _write(file: IO[bytes], text: str) -> None:
    file.write(text.encode("utf-8", "surrogateescape"))
    file.seek(0)
