"""The Python API: starts runs, and reads and steers those that are there.

    import asyncrl

    if __name__ == "__main__":
        run = asyncrl.train("demo", run="first", steps=50)
        run.wait()
        print(run.summary["reward_last"])
        print(run.samples(order="worst").to_pandas()[["step", "prompt", "completion", "reward"]])

A run is the same as with `asyncrl launch`: separate processes and a folder, which this module reads. A script whose
functions are used as rewards needs the guard, since the processes of the run import it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import pyarrow as pa
from rich.console import Console

from asyncrl.cli.running import scale
from asyncrl.config.config import Config
from asyncrl.config.load import config_keys, load_config, settings_of_model
from asyncrl.errors import ConfigError, PeerTimeoutError, RunError
from asyncrl.launch.run_dir import is_running, read_endpoints
from asyncrl.observe.console import EXIT_CONFIG, EXIT_DONE, EXIT_INTERRUPTED
from asyncrl.observe.curves import read_metrics
from asyncrl.observe.sample_search import Query, find_samples
from asyncrl.observe.samples import Samples
from asyncrl.observe.trace import read_trace
from asyncrl.replay.client import LauncherClient
from asyncrl.util.files import read_json, replace_file
from asyncrl.util.processes import PYTHON, end_with_parent
from asyncrl.util.user_code import name_of, refuse_while_importing

if TYPE_CHECKING:
    import pandas as pd

POLL_S = 0.1
STOP_S = 120.0
CLAIMS_A_TERMINAL = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""Environment variables by which programs write colors, and rich a live panel, to any file."""
Status = Literal["starting", "running", "finished", "stopped", "failed"]
Source = Config | Mapping[str, Any] | str | Path | None
"""A config: as an object, as nested dicts, or as a YAML file or the name of one in configs/; None is the demo."""


class Run:
    """A run by its folder: one that `train` started, or any other, live or not."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes] | None = None, output: Path | None = None) -> None:
        """`process` is the launcher and `output` the file with what it prints, if this process started it."""
        self.path = path
        self._process = process
        self._output = output
        self._shown_bytes = 0

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Returns the run in this folder. Raises ConfigError if there is none."""
        folder = Path(path)
        if not (folder / "config.yaml").is_file():
            raise ConfigError(f"{folder}: not the folder of a run, config.yaml is missing; give runs/NAME")
        return cls(folder)

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.path.name

    @property
    def config(self) -> Config:
        """The config of the run."""
        return load_config(self.path / "config.yaml")

    @property
    def status(self) -> Status:
        """ "starting" before it has a folder; "finished" after its last step, "stopped" if it was ended earlier."""
        if self._process is not None and self._process.poll() is None:
            return "running" if (self.path / "endpoints.json").exists() else "starting"
        if is_running(self.path):
            return "running"
        return self.summary.get("status", "failed")

    @property
    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`; empty until the run has ended."""
        file = self.path / "summary.json"
        return read_json(file) if file.is_file() else {}

    def wait(self, timeout_s: float | None = None, *, show: bool = True) -> dict[str, Any]:
        """Returns the summary when the run has ended; `show` prints the launcher's output while it waits.

        Raises TimeoutError after `timeout_s`, ConfigError for a config that cannot work, and RunError if the run has
        failed.
        """
        deadline_s = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        while self.status in ("starting", "running"):
            self._show(show)
            if time.monotonic() > deadline_s:
                raise PeerTimeoutError(f"{self.path}: the run has not ended within {timeout_s:g} s")
            time.sleep(POLL_S)
        self._show(show)
        code = EXIT_DONE if self._process is None else self._process.returncode
        if code not in (EXIT_DONE, EXIT_INTERRUPTED) or self.status == "failed":
            error = self.summary.get("error") or self._last_line()
            raise (ConfigError if code == EXIT_CONFIG else RunError)(str(error).removeprefix("error: "))
        return self.summary

    def stop(self, timeout_s: float = STOP_S) -> dict[str, Any]:
        """Ends the run after the step in progress, with a checkpoint, and returns its summary. Raises TimeoutError if
        it has not ended within `timeout_s`."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        elif is_running(self.path):
            client = LauncherClient(read_endpoints(self.path))
            try:
                client.stop("stopped by Run.stop")
            finally:
                client.close()
        return self.wait(timeout_s, show=False)

    def scale(self, generators: int) -> None:
        """Changes the number of generators, as `asyncrl scale` does. Raises ConfigError if the run is not running."""
        scale(self.path, generators, Console(quiet=True))

    def metrics(self) -> list[dict[str, float]]:
        """The metrics of each step so far."""
        return read_metrics(self.path / "metrics.jsonl")

    def trace(self) -> pa.Table:
        """The groups that have ended so far, one row each (docs/reliability.md). Raises DataError."""
        return read_trace(self.path)

    def samples(self, *, special_tokens: bool = False, **query: Any) -> Samples:
        """Trajectories of the run with their texts: of the last step, or the ones that match. The conditions are the
        fields of `asyncrl.observe.sample_search.Query`: `samples(steps=(10, 20), order="worst", limit=3)`. Raises
        ConfigError if none are stored."""
        return find_samples(self.path, Query(**query), special_tokens=special_tokens).samples

    def metrics_frame(self) -> pd.DataFrame:
        """`metrics` as a pandas DataFrame."""
        import pandas as pd

        return pd.DataFrame(self.metrics())

    def trace_frame(self) -> pd.DataFrame:
        """`trace` as a pandas DataFrame."""
        return self.trace().to_pandas()

    def samples_frame(self, **query: Any) -> pd.DataFrame:
        """`samples` as a pandas DataFrame."""
        return self.samples(**query).to_pandas()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.status})"

    def _show(self, show: bool) -> None:
        if show and self._output is not None:
            with self._output.open("rb") as file:
                file.seek(self._shown_bytes)
                new = file.read()
            self._shown_bytes += len(new)
            print(new.decode(errors="replace"), end="", flush=True)

    def _last_line(self) -> str:
        lines = self._output.read_text(errors="replace").strip().splitlines() if self._output is not None else []
        return lines[-1] if lines else f"{self.path}: the run has left no summary; see its logs"


def train(config: Source = None, **overrides: Any) -> Run:
    """Starts a run in the background and returns it. The run is stopped when the calling thread ends.

    `overrides` are settings that override the config, as dicts of sections or by dotted keys:
    `train("demo", steps=50, learner={"lr": 1e-4})`. Rewards, losses, advantages and trackers may be Python functions
    that other processes can import. Raises ConfigError if the config is not valid; what only the launch finds out is
    raised by `Run.wait`.
    """
    refuse_while_importing("asyncrl.train")
    checked = make_config(config, overrides)
    path = checked.run_dir
    path.parent.mkdir(parents=True, exist_ok=True)
    if is_running(path):
        raise ConfigError(f"run = {path.name!r}: a run of this name is running; use another run=NAME, or stop it")
    file, output = (path.parent / f".{path.name}.{suffix}" for suffix in ("yaml", "out"))
    replace_file(file, checked.to_yaml(), mode=0o600)
    output.unlink(missing_ok=True)
    process = _start(["launch", "--config", str(file)], output)
    return Run(path, process, output)


def evaluate(
    config: Source = None, *, model: str | Path | None = None, timeout_s: float = 3600.0, **overrides: Any
) -> dict[str, Any]:
    """Evaluates a model on `data.eval`, as `asyncrl eval` does, and returns the results. With a model no config is
    needed: `evaluate(model=DIR, data={"eval": FILE})`. Raises ConfigError, RunError if it fails, and TimeoutError if it
    takes longer than `timeout_s`."""
    refuse_while_importing("asyncrl.evaluate")
    if config is None and model is not None:
        config = settings_of_model(str(model), dict(_dotted(overrides)))
    checked = make_config(config, overrides)
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as folder:
        file, out, output = (Path(folder) / name for name in ("config.yaml", "results.json", "output"))
        replace_file(file, checked.to_yaml(), mode=0o600)
        arguments = ["eval", "--config", str(file), "--out", str(out)]
        process = _start([*arguments, *(["--model", str(model)] if model is not None else [])], output)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise PeerTimeoutError(f"the evaluation has not ended within {timeout_s:g} s") from None
        if code != EXIT_DONE:
            line = (output.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            raise (ConfigError if code == EXIT_CONFIG else RunError)(line.removeprefix("error: "))
        return json.loads(out.read_text())


def make_config(source: Source, overrides: Mapping[str, Any]) -> Config:
    """Returns the config with the overrides. Raises ConfigError."""
    if isinstance(source, Config):
        source = source.model_dump(mode="json")
    if isinstance(source, Mapping):
        return load_config(None, dict([*_dotted(source), *_dotted(overrides)]))
    return load_config("demo" if source is None else source, dict(_dotted(overrides)))


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values by dotted key, with functions replaced by their names."""
    keys = set(config_keys())
    for name, value in values.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, Mapping) and dotted not in keys:
            yield from _dotted(value, f"{dotted}.")
        else:
            yield dotted, _named(dotted, value)


def _named(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _named(key, one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_named(key, one) for one in value]
    if isinstance(value, Path):
        return str(value)
    return name_of(key, value) if isinstance(value, Callable) else value


def _start(arguments: list[str], output: Path) -> subprocess.Popen[bytes]:
    """Starts the command in a new session, so that Ctrl-C in a notebook does not reach it. The file gets plain
    lines, also where the environment claims a terminal, as a notebook's kernel does."""
    with os.fdopen(os.open(output, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        return subprocess.Popen(
            [*PYTHON, "-m", "asyncrl.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name not in CLAIMS_A_TERMINAL},
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
        )
