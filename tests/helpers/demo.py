"""The demo's data and model in a separate folder."""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import shutil
from pathlib import Path

import pytest


def make_demo(folder: Path, cache: pytest.Cache) -> Path:
    """`folder` with `demo/` in it, as the project's own commands make it."""
    from asyncrl.data import demo as arithmetic

    arithmetic.make_demo_rows("demo", folder / "demo" / "arithmetic.parquet")
    _copy_model(folder / "demo" / "model", cache)
    return folder


def _copy_model(path: Path, cache: pytest.Cache) -> None:
    """Copies the demo's model from pytest's cache, where it is kept by the code that it was made with; of several
    processes one makes it."""
    from asyncrl.data import demo, tiny_model

    code = "".join(map(inspect.getsource, (tiny_model, demo)))
    kept = cache.mkdir("tiny-model") / hashlib.sha256(code.encode()).hexdigest()[:16]
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.is_dir():
            tiny_model.make_tiny_model(kept, demo="demo")
    shutil.copytree(kept, path)
