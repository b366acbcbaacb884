"""Commands of asyncrl that start without imports: they are forked from one process of the test session."""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import tempfile
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from asyncrl.launch.fork_server import ENGINE_MODULES, PRELOADED, Forked, ForkServer, main, serve
from asyncrl.util.processes import end_with_parent

COMMANDS = (
    "asyncrl.cli",
    "asyncrl.launch.run",
    "asyncrl.cli.evaluate",
    "asyncrl.data.tiny_model",
)


class Command:
    """A forked `asyncrl` command, with what tests use of subprocess.Popen; both outputs go to one file."""

    def __init__(self, fork_server: ForkServer, folder: Path, arguments: list[str]) -> None:
        self.fork_server = fork_server
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._output.close)
        environment = {**os.environ, "PWD": str(folder)}
        self._child = fork_server.fork(["-m", "asyncrl.cli", *arguments], environment, self._output.fileno())
        self._child.stdin.close()
        self.pid = self._child.pid
        self.poll, self.wait, self.send_signal = self._child.poll, self._child.wait, self._child.send_signal

    @property
    def returncode(self) -> int | None:
        return self._child.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def output(self) -> str:
        """The output so far."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode()

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        return self.output(), None


class OwnFork(ForkServer):
    """A fork_server forked from this process, which has the imports already, and not started."""

    def __init__(self, run: Callable[[list[str]], int]) -> None:
        self._adopt()
        launcher = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            self._socket.close()
            os.setpgid(0, 0)
            end_with_parent(launcher)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            os._exit(serve(theirs, launcher, run))
        theirs.close()
        self._process = Forked(pid, io.BytesIO())
        self._is_ready, self._closed, self._children = True, False, {pid}


def run_command(arguments: list[str]) -> int:
    """`asyncrl` in this process, in the folder that PWD names."""
    from asyncrl import cli
    from asyncrl.launch import run
    from asyncrl.launch import worker as role

    os.chdir(os.environ["PWD"])
    sys.argv = ["asyncrl", *arguments[2:]]
    if arguments[2] == "launch":
        forked = OwnFork(lambda arguments: role.main(arguments[2:]))

        @contextmanager
        def preloaded(config, placement, launcher):  # type: ignore[no-untyped-def]
            launcher.fork_server = forked
            yield
            forked.close()

        run.preloaded = preloaded
    cli.main()
    return 0


if __name__ == "__main__":
    sys.exit(main(run_command, [*PRELOADED, *ENGINE_MODULES["vllm"], *COMMANDS]))
