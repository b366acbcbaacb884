"""The fork server: a process that has imported the modules of all roles and is forked for each role, so that a role
starts in milliseconds instead of seconds. It serves only roles without GPUs, since CUDA does not survive a fork.

Roles are forked twice, so that they become children of the launcher (a subreaper) instead of the fork server. The
launcher waits for them, signals them and ends them like its own subprocesses; they do not depend on the fork server.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil
import structlog
from setproctitle import setproctitle

from asyncrl.errors import AsyncrlError
from asyncrl.util.processes import PYTHON, end_with_parent

log = structlog.get_logger()

PR_SET_CHILD_SUBREAPER = 36
MESSAGE_BYTES = 128 << 10
"""Maximum size of a request; within the default limits of a Unix socket."""
READY_S = 180.0
"""Deadline for the imports, on a busy machine."""
FORK_S = 20.0
"""Deadline for the reply to a fork request."""
KILL_S = 10.0
"""Deadline for the kernel to end a process."""
POLL_S = 0.005
PRELOADED = (
    "pyarrow.dataset",
    "asyncrl.replay.server",
    "asyncrl.replay.queue",
    "asyncrl.data.cursor",
    "asyncrl.data.pipeline",
    "asyncrl.learner.role",
    "asyncrl.learner.critic",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # imported for every optimizer at ZeRO stage 1 or more
    "asyncrl.rewards.model_server",
    "asyncrl.generator.role",
)
"""Modules of all roles."""
ENGINE_MODULES = {
    "vllm": (
        "asyncrl.generator.vllm_backend.worker_side",
        "vllm.v1.engine.llm_engine",
        "vllm.model_executor.model_loader.default_loader",
    ),
    "transformers": ("asyncrl.generator.transformers_backend.engine", "transformers.models.qwen2.modeling_qwen2"),
}
"""Modules that are imported while an engine is built, by `generator.engine`."""
ENVIRONMENT = {
    # No other thread may run during a fork; Arrow's allocator would start one.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
}
"""Environment of the fork server itself; each role gets its own after the fork."""


class ForkServerError(AsyncrlError):
    """The fork server cannot fork; the launcher starts roles as subprocesses instead."""


class Forked:
    """A child process forked by the fork server, with the methods of subprocess.Popen that a launcher uses."""

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits for the process and returns its exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s or 0.0)
            time.sleep(POLL_S)
        return code

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal; None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends the signal unless the process has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)


class ForkServer:
    """The launcher's handle of a fork server. They communicate over a socket pair, which no other process can open."""

    _open = 0
    """Number of open fork servers of this process. While it is positive, this process adopts their orphans."""

    def __init__(self, module: str = "asyncrl.launch.fork_server", *, engine: str = "vllm") -> None:
        """Starts `module`, which calls `main`; returns before its imports are done. `engine` is `generator.engine`."""
        self._adopt()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process: subprocess.Popen[bytes] | Forked = subprocess.Popen(
                [*PYTHON, "-m", module, str(os.getpid()), engine],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT},
                process_group=0,
            )
        self._is_ready = self._closed = False
        self._children = {self._process.pid}

    @property
    def pid(self) -> int:
        """Process id of the fork server."""
        return self._process.pid

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], output: int) -> Forked:
        """Forks a child of this process in its own process group, with these arguments and this environment, and with
        its output redirected to the file descriptor `output`. The child waits until its standard input is closed.
        Raises ForkServerError if the fork fails."""
        request = json.dumps({"arguments": list(arguments), "environment": dict(environment)}).encode()
        read_end, write_end = os.pipe()
        stdin = os.fdopen(write_end, "wb")
        try:
            if not self._is_ready:
                self._receive(READY_S)
                self._is_ready = True
            socket.send_fds(self._socket, [request], [read_end, output])
            pid = self._receive(FORK_S)["pid"]
        except (OSError, ForkServerError) as error:
            stdin.close()
            raise ForkServerError(f"the fork server cannot fork a role: {error}") from None
        finally:
            os.close(read_end)
        self._children.add(pid)
        return Forked(pid, stdin)

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        self._socket.settimeout(timeout_s)
        answer = self._socket.recv(MESSAGE_BYTES)
        if not answer:
            raise ForkServerError(f"it ended with code {'unknown' if (code := self._end()) is None else code}")
        reply = json.loads(answer)
        if "error" in reply:
            raise ForkServerError(reply["error"])
        return reply

    def _end(self) -> int | None:
        try:
            return self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            log.error("process does not die of SIGKILL", name="fork_server", pid=self.pid, waited_s=KILL_S)
            return None

    def reap(self) -> None:
        """Reaps ended orphans: processes that outlive their role become children of this process."""
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess, ChildProcessError):
                if child.pid not in self._children and child.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(child.pid, os.WNOHANG)

    def close(self) -> None:
        """Ends the fork server; roles continue."""
        if self._closed:
            return
        self._closed = True
        self._adopt(-1)
        self._socket.close()
        self._process.send_signal(signal.SIGKILL)
        self._end()
        self.reap()

    @staticmethod
    def _adopt(change: int = 1) -> None:
        """Makes this process a subreaper when its first fork server starts, and an ordinary process after its last."""
        ForkServer._open += change
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_CHILD_SUBREAPER, int(ForkServer._open > 0), 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def main(run: Callable[[list[str]], int], preloaded: Sequence[str] | None = None) -> int:
    """Imports the modules, by default those of all roles and of the engine, then serves the parent, whose process id
    and engine are the command-line arguments: each request forks a child that calls `run` with the requested arguments.
    Returns when the parent has closed its socket."""
    parent, engine = int(sys.argv[1]), sys.argv[2]
    end_with_parent(parent)
    requests = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setproctitle("asyncrl forker")  # locates the title by the environment, which a child replaces
    modules = (*PRELOADED, *ENGINE_MODULES.get(engine, ())) if preloaded is None else preloaded
    error = _preload(modules, engine)
    requests.send(json.dumps({"error": error} if error else {}).encode())
    return serve(requests, parent, run)


def _preload(modules: Sequence[str], engine: str) -> str:
    """Imports the modules, in the environment of the engine. Returns why this process cannot fork."""
    try:
        if engine == "vllm":
            from asyncrl.generator.vllm_backend import setup as vllm_setup

            os.environ |= {**vllm_setup.DEFAULTS, **os.environ, **vllm_setup.CONDITIONS}
        for module in modules:
            importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    if len(threads) > 1:
        return f"imports have started threads, which do not survive a fork: {', '.join(threads)}"
    gc.collect()
    gc.freeze()  # keeps the collector from writing to pages that are shared with the children
    return ""


def serve(requests: socket.socket, parent: int, run: Callable[[list[str]], int]) -> int:
    """Forks a child for every request, until the parent has closed its socket; returns 0."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 2)
        if not request:
            return 0
        read_end, write_end = os.pipe()
        intermediate = os.fork()
        if not intermediate:
            try:
                if pid := os.fork():
                    os.setpgid(pid, pid)
                    os.write(write_end, pid.to_bytes(4))
                else:
                    os.setpgid(0, 0)
                    requests.close()
                    os.close(read_end)
                    os.close(write_end)
                    _be_child(json.loads(request), descriptors, parent, run)
            finally:
                os._exit(0)  # skips Python's exit handlers
        for descriptor in (*descriptors, write_end):
            os.close(descriptor)
        os.waitpid(intermediate, 0)  # afterwards the child is a child of the parent
        pid = int.from_bytes(os.read(read_end, 4))
        os.close(read_end)
        requests.send(json.dumps({"pid": pid} if pid else {"error": "the system refuses another process"}).encode())


def _be_child(
    request: Mapping[str, Any], descriptors: Sequence[int], parent: int, run: Callable[[list[str]], int]
) -> NoReturn:
    code = 1
    try:
        stdin, output = descriptors
        for descriptor, target in ((stdin, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, target)
        os.close(stdin)
        os.close(output)
        os.environ.clear()
        os.environ.update(request["environment"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        setproctitle(" ".join([os.path.basename(sys.executable), *request["arguments"]]))
        _set_threads_and_seeds()
        intermediate = os.getppid()
        while os.getppid() == intermediate != parent:  # until it has ended
            time.sleep(0.0005)
        code = run(request["arguments"])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _set_threads_and_seeds() -> None:
    """Sets the number of threads and the seeds, as imports do in a new process."""
    import numpy as np
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    np.random.seed()
    random.seed()


if __name__ == "__main__":
    from asyncrl.launch import worker

    # The arguments are those of `python -m asyncrl.launch.worker`.
    sys.exit(main(lambda arguments: worker.main(arguments[2:])))
