"""The NVIDIA GPUs that this process may use: their names in CUDA_VISIBLE_DEVICES, and their memory."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from dataclasses import dataclass

import structlog

from asyncrl.errors import ConfigError

log = structlog.get_logger()

QUERY_TIMEOUT_S = 30
LEAST_DRIVERS = {"12": 525, "13": 580}
"""Oldest supported major version of the driver, by major version of the CUDA runtime."""


MIG = "MIG-"
"""Begins the name of a MIG instance."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that is visible to this process in CUDA."""

    name: str
    """An entry of CUDA_VISIBLE_DEVICES: a number, a UUID, or the name of a MIG instance."""
    memory_bytes: int | None = None
    """None if nvidia-smi does not report it."""


@dataclass(frozen=True, slots=True)
class _Listed:
    """A line in the output of nvidia-smi."""

    index: str
    uuid: str
    memory_bytes: int
    driver: str


def visible_gpus() -> list[Gpu]:
    """Returns the GPUs visible to this process in CUDA, in the order of CUDA_VISIBLE_DEVICES; none if torch is a CPU
    build.

    As in CUDA, the first entry that is not a GPU ends the list. Raises ConfigError if an entry occurs twice, if
    nvidia-smi does not answer, and if the driver is too old for the installed CUDA runtime.
    """
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is not None and not variable.strip():
        return []
    listed = _listed_gpus()
    if variable is None:
        gpus = [Gpu(line.index, line.memory_bytes) for line in listed or []]
    else:
        gpus = _named(variable, listed)
    if gpus and torch_is_cpu_build():
        log.warning("torch is built for CPUs: GPUs are not used", gpus=[gpu.name for gpu in gpus])
        return []
    if gpus and listed:
        _check_driver(listed[0].driver)
    return gpus


def torch_is_cpu_build() -> bool:
    """True if the installed torch cannot use a GPU; does not import it."""
    return importlib.metadata.version("torch").endswith("+cpu")


def _named(variable: str, listed: list[_Listed] | None) -> list[Gpu]:
    gpus: list[Gpu] = []
    for name in (part.strip() for part in variable.split(",")):
        if not (name.isdecimal() or name.startswith(("GPU-", MIG))):
            break
        if any(gpu.name == name for gpu in gpus):
            raise ConfigError(f"CUDA_VISIBLE_DEVICES={variable}: names {name} twice, so CUDA shows no GPU at all")
        if listed is None or name.startswith(MIG):
            gpus.append(Gpu(name))
            continue
        found = [line for line in listed if (line.index == name or line.uuid.startswith(name))]
        if not found:
            break
        gpus.append(Gpu(name, _memory_bytes(name, found[0], listed)))
    return gpus


def _memory_bytes(name: str, found: _Listed, listed: list[_Listed]) -> int:
    """Returns the GPU's memory, or the smallest of all if its number is ambiguous: by default CUDA numbers the fastest
    GPU first, while nvidia-smi numbers by PCI bus."""
    if name.isdecimal() and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return min(line.memory_bytes for line in listed)
    return found.memory_bytes


def _listed_gpus() -> list[_Listed] | None:
    """Returns all GPUs of the machine; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"nvidia-smi did not answer within {QUERY_TIMEOUT_S} s: a GPU or its driver hangs; CUDA_VISIBLE_DEVICES= "
            "runs on the CPU"
        ) from None
    if done.returncode:
        log.warning("nvidia-smi failed: no GPU is used", output=(done.stdout + done.stderr).strip())
        return []
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [_Listed(index, uuid, int(mib) << 20, driver) for index, uuid, mib, driver in rows]


def _check_driver(driver: str) -> None:
    """Raises ConfigError if the driver cannot run the CUDA runtime that was installed with torch."""
    for package in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        try:
            runtime = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        least = LEAST_DRIVERS.get(runtime.partition(".")[0])
        if least is not None and int(driver.partition(".")[0]) < least:
            raise ConfigError(
                f"the NVIDIA driver is {driver}, but CUDA {runtime}, which is installed with torch, needs {least} or "
                "newer; update the driver, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
            )
        return
