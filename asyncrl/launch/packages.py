"""Versions of packages, which the hosts of a run compare."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of Python and of those of the packages that are installed, in this process."""
    found = {"python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
