"""The worker processes of an engine with tensor parallelism: vLLM starts one for each part of the model."""

from __future__ import annotations

import signal
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
"""Time for a worker that is killed to end."""


class Workers:
    """The workers; there are none if the generator's own process computes the model.

    When one ends, its work is lost and the others wait for it for ever: vLLM ends them, and cancels the call that waits
    for their results.
    """

    def __init__(self, engine: LLMEngine, *, timeout_s: float) -> None:
        """`timeout_s` is the time that a worker has for one call, which may compile kernels."""
        self._engine, self._timeout_s = engine, timeout_s
        client: Any = engine.engine_core
        self._executor = client.engine_core.model_executor
        self._processes: list[BaseProcess] = [worker.proc for worker in getattr(self._executor, "workers", [])]
        if self._processes:
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
        if not self.alive:
            states = [f"process {process.pid} {_state_of(process)}" for process in self._processes]
            raise PeerTimeoutError(
                f"generator.tensor_parallel = {len(self)}: a worker of the engine has ended ({', '.join(states)})"
            )

    def call(self, function: Callable[[], T]) -> T:
        """Returns what a function of the engine returns. Raises PeerTimeoutError if a worker has ended or does not
        answer."""
        try:
            return function()
        except Exception as error:
            self.check()
            if self._processes and isinstance(error, TimeoutError):
                raise PeerTimeoutError(
                    f"generator.tensor_parallel = {len(self)}: the workers of the engine (processes "
                    f"{', '.join(map(str, self.pids))}) did not answer within launch.start_timeout_s = "
                    f"{self._timeout_s:g} s ({error})"
                ) from error
            raise

    def rpc(self, method: str, *args: object) -> list[Any]:
        """Calls a method of `EngineWorker` in each process that computes a part of the model; returns the results.
        Raises as `call` does."""
        return self.call(partial(self._engine.collective_rpc, method, timeout=self._timeout_s, args=args))

    def close(self) -> None:
        """Ends the workers, which hold nothing that must be saved; vLLM would ask them to end, and wait for seconds."""
        if self._processes:
            self._executor.shutting_down = True
        for process in self._processes:
            process.kill()  # one that waits for another in a collective operation ends by no other signal
        for process in self._processes:
            process.join(_EXIT_S)


def _state_of(process: BaseProcess) -> str:
    code = process.exitcode
    if code is None:
        return "runs"
    return f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
