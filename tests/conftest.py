"""Settings for all tests: one thread in each process, only the loopback interface, and no telemetry."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM and DeepSpeed each take torch's process group for themselves, and would hang in one process."""
    areas = {item.path.parent.name for item in items}
    if {"generator", "learner"} <= areas:
        raise pytest.UsageError("run tests/generator in a process of its own, as `make test` does")
