"""Runs untrusted Python programs, each in its own confined process.

The process has a fresh interpreter with only the standard library, an empty environment and a temporary folder. It
cannot open sockets, start processes, signal other processes, or read files other than the interpreter's; it can write
only in its folder, which is removed afterwards (`confine`: Landlock, seccomp and resource limits; with and without
root). This side limits its time, its threads and its disk space, including deleted files that it holds open. A kernel
that cannot confine it is an error: nothing runs unconfined. The program can still see the machine's clock, its kernel
version, and names and sizes of files.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import structlog

from asyncrl.errors import ConfigError, RunError
from asyncrl.sandbox.inside import READY

log = structlog.get_logger()

INSIDE = Path(__file__).with_name("inside.py")
TICK_S = 0.02
"""Pause between two checks of a running program."""
MAX_THREADS = 32
MAX_FOLDER_FILES = 100
OPEN_FILES = 32
START_S = 20.0
"""Deadline for the interpreter to start on a busy machine; the start does not count towards the program's time."""

KILL_S = 5.0
"""Deadline for the kernel to end a process."""

Ended = Literal["exited", "out of time", "not started", "too many threads", "folder too large"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one program."""

    time_s: float = 2.0
    """Time of a script, or of each case of a module."""
    memory_bytes: int = 1 << 30
    """Address space of the process, interpreter included."""
    file_bytes: int = 8 << 20
    """Largest file, including the program's output, and size of its folder."""


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """The end of a program, and its results."""

    ended: Ended
    exit_code: int
    """Negative: ended by that signal."""
    output: bytes
    values: dict[int, Any]
    """Values of the cases, by number, in the form of `inside.plain`; a case that raised or did not run is missing."""


def run_program(
    source: str, *, limits: Limits, within_s: float, stdin: str = "", cases: list[dict[str, Any]] | None = None
) -> ProgramOutcome:
    """Runs a program once, as a script on `stdin`, or as a module whose functions `cases` use.

    A case is {"call": function, "arguments": [...]}, {"evaluate": expression} or {"execute": statement}. The run ends
    within `within_s` seconds. Raises RunError when the program could not be confined, and so did not run, or when the
    kernel does not kill it.
    """
    with ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="asyncrl-sandbox-")
        stack.callback(shutil.rmtree, folder, onerror=_not_removed)
        task, given, output, result = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(4))
        nonce = secrets.token_hex(16)
        _write(task, json.dumps(_task(source, cases, nonce, folder, limits, within_s)))
        _write(given, stdin)
        process, ready = _start(folder, given, output, task, result)
        stack.callback(os.close, ready)
        try:
            ended = _watch(process, ready, result, Path(folder), limits, time.monotonic() + within_s)
        finally:
            _end(process)
        _check_confined(ready, ended)
        output.seek(0)
        values = _values(result, nonce, limits.file_bytes)
        return ProgramOutcome(ended, process.returncode, output.read(limits.file_bytes), values)


def check_sandbox(what: str) -> None:
    """Raises ConfigError, about `what` needs it, when this machine cannot confine a program."""
    if sys.platform != "linux":
        raise ConfigError(f"{what} needs Linux to confine programs, this is {sys.platform}")
    try:
        outcome = run_program("print(6 * 7)", limits=Limits(time_s=30.0), within_s=30.0)
    except RunError as error:
        raise ConfigError(f"{what} cannot be used here: {error}") from None
    if outcome.output.strip() != b"42":
        raise ConfigError(
            f"{what} cannot be used here: a program that prints 42 in the sandbox {outcome.ended} "
            f"(exit code {outcome.exit_code}) with the output {outcome.output!r}"
        )


def _start(
    folder: str, given: IO[bytes], output: IO[bytes], task: IO[bytes], result: IO[bytes]
) -> tuple[subprocess.Popen[bytes], int]:
    """The process, and a pipe that reports once whether it is confined."""
    ready, ready_write = os.pipe()
    descriptors = (task.fileno(), ready_write, result.fileno())
    environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
    # One heap, since address space is limited; a fixed hash seed, so that a program always gets the same reward.
    environment |= {"MALLOC_ARENA_MAX": "1", "PYTHONHASHSEED": "0"}
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-S", "-B", str(INSIDE), *map(str, descriptors)],
            stdin=given,
            stdout=output,
            stderr=subprocess.DEVNULL,
            pass_fds=descriptors,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
    except BaseException:
        os.close(ready)
        raise
    finally:
        os.close(ready_write)
    return process, ready


def _task(
    source: str, cases: list[dict[str, Any]] | None, nonce: str, folder: str, limits: Limits, within_s: float
) -> dict[str, Any]:
    return {
        "source": source,
        "cases": cases,
        "nonce": nonce,
        "folder": folder,
        "parent": os.getpid(),
        "limits": {
            "cpu_s": int(min(within_s, limits.time_s * len(cases or [1]))) + 2,
            "memory_bytes": limits.memory_bytes,
            "file_bytes": limits.file_bytes,
            "open_files": OPEN_FILES,
        },
    }


def _watch(
    process: subprocess.Popen[bytes], ready: int, result: IO[bytes], folder: Path, limits: Limits, deadline_s: float
) -> Ended:
    """Waits until the process ends or exceeds a limit."""
    end, start = select.poll(), select.poll()
    handle = os.pidfd_open(process.pid)
    try:
        end.register(handle, select.POLLIN)
        start.register(ready, select.POLLIN)
        started, answered, since_s = False, 0, time.monotonic()
        while not end.poll(TICK_S * 1000):
            now_s, size = time.monotonic(), os.fstat(result.fileno()).st_size
            if (not started and start.poll(0)) or size > answered:  # it starts, or is done with a case
                started, answered, since_s = True, size, now_s
            if now_s > deadline_s or (started and now_s - since_s > limits.time_s):
                return "out of time"
            if now_s - since_s > START_S and not started:
                return "not started"
            if _num_threads(process.pid) > MAX_THREADS:
                return "too many threads"
            if _is_full(folder, limits.file_bytes) or _hidden_bytes(process.pid, folder, limits) > limits.file_bytes:
                return "folder too large"
        return "exited"
    finally:
        os.close(handle)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the process group; its members cannot leave it or start processes. Raises RunError when the kernel does not
    end the process."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the process id cannot have been reused
        try:
            process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            raise RunError(f"the sandbox's process {process.pid} did not end within {KILL_S:g} s of SIGKILL") from None


def _num_threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except FileNotFoundError:
        return 0


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


def _hidden_bytes(pid: int, folder: Path, limits: Limits) -> int:
    """Bytes of deleted files of the folder that the process still has open or mapped."""
    try:
        with open(f"/proc/{pid}/maps") as file:
            lines = [line for line in file if line.endswith("(deleted)\n") and str(folder) in line]
        handles = os.listdir(f"/proc/{pid}/fd")
    except FileNotFoundError:  # it has ended
        return 0
    # The size of a mapped file is unknown; no file is larger than the limit.
    sizes = {line.split()[4]: limits.file_bytes for line in lines}
    for handle in handles:
        try:
            status = os.stat(f"/proc/{pid}/fd/{handle}")
            if not status.st_nlink and os.readlink(f"/proc/{pid}/fd/{handle}").startswith(str(folder)):
                sizes.setdefault(str(status.st_ino), status.st_size)
        except OSError:  # closed since
            continue
    return sum(sizes.values())


def _not_removed(_: Any, path: str, error: tuple[Any, BaseException, Any]) -> None:
    log.warning("a file of a sandboxed program was not removed", path=path, error=str(error[1]))


def _values(result: IO[bytes], nonce: str, max_bytes: int) -> dict[int, Any]:
    result.seek(0)
    values: dict[int, Any] = {}
    for text in result.read(max_bytes).splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):  # written by the program, not by the harness
            continue
        match line:
            case {"nonce": str(own), "case": int(case), "value": value} if own == nonce:
                values[case] = value
    return values


def _check_confined(ready: int, ended: Ended) -> None:
    said = os.read(ready, 1000)
    if not said and ended == "out of time":  # by the caller's time, which may be shorter than a start takes
        return
    if not said:
        raise RunError(f"the sandbox's interpreter {sys.executable} did not start ({ended})")
    if said != READY:
        raise RunError(f"the kernel does not confine programs: it lacks {said.decode()}")


def _write(file: IO[bytes], text: str) -> None:
    file.write(text.encode("utf-8", "surrogateescape"))
    file.seek(0)
