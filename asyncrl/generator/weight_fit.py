"""Checks that weights of a new version are those of the model."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.errors import RunError

Shapes = Mapping[str, tuple[int, ...]]
SHOWN = 5
"""Faults that an error names."""


def check_fit(version: int, given: Shapes, known: Shapes, path: str) -> None:
    """Raises RunError unless the names and shapes that are given are those of the model at `path`."""
    if given == known:
        return
    faults = [f"{name} is missing" for name in known.keys() - given.keys()]
    faults += [f"{name} is unknown" for name in given.keys() - known.keys()]
    faults += [
        f"{name} has shape {given[name]}, the model {shape}"
        for name, shape in known.items()
        if name in given and given[name] != shape
    ]
    shown = "; ".join(sorted(faults)[:SHOWN]) + ("; ..." if len(faults) > SHOWN else "")
    raise RunError(f"weights of version {version} do not fit model.path = {path}: {shown}")
