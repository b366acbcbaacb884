"""Samples in trackers: texts and tables in the formats that the packages' own viewers read."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from asyncrl.config.config import Config
from asyncrl.data.tiny_model import make_tokenizer
from asyncrl.errors import ConfigError
from asyncrl.observe.samples import TRAINED, Samples, append_rows, choose, evaluated_file
from asyncrl.observe.trackers import find_tracker, make_trackers
from asyncrl.types import Lease, Prompt
from tests.helpers.replay import make_group, small_config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return small_config(model__path=str(tmp_path / "tokenizer"))


def chosen() -> Samples:
    lease = Lease(0, 0, Prompt(0, np.arange(3, dtype=np.int32), "1", "test"))
    return choose([make_group(lease, 2)], step=3)


def log_all(config: Config, tmp_path: Path, *names: str) -> None:
    """Logs a step with an evaluation and the samples of both."""
    config = config.model_copy(update={"observe": config.observe.model_copy(update={"trackers": list(names)})})
    append_rows(evaluated_file(tmp_path, 2), chosen())
    trackers = make_trackers(config, tmp_path)
    trackers.log(3, {"reward/mean": 0.5, "eval/version": 2.0})
    append_rows(tmp_path / "samples" / TRAINED, chosen())
    trackers.close()


def test_tensorboard_has_samples_as_texts(config: Config, tmp_path: Path) -> None:
    log_all(config, tmp_path, "tensorboard")
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert board.Tags()["tensors"] == ["samples/evaluated/text_summary", "samples/trained/text_summary"]
    (event,) = board.Tensors("samples/trained/text_summary")
    head, _, *rows = event.tensor_proto.string_val[0].decode().splitlines()
    assert event.step == 3 and head.startswith("| chosen | prompt | completion | reward |")
    assert [row.split(" | ")[0] for row in rows] == ["| best", "| worst"]


def test_wandb_has_samples_as_tables(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("exit", "excepthook"):  # wandb replaces them, for all tests after this one
        monkeypatch.setattr(sys, name, getattr(sys, name))
    log_all(config, tmp_path, "wandb")
    tables = sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/samples/*.table.json"))
    assert [table.name.split("_")[0] for table in tables] == ["evaluated", "trained"]
    table = json.loads(tables[1].read_text())
    assert table["columns"][:4] == ["chosen", "prompt", "completion", "reward"]
    assert [(row[0], row[3]) for row in table["data"]] == [("best", 1.0), ("worst", 0.0)]


@pytest.mark.slow
def test_mlflow_has_metrics_parameters_and_samples_of_one_run(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    log_all(config, tmp_path, "mlflow")
    (tmp_path / "metrics.jsonl").unlink()
    log_all(config, tmp_path, "mlflow")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("asyncrl").experiment_id])
    assert (run.info.status, run.data.metrics["reward/mean"], run.data.params["learner.lr"]) == (
        "FINISHED", 0.5, str(config.learner.lr),
    )  # fmt: skip
    names = [file.path for file in client.list_artifacts(run.info.run_id, "samples")]
    assert names == ["samples/evaluated-000003.md", "samples/trained-000003.md"]


@pytest.mark.slow
def test_swanlab_runs_offline(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab", reason="the extra swanlab is not installed")
    monkeypatch.delenv("SWANLAB_MODE", raising=False)
    log_all(config, tmp_path, "swanlab")
    (run,) = (tmp_path / "swanlab").glob("run-*")
    assert any(file.stat().st_size for file in run.rglob("*") if file.is_file())


@pytest.mark.parametrize("name", ["mlflow", "swanlab"])
def test_a_tracker_whose_package_is_missing_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec(name) is not None:
        monkeypatch.setattr("asyncrl.observe.trackers.find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"observe.trackers = '{name}': .*pip install 'asyncrl\[{name}\]'"):
        find_tracker(name)
