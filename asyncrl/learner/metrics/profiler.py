"""Traces of chosen steps by the profiler of torch, for Perfetto or chrome://tracing."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
import torch
from torch.profiler import ProfilerActivity, profile

from asyncrl.errors import observing

log = structlog.get_logger()

MAX_TRACE_BYTES = 256 << 20
"""Maximum size of a compressed trace. A larger one is deleted: no viewer opens it."""


class StepProfiler:
    """Writes `step-NNNNNN.rank-R.json.gz` in a folder for each step that is profiled. Shapes, stacks and memory are not
    recorded, so that a trace stays small."""

    def __init__(self, steps: Collection[int], folder: Path, rank: int) -> None:
        self._steps = frozenset(steps)
        self._folder = folder
        self._rank = rank

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profiles the block if the step is one of those to profile. The step takes longer then."""
        if step not in self._steps:
            yield
            return
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        profiled = profile(activities=activities)
        with observing("profile"):
            profiled.start()
        try:
            yield
        finally:
            with observing("profile"):
                profiled.stop()
                self._write(profiled, step)

    def _write(self, profiled: profile, step: int) -> None:
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"step-{step:06d}.rank-{self._rank}.json.gz"
        profiled.export_chrome_trace(str(path))
        num_bytes = path.stat().st_size
        if num_bytes <= MAX_TRACE_BYTES:
            log.info("trace written", path=str(path), bytes=num_bytes)
            return
        path.unlink()
        log.warning(
            f"the trace of step {step} is deleted: it is larger than {MAX_TRACE_BYTES} bytes; profile a step with a "
            "smaller batch (replay.groups_per_step)",
            bytes=num_bytes,
        )
