"""The ceiling for weights, seeds and options of engines."""

from __future__ import annotations

import importlib.util
from functools import partialmethod
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from generator_model import small_config
from helpers.replay import loopback_endpoints
from safetensors.torch import save_file
from structlog.testing import capture_logs

from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.generator import role
from asyncrl.generator.engine import check_installed, make_engine
from asyncrl.generator.role import engine_seed, max_weight_bytes
from asyncrl.generator.vllm_backend.engine import VllmEngine
from asyncrl.generator.vllm_backend.setup import check_cpu


def test_the_ceiling_is_above_float32_whatever_the_precision_on_disk(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1000, 300, dtype=torch.float8_e4m3fn)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(7), "c": torch.zeros(())}, tmp_path / "model-2.safetensors")
    assert 300_008 * 4 * 1.2 < max_weight_bytes(str(tmp_path)) < 3 * 300_008 * 4


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no weights in .*safetensors"):
        max_weight_bytes(str(tmp_path))


def test_no_engine_draws_what_another_drew() -> None:
    seeds = {engine_seed(seed, index, start) for seed in range(3) for index in range(4) for start in range(5)}
    assert len(seeds) == 60


def test_the_receiver_joins_before_the_engine_starts_and_receives_when_it_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Receiver:
        def __init__(self, *_: object, device: str, **__: object) -> None:
            calls.append(device)

        start = partialmethod(lambda self: calls.append("joins"))
        engine_is_up = partialmethod(lambda self, loader: calls.append("receives"))
        close = partialmethod(lambda self: calls.append("leaves"))

    class UpError(Exception):
        pass

    def engine(*_: object, **__: object) -> MagicMock:
        calls.append(logs[-1]["doing"])
        return MagicMock()

    monkeypatch.setattr("asyncrl.weights.receiver.WeightReceiver", Receiver)
    monkeypatch.setattr("asyncrl.rewards.pool.RewardPool", MagicMock())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(role, "max_weight_bytes", lambda path: 1)
    monkeypatch.setattr(role, "make_engine", engine)
    monkeypatch.setattr(role, "GeneratorClient", MagicMock(side_effect=UpError))
    with pytest.raises(UpError), capture_logs() as logs:
        role.run_generator(
            load_config("demo"), index=0, endpoints=loopback_endpoints(1), run_dir=tmp_path, should_stop=lambda: True
        )
    assert calls == ["cuda:0", "joins", "building its engine", "receives", "leaves"]
    assert logs[-1]["doing"] == "joining the run"


def test_an_engine_that_is_not_installed_is_refused_with_the_way_out(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_installed(small_config(model_path, generator__engine="transformers"))
    for refuses in (check_installed, lambda config: make_engine(config, seed=1)):
        with pytest.raises(ConfigError, match=r"vLLM is not installed; install it with `make setup`, or use .*transf"):
            refuses(small_config(model_path))


def test_bfloat16_is_refused_where_the_engine_would_die_of_an_illegal_instruction(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has to permit AMX tiles, where the processor has them; only bfloat16 uses them."""
    for tiles, permitted in ((False, False), (True, True), (True, False)):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda tiles=tiles: tiles)
        monkeypatch.setattr(torch.cpu, "_init_amx", lambda permitted=permitted: permitted)
        check_cpu(small_config(model_path))
        if not tiles or permitted:
            check_cpu(small_config(model_path, model__dtype="bfloat16"))
            continue
        with pytest.raises(ConfigError, match=r"model.dtype = 'bfloat16': .*AMX tiles.*use model.dtype=float32"):
            check_cpu(small_config(model_path, model__dtype="bfloat16"))
        with pytest.raises(ConfigError, match="AMX"):
            VllmEngine(small_config(model_path, model__dtype="bfloat16"), seed=1)
