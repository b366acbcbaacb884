"""A plug-in of pytest by which vLLM's second model runner, the one that all GPUs use, runs on a CPU.

    pytest -p tests.helpers.second_runner tests/generator

Triton's interpreter takes the place of its compiler, so that an engine step takes some 0.1 s. Of the tests those of
SELECTED are kept. It is imported before vLLM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

import triton.backends
from triton.runtime.driver import driver

SELECTED = ("test_engine_contract.py", "test_engine_routing.py", "test_engine_adapters.py")
"""Files of tests/generator."""
LEFT_OUT = ("transformers", "two_workers", "after_several_swaps", "texts_end_completions")
"""Parts of names of their tests: of another engine, with processes that lack this plug-in, or long."""
RUNNER = "vllm.v1.worker.gpu.model_runner"


class CpuDriver:
    """A driver of Triton for a device that compiles nothing."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cpu


class CpuBackend:
    """Registered with Triton as the backend of the driver."""

    driver = CpuDriver
    compiler = None


triton.backends.backends["cpu"] = CpuBackend  # type: ignore[assignment]
driver.set_active(CpuDriver())  # type: ignore[arg-type]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if item.path.name in SELECTED and not any(part in item.name for part in LEFT_OUT)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.fixture(autouse=True, scope="session")
def _second_runner() -> Iterator[None]:
    """Fails the tests unless the second runner has run. Its kernel for top-k and top-p cannot be interpreted; vLLM has
    the same in torch."""
    from vllm.v1.sample.ops import topk_topp_sampler as sampler

    sampler.apply_top_k_top_p_triton = sampler.apply_top_k_top_p_pytorch
    yield
    assert RUNNER in sys.modules, "vLLM has used its first model runner"
