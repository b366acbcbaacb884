"""The trackers that asyncrl has: files, the console, and the packages that people look at runs with."""

from __future__ import annotations

import json
import os
import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.samples import Samples
from asyncrl.util.files import replace_file
from asyncrl.util.text import printable, redact

PROJECT = "asyncrl"
METRICS_FILE = "metrics.jsonl"
MAX_UNWRITTEN_BYTES = 16 << 20
SWANLAB_MODES = ("disabled", "local", "offline", "online")
SAMPLE_COLUMNS = (
    "chosen", "prompt", "completion", "reward", "reward_parts", "status", "staleness", "end_version", "ticket",
)  # fmt: skip


class JsonLines:
    """`metrics.jsonl` with one JSON object per step."""

    def __init__(self, config: Config, run_dir: Path, last_step: int) -> None:
        self._file = (run_dir / METRICS_FILE).open("ab", buffering=0)
        self._unwritten = b""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Writes a row. What a full disk does not take is written with the next row, up to MAX_UNWRITTEN_BYTES."""
        row = (json.dumps({"step": step, **metrics}) + "\n").encode()
        if len(self._unwritten) + len(row) <= MAX_UNWRITTEN_BYTES:
            self._unwritten += row
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        self._file.close()


class ConsoleLines:
    """A line with all metrics per step, and one per sample, in `logs/learner-0.out`."""

    def __init__(self, config: Config, run_dir: Path, last_step: int) -> None:
        pass

    def log(self, step: int, metrics: dict[str, float]) -> None:
        print(f"step:{step}", *(f"{name}:{value:.5g}" for name, value in metrics.items()), sep=" - ", flush=True)

    def log_samples(self, step: int, kind: str, samples: Samples) -> None:
        for row in rows_of(samples):
            values = (f"{name}={value!r}" for name, value in row.items() if value is not None)
            print(printable(f"step:{step} - {kind} sample: {', '.join(values)}"), flush=True)

    def close(self) -> None:
        pass


class TensorBoard:
    """TensorBoard event files in `tensorboard/`; samples are texts."""

    def __init__(self, config: Config, run_dir: Path, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=last_step + 1 if last_step else None)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, step: int, kind: str, samples: Samples) -> None:
        self._writer.add_text(f"samples/{kind}", markdown_of(samples), step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases, in offline mode unless the environment's WANDB_MODE says otherwise; samples are tables."""

    def __init__(self, config: Config, run_dir: Path, last_step: int) -> None:
        import wandb

        os.environ.setdefault("WANDB_MODE", "offline")
        self._table = wandb.Table
        self._run = wandb.init(
            project=PROJECT,
            name=config.run,
            dir=str(run_dir),
            config=settings_of(config),
            id=_lasting_id(run_dir / "wandb_id"),
            resume="allow",
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def log_samples(self, step: int, kind: str, samples: Samples) -> None:
        rows: list[Any] = [list(row.values()) for row in rows_of(samples)]
        self._run.log({f"samples/{kind}": self._table(columns=list(SAMPLE_COLUMNS), data=rows)}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow, at MLFLOW_TRACKING_URI or else in `mlruns/` of the run's folder; samples are artifacts.

    Needs the extra `mlflow`.
    """

    package = "mlflow"

    def __init__(self, config: Config, run_dir: Path, last_step: int) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (run_dir / "mlruns").absolute().as_uri()
        # Rows that fail are sent again by asyncrl. MLflow's own tries last for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=uri)
        id_file = run_dir / "mlflow_run_id"
        self._in_doubt = id_file.exists()
        """True if the answer to an earlier try was lost, so that the server may have the row."""
        if self._in_doubt:
            self._run_id = id_file.read_text()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(PROJECT)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(PROJECT)
        self._run_id = self._client.create_run(experiment_id, run_name=config.run).info.run_id
        params = [Param(name, str(value)) for name, value in _flat(settings_of(config))]
        self._client.log_batch(self._run_id, params=params)
        replace_file(id_file, self._run_id)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        points = [self._metric(name, value, 0, step) for name, value in metrics.items()]
        if not (self._in_doubt and points and self._has(points[0])):
            self._in_doubt = True
            self._client.log_batch(self._run_id, metrics=points)
        self._in_doubt = False

    def _has(self, point: Any) -> bool:
        return any(known.step == point.step for known in self._client.get_metric_history(self._run_id, point.key))

    def log_samples(self, step: int, kind: str, samples: Samples) -> None:
        self._client.log_text(self._run_id, markdown_of(samples), f"samples/{kind}-{step:06d}.md")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class SwanLab:
    """SwanLab, in offline mode unless the environment's SWANLAB_MODE says otherwise; samples are texts.

    Needs the extra `swanlab`.
    """

    package = "swanlab"

    def __init__(self, config: Config, run_dir: Path, last_step: int) -> None:
        import swanlab  # pyright: ignore[reportMissingImports]

        self._text = swanlab.Text
        mode: Any = os.environ.get("SWANLAB_MODE", "offline")
        if mode not in SWANLAB_MODES:
            raise ConfigError(f"SWANLAB_MODE = {mode!r}: must be one of {', '.join(SWANLAB_MODES)}")
        folder = run_dir / "swanlab"
        folder.mkdir(exist_ok=True)
        online: dict[str, Any] = {}
        if mode == "online":
            online = {"id": _lasting_id(run_dir / "swanlab_id"), "resume": "allow"}
        self._run = swanlab.init(
            project=PROJECT, name=config.run, log_dir=str(folder), mode=mode, config=settings_of(config), **online
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def log_samples(self, step: int, kind: str, samples: Samples) -> None:
        texts = [self._text(json.dumps(row, ensure_ascii=False), caption=row["chosen"]) for row in rows_of(samples)]
        self._run.log({f"samples/{kind}": texts}, step=step)

    def close(self) -> None:
        self._run.finish()


def check_package(key: str, name: str, tracker: Any) -> None:
    """Raises ConfigError if the tracker's package is not installed."""
    package = getattr(tracker, "package", None)
    if package is not None and find_spec(package) is None:
        raise ConfigError(
            f"{key} = {name!r}: the package {package} is not installed; pip install 'asyncrl[{package}]', or leave the "
            "tracker out"
        )


def rows_of(samples: Samples) -> list[dict[str, Any]]:
    """The columns of decoded samples that people look at, with parts of the reward as text."""
    names = [name for name in SAMPLE_COLUMNS if name in samples.columns]
    rows = samples.table.select(names).to_pylist(maps_as_pydicts="strict")
    return [dict.fromkeys(SAMPLE_COLUMNS) | row | {"reward_parts": _parts(row)} for row in rows]


def markdown_of(samples: Samples) -> str:
    """A table of decoded samples."""
    lines = ["| " + " | ".join(SAMPLE_COLUMNS) + " |", "|" + "---|" * len(SAMPLE_COLUMNS)]
    for row in rows_of(samples):
        cells = ("" if value is None else printable(str(value)).replace("|", "\\|") for value in row.values())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def settings_of(config: Config) -> dict[str, Any]:
    """The config without secrets."""
    return redact(config.model_dump(mode="json"))


def _parts(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in row["reward_parts"].items())


def _lasting_id(file: Path) -> str:
    """The id that the tracker has in all starts of the run."""
    if not file.exists():
        replace_file(file, uuid.uuid4().hex)
    return file.read_text()


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in values.items():
        is_section = isinstance(value, dict) and value
        pairs += _flat(value, f"{prefix}{name}.") if is_section else [(f"{prefix}{name}", value)]
    return pairs
