"""Runs an agent program, in the host's process or in a separate one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol

from asyncrl.config.sections import Options
from asyncrl.environments.gateway.api import MODEL, Access
from asyncrl.environments.programs.subprocess_agent import accepted

MAX_OUTPUT_BYTES = 1 << 20
"""Maximum size of the end of a command's standard output, and of its errors, that is kept."""
MAX_ERROR_CHARACTERS = 400
END_S = 3.0
"""Deadline for a killed command to end."""
GUARDED = """{ read -r _; kill -s KILL -- -$$; } <"/dev/fd/$1" >/dev/null 2>&1 &
exec /bin/sh -c "$0"
"""
"""Runs the command $0 in the shell's process group, which is killed when the pipe $1 has no writer any more."""


class ProgramError(Exception):
    """The program has failed, or ended without a result that is a reward. `result` is the reward that it has
    nevertheless, which counts if it failed because a limit was reached."""

    def __init__(self, text: str, result: Any = None) -> None:
        super().__init__(text)
        self.result = result


class ProgramLostError(Exception):
    """The process in which programs run has died."""


class Program(Protocol):
    """An agent program, which runs once for each episode."""

    name: str

    def check(self) -> None:
        """Raises ConfigError if it cannot be started."""
        ...

    async def run(self, task: Mapping[str, Any], access: Access, *, stuck: list[asyncio.Future[Any]]) -> Any:
        """Returns the reward of an episode: a number, a dict with "score" and named parts, or None if it was posted.
        A call in a thread that still runs when this is cancelled is appended to `stuck`. Raises ProgramError and
        ProgramLostError, and what a function of the user raises."""
        ...

    async def close(self) -> None:
        """Ends its processes."""
        ...


class FunctionProgram:
    """A function `run(task, *, base_url, api_key)` in the host's process, or a class with such a method, of which an
    instance is made for each episode. It may be async; otherwise it runs in a thread. It may also take `model` and
    its options."""

    def __init__(self, name: str, function: Callable[..., Any], options: Options) -> None:
        self.name = name
        self._function, self._options = function, options

    def check(self) -> None: ...

    async def run(self, task: Mapping[str, Any], access: Access, *, stuck: list[asyncio.Future[Any]]) -> Any:
        function, options = self._function, dict(self._options)
        if isinstance(function, type):
            function, options = function(**options).run, {}
        known = {"base_url": access.base_url, "api_key": access.api_key, "model": MODEL} | options
        called = partial(function, dict(task), **accepted(function, known))
        if asyncio.iscoroutinefunction(function):
            return await called()
        future = asyncio.get_running_loop().run_in_executor(None, called)
        try:
            result = await asyncio.shield(future)
        except asyncio.CancelledError:
            stuck.append(future)
            future.add_done_callback(partial(_returned, stuck))
            raise
        return await result if isinstance(result, Awaitable) else result

    async def close(self) -> None: ...


class CommandProgram:
    """A command, started for each episode, with `OPENAI_BASE_URL` and `OPENAI_API_KEY` in its environment and the task
    as JSON at its standard input. Its reward is the last line of its output as JSON, or what it posted. It ends, with
    all processes of its group, when the episode ends or this process is killed."""

    def __init__(self, name: str, options: Options) -> None:
        self.name = f"agent:{name}"
        self._command, self._options = name, options
        self._running: set[int] = set()
        """The process groups of episodes in progress."""
        self._pipe: tuple[int, int] | None = None
        """A pipe whose writing end only this process has, so that commands also end when it is killed."""

    def check(self) -> None: ...

    async def run(self, task: Mapping[str, Any], access: Access, *, stuck: list[asyncio.Future[Any]]) -> Any:
        variables = {"OPENAI_BASE_URL": access.base_url, "OPENAI_API_KEY": access.api_key, "OPENAI_MODEL": MODEL}
        pipe = asyncio.subprocess.PIPE
        if self._pipe is None:
            self._pipe = os.pipe()
        alive, _ = self._pipe
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", GUARDED, self._command, str(alive), stdin=pipe, stdout=pipe, stderr=pipe,
            env=os.environ | variables, start_new_session=True, pass_fds=(alive,),
        )  # fmt: skip
        self._running.add(process.pid)
        content = json.dumps({**task, "options": dict(self._options)}).encode()
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        try:
            output, errors, *_ = await asyncio.gather(
                _tail(process.stdout), _tail(process.stderr), _feed(process.stdin, content), process.wait()
            )
        finally:
            self._end(process.pid)
            ends = (process.wait(), _tail(process.stdout), _tail(process.stderr))  # at their ends its pipes are closed
            _, late = await asyncio.wait(map(asyncio.ensure_future, ends), timeout=END_S)
            for end in late:
                end.cancel()
        if process.returncode:
            text = errors.decode(errors="replace").strip()[-MAX_ERROR_CHARACTERS:]
            raise ProgramError(f"exit code {process.returncode}: {text}")
        return _last_json(output.decode(errors="replace"))

    async def close(self) -> None:
        for group in list(self._running):
            self._end(group)
        for end in self._pipe or ():
            os.close(end)
        self._pipe = None

    def _end(self, group: int) -> None:
        """Ends the command, with all that it has started."""
        self._running.discard(group)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


async def _tail(stream: asyncio.StreamReader) -> bytes:
    """Reads the stream to its end, and returns its last MAX_OUTPUT_BYTES."""
    tail = bytearray()
    while chunk := await stream.read(1 << 16):
        tail += chunk
        if len(tail) > 2 * MAX_OUTPUT_BYTES:
            del tail[:-MAX_OUTPUT_BYTES]
    return bytes(tail[-MAX_OUTPUT_BYTES:])


async def _feed(stream: asyncio.StreamWriter, content: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended, or does not read its input
        stream.write(content)
        await stream.drain()
    stream.close()


def _returned(stuck: list[asyncio.Future[Any]], future: asyncio.Future[Any]) -> None:
    stuck.remove(future)
    if not future.cancelled():
        future.exception()  # it comes too late


def _last_json(output: str) -> Any:
    """The value in the last line that is not empty; None if there is none. Raises ProgramError if it is no JSON."""
    lines = [line for line in output.splitlines() if line.strip()]
    if not lines:
        return None
    try:
        return json.loads(lines[-1])
    except ValueError:
        raise ProgramError(f"the last line of its output is no reward: {lines[-1][:MAX_ERROR_CHARACTERS]!r}") from None
