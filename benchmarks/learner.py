"""Trained tokens a second of a learner step on a packed, long-tailed batch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.frame import CannotRun, Limit, Round, Row, one_thread
from benchmarks.learner_batch import GROUPS, STEP, WAYS, lengths, make_model

QUICK_GROUPS = 2


class Side:
    """A process that trains one way on one thread; it steps only when it is asked to."""

    def __init__(self, way: str, folder: Path, groups: int, stack: ExitStack) -> None:
        self.way = way
        self._log = folder / f"{way}.log"
        command = [sys.executable, "-m", "benchmarks.learner_batch", way, str(folder / "model"), str(groups)]
        with self._log.open("w") as log:
            process = subprocess.Popen(
                command, env=one_thread(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._process = stack.enter_context(process)
        stack.callback(process.kill)

    def tell(self) -> None:
        """That the model is there; after that, to do a step."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def step_s(self) -> float:
        """Seconds of the step that was started; waits for it, as long as the deadline of the row lets it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(STEP):
                return float(line.removeprefix(STEP))
        raise self._failure()

    def _failure(self) -> CannotRun:
        return CannotRun(f"{self.way} failed: {self._log.read_text()[-1500:]}")


def measure(quick: bool) -> Iterator[Round]:
    if importlib.util.find_spec("trl") is None:
        raise CannotRun("TRL is not installed: pip install -e .[bench]")
    groups = QUICK_GROUPS if quick else GROUPS
    tokens = float(lengths(groups).sum())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = [Side(way, folder, groups, stack) for way in WAYS if not (quick and way == "sorted")]
        make_model(folder / "model")
        for side in sides:
            side.tell()
            side.tell()
        for side in sides:
            side.step_s()
        while True:
            seconds: dict[str, float] = {}
            for side in sides:
                side.tell()
                seconds[side.way] = side.step_s()
            ours_s = seconds["ours"]
            yield {
                **{f"of {way}": taken_s / ours_s for way, taken_s in seconds.items() if way != "ours"},
                **{f"{way} tokens/s": tokens / taken_s for way, taken_s in seconds.items()},
            }


ROW = Row(
    what="trained tokens/s of a learner step on a packed, long-tailed batch",
    against="the same model in a padded loop of Hugging Face's, and in TRL's GRPOTrainer",
    limits={"of padded": Limit(2.0), "of TRL": Limit(1.5)},
    measure=measure,
)
