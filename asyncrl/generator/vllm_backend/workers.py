"""The worker processes of an engine with tensor parallelism: vLLM starts one for each part of the model."""

from __future__ import annotations

import multiprocessing.connection
import signal
import threading
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import structlog

from asyncrl.errors import PeerTimeoutError

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

log = structlog.get_logger()

_EXIT_S = 1.0
"""Time for the exit code of a worker to be known."""


class Workers:
    """Watches the workers. When one ends, its work is lost and the others wait for it for ever: they are killed, and
    `check` raises."""

    def __init__(self, engine: LLMEngine, *, timeout_s: float) -> None:
        """`timeout_s` is the time that a worker has for one call."""
        core: Any = engine.engine_core
        self._processes: list[BaseProcess] = [worker.proc for worker in core.engine_core.model_executor.workers]
        self._timeout_s = timeout_s
        self._lost: int | None = None
        """The worker that ended first."""
        self._closing = False
        self._thread = threading.Thread(target=self._watch, name="worker-watch", daemon=True)
        self._thread.start()
        log.info("worker processes of the engine", pids=[process.pid for process in self._processes])

    def check(self) -> None:
        """Raises PeerTimeoutError if a worker has ended."""
        if self._lost is None:
            return
        process = self._processes[self._lost]
        process.join(_EXIT_S)
        raise PeerTimeoutError(
            f"generator.tensor_parallel = {len(self._processes)}: worker {self._lost} of the engine (process "
            f"{process.pid}) {_end_of(process)}"
        )

    def explain(self, error: Exception) -> None:
        """Raises PeerTimeoutError if an error of the engine comes from a worker that ended or does not answer."""
        if not all(process.is_alive() for process in self._processes):
            self._thread.join()
        self.check()
        if isinstance(error, TimeoutError):
            pids = ", ".join(str(process.pid) for process in self._processes)
            raise PeerTimeoutError(
                f"generator.tensor_parallel = {len(self._processes)}: the workers of the engine (processes {pids}) did "
                f"not answer within launch.heartbeat_timeout_s = {self._timeout_s:g} s ({error})"
            ) from error

    def close(self) -> None:
        """Expects that the workers end from now on."""
        self._closing = True

    def _watch(self) -> None:
        ended = multiprocessing.connection.wait([process.sentinel for process in self._processes])
        if self._closing:
            return
        self._lost = next(rank for rank, process in enumerate(self._processes) if process.sentinel in ended)
        for process in self._processes:
            process.kill()  # one that waits for another in a collective operation ends by no other signal


def _end_of(process: BaseProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"was killed by signal {signal.Signals(-code).name}"
    return f"ended with code {code}; its output says why"
