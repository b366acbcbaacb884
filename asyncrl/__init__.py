"""Asynchronous, off-policy, streaming RL training for language models.

`__all__` is the public interface. Its names change only with a note in CHANGELOG.md, and a name is deprecated for one
minor version before it is removed. `asyncrl.api` describes it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.api import Run, evaluate, train
    from asyncrl.config.config import Config
    from asyncrl.config.load import load_config
    from asyncrl.errors import AsyncrlError, ConfigError, DataError, RunError
    from asyncrl.observe.samples import Samples

__version__ = "0.1.0"

_HOMES = {
    "asyncrl.api": ("Run", "evaluate", "train"),
    "asyncrl.config.config": ("Config",),
    "asyncrl.config.load": ("load_config",),
    "asyncrl.errors": ("AsyncrlError", "ConfigError", "DataError", "RunError"),
    "asyncrl.observe.samples": ("Samples",),
}
"""The modules of the public names, imported when a name is used: every process of a run imports this package."""

__all__ = [
    "AsyncrlError",
    "Config",
    "ConfigError",
    "DataError",
    "Run",
    "RunError",
    "Samples",
    "evaluate",
    "load_config",
    "train",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")
