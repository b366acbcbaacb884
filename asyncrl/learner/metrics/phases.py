"""Timers of the phases of a step, and the peak of memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from asyncrl.learner.distributed import Ranks
from asyncrl.util.processes import LEARNER_PHASES, peak_memory_bytes


class PhaseTimer:
    """Sums the seconds of each phase. On a GPU it records events between the kernels, and nothing waits for them before
    the end of the step."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._ended: list[tuple[str, Callable[[], float]]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time in the block for a phase of LEARNER_PHASES."""
        if self._ranks.device.type == "cuda":
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
        """This rank's seconds of each phase since the last call as `learner/NAME_s`, and the peak of memory in bytes,
        the highest of all ranks. A collective: all ranks call it."""
        sums: dict[str, float] = {}
        for name, elapsed_s in self._ended:
            sums[name] = sums.get(name, 0.0) + elapsed_s()
        self._ended.clear()
        seconds = {f"learner/{name}_s": sums[name] for name in LEARNER_PHASES if name in sums}
        peak = self._ranks.max(torch.tensor([peak_memory_bytes()]))
        return seconds | {"learner/peak_memory_bytes": float(peak)}
