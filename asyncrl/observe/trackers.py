"""Where the metrics of each step go."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import structlog

from asyncrl.config import Config

log = structlog.get_logger()

METRICS_FILE = "metrics.jsonl"


class Tracker(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Records the metrics of one step."""
        ...

    def close(self) -> None: ...


class JsonLines:
    """`metrics.jsonl`: one object a step."""

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
"""Made with the config, the run's folder, and the last step that an earlier start logged; 0 if none did."""


class Trackers:
    """All trackers of a run as one. What an earlier start of the run logged is not logged again."""

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


def make_trackers(config: Config, run_dir: Path) -> Trackers:
    """The trackers that `observe.trackers` names; metrics.jsonl is always among them, and what it holds is logged."""
    rows = _logged(run_dir / METRICS_FILE)
    last_step = max((int(row["step"]) for row in rows), default=0)
    evaluated = [row["eval/version"] for row in rows if "eval/version" in row]
    names = dict.fromkeys(["jsonl", *config.observe.trackers])
    made = [TRACKERS[name](config, run_dir, last_step) for name in names]
    return Trackers(made, last_step=last_step, evaluated=evaluated)


def _logged(path: Path) -> list[dict[str, float]]:
    """The rows of the file, after cutting off a last line that a killed process did not finish."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        log.warning("an unfinished line is cut off", path=str(path), bytes=len(data) - len(whole))
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return [json.loads(line) for line in whole.splitlines()]
