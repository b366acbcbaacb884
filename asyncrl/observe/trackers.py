"""Trackers: the destinations of the metrics of each step."""

from __future__ import annotations

import inspect
import json
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import structlog

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.util.user_code import resolve_function

log = structlog.get_logger()

METRICS_FILE = "metrics.jsonl"
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
    """

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Records the metrics of one step."""
        ...

    def close(self) -> None:
        """Writes what is not yet written; the run is over."""
        ...


class JsonLines:
    """`metrics.jsonl` with one JSON object per step."""

    def __init__(self, config: Config, run_dir: Path, last_step: int) -> None:
        self._file = (run_dir / METRICS_FILE).open("a", buffering=1)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """TensorBoard event files in `tensorboard/`."""

    def __init__(self, config: Config, run_dir: Path, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=last_step + 1 if last_step else None)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases, in offline mode unless the environment's WANDB_MODE says otherwise."""

    def __init__(self, config: Config, run_dir: Path, last_step: int) -> None:
        import os

        import wandb

        os.environ.setdefault("WANDB_MODE", "offline")
        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex)
        self._run = wandb.init(
            project="asyncrl",
            name=config.run,
            dir=str(run_dir),
            config=config.model_dump(mode="json"),
            id=id_file.read_text(),
            resume="allow",
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Config, Path, int], Tracker]] = {
    "jsonl": JsonLines,
    "tensorboard": TensorBoard,
    "wandb": Wandb,
}
"""Trackers by the name that `observe.trackers` gives them."""


class Trackers:
    """All trackers of a run. Rows that an earlier start of the run logged are not logged again."""

    def __init__(self, trackers: list[Tracker], *, last_step: int = 0, evaluated: Iterable[float] = ()) -> None:
        """`last_step` and the versions `evaluated` were logged before."""
        self._trackers = trackers
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

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)


def find_tracker(name: str) -> Callable[[Config, Path, int], Tracker]:
    """Returns the class or function that makes the tracker. Raises ConfigError as `resolve` does, and for one that does
    not take three arguments."""
    found = resolve_function(KEY, name, TRACKERS)
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
    return Trackers(made, last_step=last_step, evaluated=evaluated)


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
