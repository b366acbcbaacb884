"""A process of a row that does what it is told, for things that are measured in turns: a line each way."""

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
"""Begins the lines that are answers, among all that a process prints."""


class Worker:
    """`python -m MODULE ARGUMENTS...` on these cores, until the stack ends."""

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
        """What to do next. Raises CannotRun when the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def answer(self) -> Any:
        """The next answer; waits for it, as long as the deadline of the row lets it. Raises CannotRun."""
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


def told() -> Iterator[Any]:
    """In the process: what it is told, until nobody can tell it any more."""
    for line in sys.stdin:
        yield json.loads(line)


def answer(value: Any) -> None:
    """In the process."""
    print(f"\n{ANSWER}{json.dumps(value)}", flush=True)
