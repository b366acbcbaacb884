"""Settings for all tests: one thread in each process, only the loopback interface, no telemetry, and the same
generated inputs in every run unless random ones are asked for."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_randomly
from hypothesis import HealthCheck, settings

from tests.helpers.browser import browser_fault
from tests.helpers.examples import FEW, MANY, RANDOM
from tests.helpers.skips import MAY_SKIP, pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401
from tests.helpers.slurm import slurm_fault
from tests.network.hosts import Network, hosts_fault

if TYPE_CHECKING:
    from asyncrl.launch.fork_server import ForkServer

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def seed_torch(seed: int) -> None:
    """Seeds torch before each test, where it is imported."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(seed % 2**63)  # unlike torch.manual_seed, it does not format the stack


pytest_randomly.entrypoint_reseeds = [seed_torch]
"""Instead of DeepSpeed's, for which every process of pytest would import DeepSpeed."""
RANDOM_TIMEOUT_S = 900
LEFT_OUT = pytest.StashKey[dict[str, int]]()
"""Number of tests that this machine cannot run, by marker."""


@pytest.fixture(scope="session")
def preloaded() -> Iterator[ForkServer]:
    """The process that commands of asyncrl are forked from: imports are done once in a session."""
    from tests.helpers.fork_servers import start_fork_server

    fork_server = start_fork_server("tests.helpers.preloaded")
    yield fork_server
    fork_server.close()


@pytest.fixture(scope="session")
def demo_folder(
    preloaded: ForkServer, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    """A folder with the demo's data and model, made while the other process imports."""
    from tests.helpers.demo import make_demo

    return make_demo(tmp_path_factory.mktemp("demo"), request.config.cache)


@pytest.fixture
def cleanup() -> Iterator[list[Callable[[], object]]]:
    """Functions to call at the end, the last one first."""
    actions: list[Callable[[], object]] = []
    yield actions
    for action in reversed(actions):
        action()


@pytest.fixture(autouse=True)
def module_search_path() -> Iterator[None]:
    """Restores it: the folders of users' files are appended, whose modules often have the same names."""
    before = list(sys.path)
    yield
    sys.path[:] = before


settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=FEW)
settings.register_profile(
    "random",
    deadline=None,
    max_examples=MANY,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("random" if RANDOM else "fixed")


def pytest_configure(config: pytest.Config) -> None:
    if not _asks_for_gpus(config):
        # Before anything imports DeepSpeed, or asks CUDA for its devices.
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    if RANDOM and config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = str(int.from_bytes(os.urandom(4)))


def pytest_report_header(config: pytest.Config) -> str:
    if not RANDOM:
        return "hypothesis: fixed inputs; random ones with ASYNCRL_HYPOTHESIS=all"
    return f"hypothesis: random inputs; the same again with --hypothesis-seed={config.option.hypothesis_seed}"


def _asks_for_gpus(config: pytest.Config) -> bool:
    """True if the tests were selected by `-m gpu`; all others run on the CPU, also on a machine with GPUs."""
    return config.option.markexpr.strip() == "gpu"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuses to mix vLLM and DeepSpeed, which each take torch's process group for themselves and would hang in one
    process; leaves out tests for a GPU unless they are asked for, and those that this machine cannot run; allows more
    time for tests with many random inputs."""
    if not _asks_for_gpus(config):
        _leave_out(config, items, "gpu")
    if any(item.get_closest_marker("bfloat16") for item in items) and _bfloat16_fault():
        _leave_out(config, items, "bfloat16")
    if slurm_fault():
        _leave_out(config, items, "slurm")
    if MAY_SKIP and browser_fault():
        _leave_out(config, items, "browser")
    areas = {item.path.parent.name for item in items}
    if {"generator", "learner"} <= areas:
        raise pytest.UsageError("run tests/generator in a process of its own, as `make test` does")
    if astray := [item.nodeid for item in items if item.get_closest_marker("system") and not _is_system(item)]:
        raise pytest.UsageError(f"`make test` looks for system tests in tests/system and tests/chaos only: {astray}")
    if RANDOM:
        for item in items:
            if item.get_closest_marker("hypothesis"):
                item.add_marker(pytest.mark.timeout(RANDOM_TIMEOUT_S))


def pytest_collection_finish() -> None:
    """Keeps imported objects out of later garbage collections; DeepSpeed collects several times for each model."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Names the tests that are left out here and run on other machines."""
    left_out = config.stash.get(LEFT_OUT, {})
    lines = {
        "bfloat16": ("engines in bfloat16", _bfloat16_fault),
        "browser": ("the board in a browser", browser_fault),
        "slurm": ("a SLURM cluster", slurm_fault),
    }
    return [
        f"{left_out[marker]} tests of {what} are left out: {fault()}"
        for marker, (what, fault) in lines.items()
        if left_out.get(marker)
    ]


def _is_system(item: pytest.Item) -> bool:
    return item.path.parent.name in ("system", "chaos")


def _leave_out(config: pytest.Config, items: list[pytest.Item], marker: str) -> None:
    left_out = [item for item in items if item.get_closest_marker(marker)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
    config.stash.setdefault(LEFT_OUT, {})[marker] = len(left_out)


def _bfloat16_fault() -> str:
    from asyncrl.generator.vllm_backend.setup import bfloat16_fault

    return bfloat16_fault()


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """A network without hosts."""
    if fault := hosts_fault():
        pytest.skip(f"no network namespaces here: {fault}")
    network = Network(tmp_path)
    yield network
    network.close()
