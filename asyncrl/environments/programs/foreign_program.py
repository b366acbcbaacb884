"""Agent programs in an interpreter of their own, which has nothing of asyncrl (`environment.python`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import structlog

from asyncrl.config import Options
from asyncrl.environments.gateway.server import Access
from asyncrl.environments.programs.program import ProgramError, ProgramLostError
from asyncrl.errors import ConfigError

log = structlog.get_logger()

SCRIPT = Path(__file__).with_name("foreign.py")
CLOSE_S = 3.0
"""Deadline for a process to end."""
START_S = 120.0
"""Deadline for the interpreter to import the program."""
MAX_LINE_BYTES = 64 << 20
Kind = Literal["agent", "verifiers"]


class ForeignProgram:
    """A program that runs in one process of another interpreter, many episodes at once. The process is started at the
    first episode, and again when it has died."""

    def __init__(self, kind: Kind, name: str, options: Options, *, python: str) -> None:
        self.name = f"{kind}:{name}"
        self._python = python
        self._spec = json.dumps({"kind": kind, "name": name, "options": dict(options)})
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._runs: dict[int, asyncio.Future[Any]] = {}
        self._number = 0

    def check(self) -> None:
        """Raises ConfigError if the interpreter cannot be started or cannot load the program."""
        what = f"environment.name = {self.name!r}"
        try:
            done = subprocess.run(
                [self._python, str(SCRIPT), self._spec], input=b"", capture_output=True, timeout=START_S, check=False
            )
        except OSError as error:
            raise ConfigError(f"environment.python = {self._python!r}: cannot be started ({error.strerror})") from None
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{what}: {self._python} has not loaded it within {START_S:g} s") from None
        if problem := _problem(done.stdout, done.stderr):
            raise ConfigError(f"{what}: {self._python} cannot load it: {problem}")

    async def run(self, task: Mapping[str, Any], access: Access, *, stuck: list[asyncio.Future[Any]]) -> Any:
        process = await self._started()
        number, self._number = self._number, self._number + 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._runs[number] = future
        wish = {"run": number, "task": dict(task), **access._asdict()}
        try:
            await _send(process, wish)
            return await future
        finally:
            self._runs.pop(number, None)
            if not future.done() or future.cancelled():
                with contextlib.suppress(ProgramLostError):
                    await _send(process, {"cancel": number})

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        if self._reader is not None:  # to the end of its pipe, which is then closed
            await asyncio.wait({self._reader}, timeout=CLOSE_S)

    async def _started(self) -> asyncio.subprocess.Process:
        """The process, which is started unless it runs. Raises ProgramLostError."""
        async with self._lock:
            if self._process is not None and self._process.returncode is None:
                return self._process
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(
                self._python, str(SCRIPT), self._spec, stdin=pipe, stdout=pipe, limit=MAX_LINE_BYTES
            )
            assert process.stdout is not None
            try:
                line = await asyncio.wait_for(process.stdout.readline(), START_S)
            except TimeoutError:
                process.kill()
                raise ProgramLostError(f"{self._python} has not loaded it within {START_S:g} s") from None
            if problem := _problem(line, b""):
                raise ProgramLostError(f"{self._python} cannot load it: {problem}")
            self._process = process
            self._reader = asyncio.ensure_future(self._read(process))
            return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Passes on results until the process ends; then the other runs are lost."""
        assert process.stdout is not None
        while line := await process.stdout.readline():
            answer = json.loads(line)
            future = self._runs.get(answer["run"])
            if future is None or future.done():
                continue
            if "error" in answer:
                future.set_exception(ProgramError(answer["error"]))
            else:
                future.set_result(answer["result"])
        code = await process.wait()
        log.warning("process of agent programs ended", program=self.name, exit_code=code, episodes=len(self._runs))
        for future in self._runs.values():
            if not future.done():
                future.set_exception(ProgramLostError(f"the process of the programs ended with exit code {code}"))


async def _send(process: asyncio.subprocess.Process, message: Mapping[str, Any]) -> None:
    """Raises ProgramLostError if the process has ended."""
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(message).encode() + b"\n")
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
