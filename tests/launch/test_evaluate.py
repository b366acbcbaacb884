"""The inputs of `asyncrl eval`, and the endpoint of its reward model."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from asyncrl.cli.evaluate import reward_model, use_folder
from asyncrl.config.load import load_config, settings_of_model
from asyncrl.errors import ConfigError
from asyncrl.wire.endpoints import Endpoints
from tests.helpers.replay import small_config


def test_a_checkpoint_is_evaluated_by_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = Path("runs/one/checkpoints/step-000050")
    (checkpoint / "model").mkdir(parents=True)
    (checkpoint / "checkpoint.json").touch()
    config = small_config()
    for folder in (checkpoint, checkpoint / "model"):
        assert use_folder(config, str(folder)).model.path == str(checkpoint / "model")
    with pytest.raises(
        ConfigError, match=r"--model nowhere: no such folder; .* a checkpoint, such as its checkpoints/s"
    ):
        use_folder(config, "nowhere")


def test_a_name_of_the_hub_stays_for_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = use_folder(small_config(recipe="demo"), "owner/name")
    assert (config.model.path, config.recipe) == ("owner/name", None), "a recipe would keep it from being fetched"


def test_a_model_needs_no_config() -> None:
    config = load_config(None, settings_of_model("models/one", {"data.eval": ["a.parquet"], "seed": 3}))
    assert (config.model.path, config.data.eval_files, config.seed) == ("models/one", ["a.parquet"], 3)


@pytest.mark.timeout(240)
def test_reward_model_listens_on_this_machine_whatever_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Endpoints] = []
    up = threading.Event()

    def serve(_: object, *, endpoints: Endpoints, should_stop: threading.Event) -> None:
        served.append(endpoints)
        up.wait(30)

    monkeypatch.setattr("asyncrl.rewards.model_server.run_reward_model", serve)
    monkeypatch.setattr("asyncrl.cli.evaluate.await_reward_model", lambda *_, **__: None)
    config = small_config(launch__address="192.0.2.7:1")
    with reward_model(config, lambda: False) as endpoints:
        up.set()
    assert endpoints == served[0]
    assert endpoints.reward_model == f"ipc://{endpoints.folder}/reward-model"
