"""The demo's data and model in a folder of its own."""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import shutil
from pathlib import Path

import pytest


def make_demo(folder: Path, cache: pytest.Cache) -> Path:
    """`folder` with `demo/` in it, as the project's own commands make it. The model is kept in pytest's cache, by the
    code that it was made with; of several processes one makes it."""
    from asyncrl.data import arithmetic, tiny_model

    arithmetic.make_arithmetic(folder / "demo" / "arithmetic.parquet")
    code = inspect.getsource(tiny_model) + inspect.getsource(arithmetic)
    kept = cache.mkdir("tiny-model") / hashlib.sha256(code.encode()).hexdigest()[:16]
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.is_dir():
            tiny_model.make_tiny_model(kept)
    shutil.copytree(kept, folder / "demo" / "model")
    return folder
