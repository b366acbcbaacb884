"""Agent programs by name. Those of a host run in one process of their own, in this interpreter or another
(`environment.python`), which needs nothing of asyncrl."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import structlog

from asyncrl.config.sections import Options
from asyncrl.environments.gateway.openai_api import Access
from asyncrl.errors import ConfigError

log = structlog.get_logger()

SCRIPT = Path(__file__).with_name("subprocess_agent.py")
CLOSE_S = 2.0
"""Time for a process to release what its episodes hold, and to end."""
CANCEL_S = 60.0
"""Deadline for a process to note that an episode is cancelled; one that hangs is ended."""
START_S = 120.0
"""Deadline for the interpreter to import the program."""
MAX_LINE_BYTES = 64 << 20
FUNCTION = re.compile(r"\S+:[A-Za-z_]\w*")


class ProgramError(Exception):
    """The program has failed, or ended without a result that is a reward."""


class ProgramLostError(Exception):
    """The process in which programs run has died."""


class Program:
    """An agent program, which runs once for each episode, many at once in one process. The process is started at the
    first episode, and again when it has died."""

    def __init__(
        self, kind: Literal["agent", "command", "verifiers"], rest: str, options: Options, *, python: str
    ) -> None:
        self.name = f"verifiers:{rest}" if kind == "verifiers" else f"agent:{rest}"
        self._python = python
        self._spec = json.dumps({"kind": kind, "name": rest, "options": dict(options)})
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._runs: dict[int, asyncio.Future[Any]] = {}
        self._cancelled: set[int] = set()
        """Episodes of which the process has not noted that they are cancelled."""
        self._number = 0
        self._closed = False

    def check(self) -> None:
        """Raises ConfigError if the interpreter cannot be started or cannot load the program."""
        what, command = f"environment.name = {self.name!r}", [self._python, str(SCRIPT), self._spec]
        try:
            done = subprocess.run(command, input=b"", capture_output=True, timeout=START_S, start_new_session=True)
        except OSError as error:
            raise ConfigError(_not_started(self._python, error)) from None
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{what}: {self._python} has not loaded it within {START_S:g} s") from None
        if problem := _problem(done.stdout, done.stderr):
            raise ConfigError(f"{what}: {self._python} cannot load it: {problem}")

    async def run(self, task: Mapping[str, Any], access: Access) -> Any:
        """Returns the reward of an episode: a number, a dict with "score" and named parts, or None if it was posted.
        Raises ProgramError and ProgramLostError."""
        process = await self._started()
        number, self._number = self._number, self._number + 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._runs[number] = future
        try:
            await _send(process, {"run": number, "task": task, **access._asdict()})
            return await future
        finally:
            self._runs.pop(number, None)
            if not future.done() or future.cancelled():
                assert process.stdin is not None
                process.stdin.write(json.dumps({"cancel": number}).encode() + b"\n")  # it may not read, or have ended
                self._cancelled.add(number)
                asyncio.get_running_loop().call_later(CANCEL_S, self._check_alive, process, number)

    def _check_alive(self, process: asyncio.subprocess.Process, cancelled: int) -> None:
        """Ends the process if it has not noted that an episode was cancelled."""
        if cancelled in self._cancelled and process.returncode is None:
            _kill(process)
        self._cancelled.discard(cancelled)

    async def close(self) -> None:
        """Ends the process."""
        self._closed = True
        if self._process is None or self._reader is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.wait({self._reader}, timeout=CLOSE_S)
        if self._process.returncode is None:
            _kill(self._process)
            await asyncio.wait({self._reader}, timeout=CLOSE_S)  # to the end of its pipe, which is then closed

    async def _started(self) -> asyncio.subprocess.Process:
        """The process, which is started unless it runs. Raises ProgramLostError."""
        async with self._lock:
            if self._process is not None and self._process.returncode is None:
                return self._process
            pipe = asyncio.subprocess.PIPE
            try:
                process = await asyncio.create_subprocess_exec(
                    self._python, str(SCRIPT), self._spec, stdin=pipe, stdout=pipe, limit=MAX_LINE_BYTES,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise ProgramLostError(_not_started(self._python, error)) from None
            assert process.stdout is not None
            try:
                line = await asyncio.wait_for(process.stdout.readline(), START_S)
                if problem := _problem(line, b""):
                    raise ProgramLostError(f"{self._python} cannot load it: {problem}")
            except TimeoutError:
                process.kill()
                raise ProgramLostError(f"{self._python} has not loaded it within {START_S:g} s") from None
            except asyncio.CancelledError:
                process.kill()
                raise
            self._process = process
            self._reader = asyncio.ensure_future(self._read(process))
            return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Passes on results until the process ends; then the other runs are lost."""
        assert process.stdout is not None
        while line := await process.stdout.readline():
            answer = json.loads(line)
            self._cancelled.discard(answer["run"])
            run = self._runs.get(answer["run"])
            if run is None or run.done():
                continue
            if "error" in answer:
                run.set_exception(ProgramError(answer["error"]))
            else:
                run.set_result(answer["result"])
        code = await process.wait()
        if not self._closed:
            log.warning("process of agent programs ended", program=self.name, exit_code=code, episodes=len(self._runs))
        for run in self._runs.values():
            if not run.done():
                run.set_exception(ProgramLostError(f"the process of the programs ended with exit code {code}"))


def read_rows(name: str, options: Options, *, python: str, limit: int | None) -> Iterator[dict[str, Any]]:
    """Returns the rows of a verifiers environment: "prompt", "ground_truth", and "row", its own row as JSON. Raises
    ConfigError."""
    spec = {"kind": "verifiers", "name": name, "options": dict(options), "rows": limit}
    command, pipe = [python, str(SCRIPT), json.dumps(spec)], subprocess.PIPE
    try:
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, start_new_session=True)
    except OSError as error:
        raise ConfigError(_not_started(python, error)) from None
    with started as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                answer = json.loads(line)
                if "error" in answer:
                    raise ConfigError(f"verifiers:{name}: {python} cannot make its rows: {answer['error']}")
                if "done" in answer:
                    return
                yield answer["row"]
            raise ConfigError(f"verifiers:{name}: {python} ended before the last row")
        finally:
            process.kill()


def _kill(process: asyncio.subprocess.Process) -> None:
    """Ends the process, with what its episodes have started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _not_started(python: str, error: OSError) -> str:
    return f"environment.python = {python!r}: cannot be started ({error.strerror})"


async def _send(process: asyncio.subprocess.Process, message: Mapping[str, Any]) -> None:
    """Raises ProgramLostError if the process has ended."""
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(message).encode() + b"\n")  # with NaN, as a column may have it
        await process.stdin.drain()
    except (ConnectionError, RuntimeError) as error:
        raise ProgramLostError(f"the process of the programs has ended ({error})") from None


def _problem(output: bytes, errors: bytes) -> str:
    """Why a process is not ready; empty if it is."""
    try:
        first = json.loads(output.split(b"\n", 1)[0])
    except ValueError:
        text = errors.decode(errors="replace").strip().splitlines()
        return text[-1] if text else "it ended before it was ready"
    return str(first.get("error", "")) if isinstance(first, dict) else f"it printed {first!r}"


def load_agent(name: str, options: Options, python: str | None) -> Program:
    """The program `file.py:run` or `module:run`, in the interpreter `python` if it is given; any other name is a
    command."""
    if not FUNCTION.fullmatch(name):
        return Program("command", name, options, python=sys.executable)
    return Program("agent", name, options, python=python or sys.executable)


def load_verifiers(name: str, options: Options, python: str | None) -> Program:
    """The environment of the verifiers library with this id, in the interpreter `python`, by default this one. Raises
    ConfigError if there is no interpreter with the library."""
    return Program("verifiers", name, options, python=verifiers_python(name, python))


def verifiers_python(name: str, python: str | None) -> str:
    """The interpreter of a verifiers environment: the one that is given, or this one if it has the library. Raises
    ConfigError."""
    if not name:
        raise ConfigError("environment.name = 'verifiers:': names no environment; it is verifiers:ID")
    if python is None and importlib.util.find_spec("verifiers") is None:
        raise ConfigError(
            f"verifiers:{name}: this interpreter has no package verifiers, whose requirements do not fit asyncrl's. "
            "Make one that has it (python3.11 -m venv vf; vf/bin/pip install verifiers==0.4.0, and the package of the "
            "environment), and name it: environment.python=vf/bin/python"
        )
    return python or sys.executable
