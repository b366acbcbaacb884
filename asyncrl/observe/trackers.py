"""Where the metrics of each step go."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from asyncrl.config import Config


class Tracker(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Records the metrics of one step."""
        ...

    def close(self) -> None: ...


class JsonLines:
    """`metrics.jsonl`: one object a step."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._file = (run_dir / "metrics.jsonl").open("a", buffering=1)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """TensorBoard event files in `tensorboard/`."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases, in offline mode unless the environment's WANDB_MODE says otherwise."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        import os

        import wandb

        os.environ.setdefault("WANDB_MODE", "offline")
        settings = config.model_dump(mode="json")
        self._run = wandb.init(project="asyncrl", name=config.run, dir=str(run_dir), config=settings)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Config, Path], Tracker]] = {
    "jsonl": JsonLines,
    "tensorboard": TensorBoard,
    "wandb": Wandb,
}


class Trackers:
    """All trackers of a run as one."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def make_trackers(config: Config, run_dir: Path) -> Trackers:
    """The trackers that `observe.trackers` names; metrics.jsonl is always among them."""
    names = dict.fromkeys(["jsonl", *config.observe.trackers])
    return Trackers([TRACKERS[name](config, run_dir) for name in names])
