"""Trackers: the destinations of the metrics of each step.

metrics.jsonl is written by the learner, between two steps. Every other tracker has a thread, a `Feed`, that reads
metrics.jsonl and the recorded samples from the disk and passes them on. What a tracker does cannot stop the run: an
exception is a warning and a count, and the row waits on the disk until the tracker accepts it.

waits for                      woken by                          deadline
a new row                      `Trackers.log`                    none
a tracker that failed          its pause is over                 none; the pause doubles, up to MAX_PAUSE_S
a tracker's first start        it is made                        START_S; then ConfigError
the last rows, at the end      all are sent                      CLOSE_S, FAILED_CLOSE_S if the learner failed
"""

from __future__ import annotations

import inspect
import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec
import structlog

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError, DataError, observing
from asyncrl.observe.curves import decode_row, step_of
from asyncrl.observe.samples import FOLDER, TRAINED, Samples, read_evaluated, recorded_steps
from asyncrl.util.files import cut_unfinished_line, read_last_lines, read_lines, replace_file
from asyncrl.util.model_files import TokenDecoder, load_decoder
from asyncrl.util.text import describe, printable, redact
from asyncrl.util.user_code import resolve_function

log = structlog.get_logger()

KEY = "observe.trackers"
STATE_FILE = "trackers.json"
"""File in the run's folder with the `TrackerState` of each tracker, by name."""
EVALUATED_SAMPLES = 8
"""Completions of an evaluation that trackers show."""
MAX_TRIES = 5
"""A row that was tried this often is passed over if the tracker accepts the row after it."""
MAX_PAUSE_S = 60.0
"""Longest pause after a failure; the first is a second."""
START_S = 60.0
"""Time that a tracker has for its first start."""
CLOSE_S, FAILED_CLOSE_S = 20.0, 3.0
"""Time that all trackers together have to take the last rows, at the end and after an error of the learner."""
TAIL_BYTES = 1 << 20
"""End of metrics.jsonl that a restart reads, hundreds of steps: the last step is there, though a line may be damaged,
and so is every evaluation that the replay queue may report again."""


class Tracker(Protocol):
    """A destination of metrics: an entry of TRACKERS, or a custom class.

    A tracker is made with the config, the run's folder, and the last step that it has accepted (0 if none).
    With this in `mine.py`, `observe.trackers=[mine.py:Printer]` prints the rewards in `logs/learner-0.out`:

        class Printer:
            def __init__(self, config, run_dir, last_step):
                self.name = config.run

            def log(self, step, metrics):
                print(self.name, step, metrics["reward/mean"], flush=True)

            def close(self):
                pass

    It is made and called in a thread of learner rank 0 that belongs to it alone. An exception is a warning, and the row
    is passed to it again later, so that `log` should raise only if the row was not recorded. With a method
    `log_samples(step, kind, samples)` it also receives samples: decoded `Samples`, of which `kind` tells whether they
    were "trained" or "evaluated".
    """

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Records the metrics of one step."""
        ...

    def close(self) -> None:
        """Writes the rest; the run is over."""
        ...


PROJECT = "asyncrl"
METRICS_FILE, OWNER_FILE = "metrics.jsonl", "metrics.owner"
MAX_UNWRITTEN_BYTES = 16 << 20
SWANLAB_MODES = ("disabled", "local", "offline", "online")
SAMPLE_COLUMNS = (
    "chosen", "prompt", "completion", "reward", "reward_parts", "status", "staleness", "end_version", "ticket",
)  # fmt: skip


class JsonLines:
    """`metrics.jsonl` with one JSON object per step. The newest instance owns the file; an earlier one, of a learner
    whose host was only silent, adds no row."""

    def __init__(self, config: Config, run_dir: Path, last_step: int) -> None:
        self._file = (run_dir / METRICS_FILE).open("ab", buffering=0)
        self._unwritten = b""
        self._owner_file, self._owner = run_dir / OWNER_FILE, ""
        with observing(OWNER_FILE):
            self._claim()

    def _claim(self) -> None:
        owner = uuid.uuid4().hex
        replace_file(self._owner_file, owner, durable=False)
        self._owner = owner

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Writes a row. What a full disk does not take is written with the next row, up to MAX_UNWRITTEN_BYTES."""
        row = (json.dumps({"step": step, **metrics}) + "\n").encode()
        if len(self._unwritten) + len(row) <= MAX_UNWRITTEN_BYTES:
            self._unwritten += row
        if not self._owner:
            self._claim()
        elif self._owner_file.is_file() and self._owner_file.read_text() != self._owner:
            self._unwritten = b""
            log.warning("a later learner writes the metrics now", step=step)
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """TensorBoard event files in `tensorboard/`; samples are texts.

    Needs the extra `tensorboard`.
    """

    package = "tensorboard"

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
    """Weights & Biases, in offline mode unless the environment has another WANDB_MODE; samples are tables."""

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
    """SwanLab, in offline mode unless the environment has another SWANLAB_MODE; samples are texts.

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


MakeTracker = Callable[[Config, Path, int], Tracker]
TRACKERS: dict[str, MakeTracker] = {
    "jsonl": JsonLines,
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
    "swanlab": SwanLab,
}
"""Trackers by their name in `observe.trackers`."""


def rows_of(samples: Samples) -> list[dict[str, Any]]:
    """The columns of decoded samples that people look at, with parts of the reward as text."""
    names = [name for name in SAMPLE_COLUMNS if name in samples.columns]
    rows = samples.table.select(names).to_pylist(maps_as_pydicts="strict")
    for row in rows:
        row["reward_parts"] = ", ".join(f"{name} {value:g}" for name, value in row["reward_parts"].items())
    return [dict.fromkeys(SAMPLE_COLUMNS) | row for row in rows]


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


class TrackerState(msgspec.Struct):
    """The rows that a tracker has accepted, and its number of failures. It outlives the learner."""

    rows_bytes: int = 0
    """Bytes of metrics.jsonl whose rows were accepted."""
    step: int = 0
    """Step of the last of these rows."""
    samples_bytes: int = 0
    """Bytes of the recorded samples that were accepted."""
    samples_step: int = 0
    failures: int = 0
    refused: int = 0
    """Rows and samples that were given up."""
    error: str = ""
    """The latest failure."""


def read_states(run_dir: Path) -> dict[str, TrackerState]:
    """The states by the trackers' names; none if there is no file, or it cannot be read."""
    file = run_dir / STATE_FILE
    states: dict[str, TrackerState] = {}
    if file.is_file():
        with observing(STATE_FILE):
            states = msgspec.json.decode(file.read_bytes(), type=dict[str, TrackerState])
    return states


def tracker_summary(run_dir: Path) -> dict[str, dict[str, Any]]:
    """For each tracker that failed or lacks rows: its failures, the latest error, the rows and samples that it refused,
    and the rows that it has not received."""
    summary: dict[str, dict[str, Any]] = {}
    for name, state in read_states(run_dir).items():
        unsent = sum(1 for _ in read_lines(run_dir / METRICS_FILE, state.rows_bytes))
        if state.failures or unsent:
            counts = {"failures": state.failures, "refused": state.refused, "unsent_rows": unsent}
            summary[name] = counts | ({"error": state.error} if state.error else {})
    return summary


class Feed(threading.Thread):
    """Passes rows of metrics.jsonl and recorded samples to one tracker, in order, from where it stopped."""

    def __init__(
        self,
        tracker: str,
        make: Callable[[int], Tracker],
        run_dir: Path,
        load_decoder: Callable[[], TokenDecoder],
        state: TrackerState,
        save: Callable[[], None],
    ) -> None:
        super().__init__(name=f"tracker-{tracker}", daemon=True)
        self.tracker = tracker
        self._make = make
        self._run_dir = run_dir
        self._load_decoder = load_decoder
        self._state = state
        self._save = save
        self._target: Tracker | None = None
        self._decoder: TokenDecoder | None = None
        self._tries = 0
        """Failures in sequence."""
        self._wake = threading.Event()
        self._closing = False
        self._abandoned = False
        self._first_start: Future[None] | None = None

    def start_first(self) -> None:
        """Starts the thread and waits until the tracker is made. Raises ConfigError if it cannot be made."""
        self._first_start = Future()
        self.start()
        try:
            error = self._first_start.exception(START_S)
        except TimeoutError:
            problem = f"does not start within {START_S:g} s"
        else:
            if error is None:
                return
            if isinstance(error, ConfigError):
                raise error
            problem = f"does not start: {describe(error)}"
        raise ConfigError(f"{KEY} = {self.tracker!r}: {problem}; repair it or its server, or leave the tracker out")

    def wake(self) -> None:
        """Says that there is a new row. A tracker that failed completes its pause first."""
        if not self._tries:
            self._wake.set()

    def finish(self) -> None:
        """Makes the thread send the remaining rows, close the tracker and end."""
        self._closing = True
        self._wake.set()

    def abandon(self) -> None:
        """Makes the thread end after the call of the tracker in which it is."""
        self._abandoned = True
        self._wake.set()

    def run(self) -> None:
        while not self._abandoned:
            self._wake.clear()
            try:
                if self._run_once():
                    return
                self._wake.wait()
            except BaseException as error:  # a custom tracker may raise anything, SystemExit included
                if self._first_start is not None and not self._first_start.done():
                    self._first_start.set_exception(error)
                    return
                self._count(error)
                self._tries += 1
                pause_s = min(2.0 ** (self._tries - 1), MAX_PAUSE_S)
                self._wake.wait(min(pause_s, 1.0) if self._closing else pause_s)

    def _run_once(self) -> bool:
        """Sends everything that is on the disk. Returns True if the tracker is closed."""
        closing = self._closing
        if self._target is None:
            self._target = self._make(self._state.step)
            self._tries = 0
            if self._first_start is not None and not self._first_start.done():
                self._first_start.set_result(None)
            self._save()
        rows = self._run_dir / METRICS_FILE
        while not self._abandoned and (lines := list(islice(read_lines(rows, self._state.rows_bytes), 2))):
            if (step_of(lines[0]) or 0) > self._state.step:
                self._send_trained(self._target)  # the samples of a step are recorded before the next row
            self._send(self._target, *lines)
        if closing:
            self._send_trained(self._target)
            self._save()
            self._target.close()
        return closing

    def _send(self, target: Tracker, line: bytes, after: bytes | None = None) -> None:
        num_bytes = len(line)
        try:
            self._log(target, line)
        except Exception as error:
            if self._tries < MAX_TRIES or after is None:
                raise
            self._log(target, after)  # raises, unless only this row is refused
            num_bytes += len(after)
            try:
                self._log(target, line)
            except Exception:
                self._refuse("a row", error)
        self._tries = 0
        self._state.rows_bytes += num_bytes
        self._save()

    def _log(self, target: Tracker, line: bytes) -> None:
        metrics = decode_row(line)
        step = int(metrics.pop("step"))
        target.log(step, metrics)
        self._state.step = max(step, self._state.step)
        if "eval/version" in metrics and hasattr(target, "log_samples"):
            version = int(metrics["eval/version"])
            self._send_samples(
                target, step, "evaluated", lambda: read_evaluated(self._run_dir, version, limit=EVALUATED_SAMPLES)
            )

    def _send_trained(self, target: Tracker) -> None:
        """Sends the samples that were recorded of the steps whose rows are sent."""
        if not hasattr(target, "log_samples"):
            return
        try:
            for record in recorded_steps(self._run_dir, self._state.samples_bytes):
                if record.step > self._state.step:
                    break
                if record.step > self._state.samples_step:  # it is not trained again after a restart
                    self._send_samples(target, record.step, "trained", record.read)
                    self._state.samples_step = record.step
                self._state.samples_bytes = record.end_bytes
        except DataError as error:
            self._refuse("samples", error)
            self._state.samples_bytes = (self._run_dir / FOLDER / TRAINED).stat().st_size

    def _send_samples(self, target: Any, step: int, kind: str, read: Callable[[], Samples]) -> None:
        """Sends samples, once: if the tracker refuses them they remain in `samples/` alone."""
        try:
            if len(samples := read()):
                if self._decoder is None:
                    self._decoder = self._load_decoder()
                target.log_samples(step, kind, samples.decode(self._decoder))
        except Exception as error:
            self._refuse(f"{kind} samples", error)

    def _refuse(self, what: str, error: Exception) -> None:
        self._state.refused += 1
        self._count(error, refused=what)

    def _count(self, error: BaseException, **details: str) -> None:
        self._state.failures += 1
        self._state.error = describe(error)
        self._save()
        log.warning(
            "a tracker failed", tracker=self.tracker, failures=self._state.failures, error=self._state.error, **details
        )


class Trackers:
    """All trackers of a run. Rows that an earlier start of the run logged are not logged again. Use as a context
    manager."""

    def __init__(self, rows: JsonLines, feeds: list[Feed], *, last_step: int, evaluated: set[float]) -> None:
        """`last_step` and the versions `evaluated` were logged before."""
        self._rows = rows
        self._feeds = feeds
        self._last_step = last_step
        self._evaluated = evaluated

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

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        with observing(METRICS_FILE):
            self._rows.log(step, metrics)
        for feed in self._feeds:
            feed.wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self.close(CLOSE_S if kind is None else FAILED_CLOSE_S)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Sends the last rows and closes the trackers; those that are not done after `timeout_s` are abandoned."""
        deadline_s = time.monotonic() + timeout_s
        self._rows.close()
        for feed in self._feeds:
            feed.finish()
        for feed in self._feeds:
            feed.join(max(0.0, deadline_s - time.monotonic()))
            if feed.is_alive():
                feed.abandon()
                log.warning("a tracker did not take the last rows in time", tracker=feed.tracker, timeout_s=timeout_s)


def find_tracker(name: str) -> MakeTracker:
    """Returns the class or function that makes the tracker. Raises ConfigError as `resolve` does, for one that does not
    take three arguments, and for one whose package is missing."""
    make = resolve_function(KEY, name, TRACKERS)
    package = getattr(make, "package", None)
    if package is not None and find_spec(package) is None:
        raise ConfigError(
            f"{KEY} = {name!r}: the package {package} is not installed; pip install 'asyncrl[{package}]', or leave the "
            "tracker out"
        )
    try:
        inspect.signature(make).bind(None, Path(), 0)
    except TypeError as error:
        raise ConfigError(
            f"{KEY} = {name!r}: cannot be called with the config, the run's folder and the last logged step ({error})"
        ) from None
    return make


def make_trackers(config: Config, run_dir: Path) -> Trackers:
    """Returns the trackers that `observe.trackers` names, and metrics.jsonl, whose rows count as logged. Raises
    ConfigError for a tracker that fails in its first start in the run; later it is tried again while the run continues.
    """
    rows, states, lock = JsonLines(config, run_dir, 0), read_states(run_dir), threading.Lock()
    last_step, evaluated, num_bytes = _logged(run_dir / METRICS_FILE)  # to which no earlier learner adds a row now

    def save() -> None:  # on a full disk they are lost, and a restart sends some rows twice
        with lock, observing(STATE_FILE):
            replace_file(run_dir / STATE_FILE, msgspec.json.encode(states), mode=0o600, durable=False)

    decoder = partial(load_decoder, config.model.path, trust_remote_code=config.model.trust_remote_code)
    feeds: list[Feed] = []
    for name in dict.fromkeys(name for name in config.observe.trackers if name != "jsonl"):
        is_first = name not in states
        state = states.setdefault(name, TrackerState())
        if state.rows_bytes > num_bytes:  # rows were cut off, with the journal
            state.rows_bytes, state.step = num_bytes, last_step
            state.samples_step = min(state.samples_step, last_step)

        def make(step: int, name: str = name) -> Tracker:
            return find_tracker(name)(config, run_dir, step)

        feed = Feed(name, make, run_dir, decoder, state, save)
        feeds.append(feed)
        if is_first:
            feed.start_first()
        else:
            feed.start()
    return Trackers(rows, feeds, last_step=last_step, evaluated=evaluated)


def _logged(path: Path) -> tuple[int, set[float], int]:
    """Returns the last step, the versions evaluated last and the bytes of the file, after cutting off a last line that
    a killed process did not finish. The time does not depend on the length of the file."""
    if torn := cut_unfinished_line(path):
        log.warning("an unfinished line is cut off", path=str(path), bytes=torn)
    last_step, evaluated = 0, set[float]()
    for line in read_last_lines(path, TAIL_BYTES):
        try:
            row = decode_row(line)
        except ValueError:
            continue
        last_step = max(last_step, int(row["step"]))
        if "eval/version" in row:
            evaluated.add(row["eval/version"])
    return last_step, evaluated, path.stat().st_size if path.is_file() else 0
