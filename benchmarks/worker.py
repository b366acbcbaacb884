"""A process of a row that follows instructions, for alternating measurements. Each message is one line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from benchmarks.frame import ERROR_CHARACTERS, CannotRun, one_thread

ANSWER = "answer "
"""Prefix of the lines that are answers, among all output of a process."""


class Worker:
    """Runs `python -m MODULE ARGUMENTS...` on these cores until the stack ends."""

    def __init__(self, module: str, *arguments: Any, cores: Iterable[int], stack: ExitStack) -> None:
        call = [module, *map(str, arguments)]
        self._name = " ".join(call)
        self._errors = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        command = ["taskset", "-c", ",".join(map(str, cores)), sys.executable, "-m", *call]
        self._process = subprocess.Popen(
            command, env=one_thread(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        stack.callback(self._process.wait)
        stack.callback(self._process.kill)

    def tell(self, what: Any) -> None:
        """Sends the next instruction. Raises CannotRun if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def answer(self) -> Any:
        """Waits for the next answer and returns it; only the deadline of the row limits the wait. Raises CannotRun if
        the process has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise self._failure()

    def _failure(self) -> CannotRun:
        code = self._process.wait()
        self._errors.seek(0)
        end = self._errors.read().decode(errors="replace")[-ERROR_CHARACTERS:]
        return CannotRun(f"{self._name} ended with code {code}: {end}")


def instructions() -> Iterator[Any]:
    """Yields the instructions in the worker process until the end of its input."""
    for line in sys.stdin:
        yield json.loads(line)


def answer(value: Any) -> None:
    """Sends an answer from the worker process."""
    print(f"\n{ANSWER}{json.dumps(value)}", flush=True)
