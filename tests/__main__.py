"""`python -m tests` runs every test that is not slow; `python -m tests all` runs the slow ones, and the property tests
with random inputs, and tests of the engine on the model runner that GPUs use.

Each part is a process of pytest, the longest first, and some run at the same time: each waits often, for a process
or for a deadline. tests/generator needs a separate process, since vLLM and DeepSpeed each take torch's process group.
The slow tests of the system, which have deadlines, run alone. A part that fails does not keep the others from running.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

PASSED, NOTHING_SELECTED, INTERRUPTED = 0, 5, 130
AT_A_TIME, SLOW_AT_A_TIME = 5, 3
GENERATOR = ("tests/generator",)
LEARNER = ("tests/learner",)
WEIGHTS = ("tests/weights",)
PROCESSES = ("tests/launch", "tests/environments", "tests/rewards", "tests/network", "tests/fuzz")
"""Folders whose tests mostly wait for processes that they start."""
SYSTEM = ("tests/system", "tests/chaos")
"""Folders of the system tests; collecting the others as well would take their imports."""
GRACE_S = 20.0
"""Time for pytest to end after Ctrl-C."""


class Part:
    """One pytest process; what it prints goes to a file."""

    def __init__(self, name: str, selected: str, arguments: list[str]) -> None:
        self.name = name
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._printed_bytes = 0
        command = [sys.executable, "-m", "pytest", "-m", selected, "--durations=25", "--durations-min=0.5"]
        command += ["--color=yes"] if sys.stdout.isatty() else []
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdout=self.output,
            stderr=subprocess.STDOUT,
            preexec_fn=_hear_ctrl_c,
        )

    def print_new(self) -> None:
        """Prints the output since the last call."""
        new = os.pread(self.output.fileno(), 1 << 26, self._printed_bytes)
        self._printed_bytes += len(new)
        sys.stdout.buffer.write(new)
        sys.stdout.flush()

    def follow(self, look: Callable[[], None] = lambda: None) -> None:
        """Prints the output until the process ends; calls `look` all the time."""
        while not self.has_ended:
            self.print_new()
            look()
            time.sleep(0.1)
        self.print_new()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> None:
        if not self.has_ended:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    @property
    def summary(self) -> str:
        """The last line of pytest: libraries that end with the process may print more."""
        lines = os.pread(self.output.fileno(), 1 << 26, 0).decode(errors="replace").strip().splitlines()
        return next((line for line in reversed(lines) if " in " in line and "===" in line), "no summary")


def _hear_ctrl_c() -> None:
    """A shell's background job ignores SIGINT, and so would pytest."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def ended(parts: list[Part]) -> Iterator[None]:
    """Ends all parts when the block is left, in any way."""
    try:
        yield
    finally:
        for part in parts:
            part.end()


def run(*, slow: bool) -> list[Part]:
    selected = "(slow or hypothesis)" if slow else "not slow"
    ignored = [f"--ignore={folder}" for folder in (*GENERATOR, *LEARNER, *WEIGHTS, *PROCESSES)]
    left = [
        ("others", f"{selected} and not system", ignored),
        ("processes", selected, list(PROCESSES)),
        ("learner", selected, list(LEARNER)),
        ("weights", selected, list(WEIGHTS)),
        ("generator", selected, list(GENERATOR)),
        ("system", f"{selected} and system", list(SYSTEM)),
    ]
    if slow:  # the model runner of GPUs; a separate process, since it is chosen before vLLM is imported
        left.insert(-1, ("runner", "", ["-p", "tests.helpers.second_runner", *GENERATOR]))
    parts: list[Part] = []

    def at_a_time() -> int:
        if not slow:
            return AT_A_TIME
        return 1 if len(left) == 1 else SLOW_AT_A_TIME

    def start() -> None:
        """Starts as many as may run now."""
        while left and sum(not part.has_ended for part in parts) < at_a_time():
            parts.append(Part(*left.pop(0)))

    with ended(parts):
        start()
        for part in parts:  # which grows during the loop
            part.follow(start)
            start()
    return parts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests", description=__doc__)
    parser.add_argument("selection", nargs="?", choices=["quick", "all"], default="quick")
    slow = parser.parse_args().selection == "all"
    if slow:
        os.environ["ASYNCRL_HYPOTHESIS"] = "all"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started_s = time.monotonic()
    try:
        parts = run(slow=slow)
    except KeyboardInterrupt:
        print("interrupted")
        return INTERRUPTED
    passing = (PASSED, NOTHING_SELECTED) if slow else (PASSED,)
    failed = [part.name for part in parts if part.process.returncode not in passing]
    print()
    for part in parts:
        print(f"{part.name:<10} {part.summary}")
    outcome = f"failed: {', '.join(failed)}" if failed else "passed"
    print(f"{'total':<10} {time.monotonic() - started_s:.0f} s, {outcome}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
