"""What the engine is built with: tokens of a step, batches in flight, prefix caching."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from generator_model import small_config
from structlog.testing import capture_logs

from asyncrl.errors import ConfigError
from asyncrl.generator.vllm_backend import setup as vllm_setup
from asyncrl.generator.vllm_backend.engine import VllmEngine
from asyncrl.launch.memory import ENGINE_STEP_TOKENS

EngineMaker = Callable[..., VllmEngine]


def test_memory_is_counted_for_the_largest_default_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    def default(gib: int, name: str) -> int:
        platform = SimpleNamespace(
            get_device_total_memory=lambda: gib << 30,
            get_device_name=lambda: name,
            is_tpu=lambda: False,
            is_cpu=lambda: False,
        )
        monkeypatch.setattr(arg_utils, "current_platform", platform)
        return arg_utils.EngineArgs.get_batch_defaults(1)[0][UsageContext.LLM_CLASS]

    cards = [(24, "NVIDIA L4"), (80, "NVIDIA A100"), (80, "NVIDIA H100"), (141, "NVIDIA H200"), (180, "NVIDIA B200")]
    assert max(default(*card) for card in cards) == ENGINE_STEP_TOKENS


@pytest.mark.parametrize(
    ("parallel", "sizes", "rule"),
    [
        (2, {}, ""),
        (4, {"num_attention_heads": 8, "num_key_value_heads": 2}, ""),  # each part has a copy
        (4, {}, "must divide num_attention_heads = 2 in"),
        (4, {"num_attention_heads": 8, "num_key_value_heads": 6}, "divide or be a multiple of num_key_value_heads = 6"),
        (4, {"num_attention_heads": 8, "intermediate_size": 130}, "must divide intermediate_size = 130 in"),
    ],
)
def test_sizes_that_cannot_be_divided_are_named(
    model_path: str, tmp_path: Path, parallel: int, sizes: dict[str, int], rule: str
) -> None:
    settings = json.loads(Path(model_path, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | sizes))
    config = small_config(str(tmp_path), generator__tensor_parallel=parallel)
    with pytest.raises(ConfigError, match=f"generator.tensor_parallel = 4: .*{rule}") if rule else nullcontext():
        vllm_setup.check_tensor_parallel(config)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_logits_are_computed_in_float32(model_path: str, on_gpu: bool) -> None:
    assert "hf_overrides" not in vllm_setup._arguments(small_config(model_path), 1, on_gpu=on_gpu)
    bfloat16 = vllm_setup._arguments(small_config(model_path, model__dtype="bfloat16"), 1, on_gpu=on_gpu)
    assert bfloat16["hf_overrides"] == {"head_dtype": "float32"}


def test_variables_on_which_the_engine_depends_are_set_whatever_the_environment_has(
    model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 150)
    long.mkdir()
    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "300",
    }
    others = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_HOST_IP": "10.0.0.1",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "60",
    }
    for name, value in (others | {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_RPC_BASE_PATH": str(long)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with capture_logs() as logs:
        vllm_setup.set_environment(small_config(model_path, launch__start_timeout_s=300.0))
    assert {name: os.environ[name] for name in wanted} == wanted
    assert [line["name"] for line in logs if line.get("was") in others.values()] == list(wanted)
    assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO", "a preference is the user's"

    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.utils.system_utils import get_mp_context

    assert get_mp_context().get_start_method() == "spawn"
    MessageQueue(2, 2)  # binds a socket below VLLM_RPC_BASE_PATH
