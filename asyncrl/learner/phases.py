"""Where the time of a step goes: the seconds of each phase, and the peak of memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

PHASES = ("values", "proximal", "reference", "advantage", "forward", "backward", "optimizer")
"""The phases of `learner/step_s`, in their order; a step has those that the algorithm needs."""


class PhaseTimer:
    """Sums the seconds of each phase. On a GPU it records events between the kernels, and nothing waits for them before
    the end of the step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended: list[tuple[str, Callable[[], float]]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time in the block for a phase of PHASES."""
        if self._device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()

            def elapsed_s() -> float:
                end.synchronize()
                return begin.elapsed_time(end) / 1000

            self._ended.append((name, elapsed_s))
        else:
            begin_s = time.perf_counter()
            yield
            seconds = time.perf_counter() - begin_s
            self._ended.append((name, lambda: seconds))

    def metrics(self) -> dict[str, float]:
        """The seconds of each phase since the last call as `learner/NAME_s`, and the peak of memory in bytes: of the
        tensors on a GPU, of the process on a CPU."""
        sums: dict[str, float] = {}
        for name, elapsed_s in self._ended:
            sums[name] = sums.get(name, 0.0) + elapsed_s()
        self._ended.clear()
        seconds = {f"learner/{name}_s": sums[name] for name in PHASES if name in sums}
        return seconds | {"learner/peak_memory_bytes": float(self._peak_bytes())}

    def _peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
