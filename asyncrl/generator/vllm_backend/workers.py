"""The worker processes of an engine with tensor parallelism: vLLM starts one for each part of the model."""

from __future__ import annotations

import multiprocessing.connection
import signal
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from asyncrl.errors import PeerTimeoutError

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

log = structlog.get_logger()

T = TypeVar("T")
_EXIT_S = 1.0
"""Time for the exit code of a worker to be known."""


class Workers:
    """Watches the workers; there are none if the generator's own process computes the model.

    When one ends, its work is lost and the others wait for it for ever: they are killed, and `check` raises.
    """

    def __init__(self, engine: LLMEngine, *, timeout_s: float) -> None:
        """`timeout_s` is the time that a worker has for one call, which may compile kernels."""
        self._engine = engine
        client: Any = engine.engine_core
        self._executor = client.engine_core.model_executor
        self._processes: list[BaseProcess] = [worker.proc for worker in getattr(self._executor, "workers", [])]
        self._timeout_s = timeout_s
        self._lost: int | None = None
        """The worker that ended first."""
        self._closing = False
        self._thread = threading.Thread(target=self._watch, name="worker-watch", daemon=True)
        if self._processes:
            self._thread.start()
            log.info("worker processes of the engine", pids=self.pids)

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def pids(self) -> list[int | None]:
        return [process.pid for process in self._processes]

    @property
    def alive(self) -> bool:
        """True if no worker has ended."""
        return all(process.is_alive() for process in self._processes)

    def check(self) -> None:
        """Raises PeerTimeoutError if a worker has ended."""
        if self._lost is None:
            return
        process = self._processes[self._lost]
        process.join(_EXIT_S)
        raise PeerTimeoutError(
            f"generator.tensor_parallel = {len(self)}: worker {self._lost} of the engine (process {process.pid}) "
            f"{_end_of(process)}"
        )

    def call(self, function: Callable[[], T]) -> T:
        """Returns what a function of the engine returns. Raises PeerTimeoutError if a worker has ended or does not
        answer."""
        try:
            return function()
        except Exception as error:
            if not self.alive and not self._closing:
                self._thread.join()
            self.check()
            if self._processes and isinstance(error, TimeoutError):
                raise PeerTimeoutError(
                    f"generator.tensor_parallel = {len(self)}: the workers of the engine (processes "
                    f"{', '.join(map(str, self.pids))}) did not answer within launch.start_timeout_s = "
                    f"{self._timeout_s:g} s ({error})"
                ) from error
            raise

    def rpc(self, method: str | Callable[..., object], *args: object) -> list[Any]:
        """Calls a method of vLLM's worker, or a function of it, in each process that computes a part of the model;
        returns the results. Raises as `call` does."""
        return self.call(partial(self._engine.collective_rpc, method, timeout=self._timeout_s, args=args))

    def close(self) -> None:
        """Ends the workers, which hold nothing that must be saved; vLLM would ask them to end, and wait for seconds."""
        if not self._processes:
            return
        self._closing = self._executor.shutting_down = True
        self._kill()
        for process in self._processes:
            process.join(_EXIT_S)

    def _watch(self) -> None:
        ended = multiprocessing.connection.wait([process.sentinel for process in self._processes])
        if self._closing:
            return
        self._lost = next(rank for rank, process in enumerate(self._processes) if process.sentinel in ended)
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()  # one that waits for another in a collective operation ends by no other signal


def _end_of(process: BaseProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"was killed by signal {signal.Signals(-code).name}"
    return f"ended with code {code}; its output says why"
