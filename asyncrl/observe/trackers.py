"""Trackers: the destinations of the metrics of each step."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.observe.destinations import (
    METRICS_FILE,
    ConsoleLines,
    JsonLines,
    MLflow,
    SwanLab,
    TensorBoard,
    Wandb,
    check_package,
)
from asyncrl.samples import Samples
from asyncrl.samples.book import read_evaluated
from asyncrl.util.tokenizer import Decoder, load_decoder
from asyncrl.util.user_code import resolve_function

log = structlog.get_logger()

KEY = "observe.trackers"


class Tracker(Protocol):
    """A destination of metrics: an entry of TRACKERS, or one of the user's own.

    A tracker is made with the config, the run's folder, and the last step that an earlier start logged (0 if none did).
    With this in `mine.py`, `observe.trackers=[mine.py:Printer]` prints the rewards in `logs/learner-0.out`:

        class Printer:
            def __init__(self, config, run_dir, last_step):
                self.name = config.run

            def log(self, step, metrics):
                print(self.name, step, metrics["reward/mean"], flush=True)

            def close(self):
                pass

    It is called in the process of learner rank 0, between two steps, and an exception that it raises ends the process.
    With a method `log_samples(step, kind, samples)` it is passed samples, too: decoded `Samples`, of which `kind` says
    whether they were "trained" or "evaluated".
    """

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Records the metrics of one step."""
        ...

    def close(self) -> None:
        """Writes what is not yet written; the run is over."""
        ...


TRACKERS: dict[str, Callable[[Config, Path, int], Tracker]] = {
    "jsonl": JsonLines,
    "console": ConsoleLines,
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
    "swanlab": SwanLab,
}
"""Trackers by the name that `observe.trackers` gives them."""
EVALUATED_SAMPLES = 8
"""Completions of an evaluation that trackers show."""


class Trackers:
    """All trackers of a run. Rows that an earlier start of the run logged are not logged again."""

    def __init__(
        self,
        trackers: list[Tracker],
        run_dir: Path,
        load_decoder: Callable[[], Decoder],
        *,
        last_step: int = 0,
        evaluated: Iterable[float] = (),
    ) -> None:
        """`last_step` and the versions `evaluated` were logged before; the decoder is loaded for the first samples."""
        self._trackers = trackers
        self._with_samples = [tracker for tracker in trackers if hasattr(tracker, "log_samples")]
        self._run_dir = run_dir
        self._load_decoder = load_decoder
        self._decoder: Decoder | None = None
        self._last_step = last_step
        self._evaluated = set(evaluated)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Records the metrics of a step."""
        if metrics.get("eval/version") in self._evaluated:
            metrics = {name: value for name, value in metrics.items() if not name.startswith("eval/")}
        if step > self._last_step:
            self._log(step, metrics)

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Records an evaluation that ended after the last step."""
        if metrics["eval/version"] not in self._evaluated:
            self._log(step, metrics)

    def log_samples(self, step: int, samples: Samples, kind: str = "trained") -> None:
        """Passes samples to the trackers that take them."""
        if not self._with_samples or not len(samples) or (kind == "trained" and step <= self._last_step):
            return
        if self._decoder is None:
            self._decoder = self._load_decoder()
        decoded = samples.decode(self._decoder)
        for tracker in self._with_samples:
            tracker.log_samples(step, kind, decoded)  # pyright: ignore[reportAttributeAccessIssue]

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)
        if self._with_samples and "eval/version" in metrics:
            evaluated = read_evaluated(self._run_dir, int(metrics["eval/version"]))
            self.log_samples(step, evaluated.select(slice(EVALUATED_SAMPLES)), "evaluated")


def find_tracker(name: str) -> Callable[[Config, Path, int], Tracker]:
    """Returns the class or function that makes the tracker. Raises ConfigError as `resolve` does, for one that does not
    take three arguments, and for one whose package is missing."""
    found = resolve_function(KEY, name, TRACKERS)
    check_package(KEY, name, found)
    try:
        inspect.signature(found).bind(None, Path(), 0)
    except TypeError as error:
        raise ConfigError(
            f"{KEY} = {name!r}: cannot be called with the config, the run's folder and the last logged step ({error})"
        ) from None
    return found


def make_trackers(config: Config, run_dir: Path) -> Trackers:
    """Returns the trackers that `observe.trackers` names, and metrics.jsonl, whose rows count as logged."""
    rows = _logged(run_dir / METRICS_FILE)
    last_step = max((int(row["step"]) for row in rows), default=0)
    evaluated = [row["eval/version"] for row in rows if "eval/version" in row]
    names = dict.fromkeys(["jsonl", *config.observe.trackers])
    made = [find_tracker(name)(config, run_dir, last_step) for name in names]
    decoder = partial(load_decoder, config.model.path, trust_remote_code=config.model.trust_remote_code)
    return Trackers(made, run_dir, decoder, last_step=last_step, evaluated=evaluated)


def _logged(path: Path) -> list[dict[str, float]]:
    """Returns the rows of the file, after cutting off a last line that a killed process did not finish."""
    if not path.exists():
        return []
    data = path.read_bytes()
    complete = data[: data.rfind(b"\n") + 1]
    if len(complete) < len(data):
        log.warning("an unfinished line is cut off", path=str(path), bytes=len(data) - len(complete))
        with path.open("r+b") as file:
            file.truncate(len(complete))
    return [json.loads(line) for line in complete.splitlines()]
