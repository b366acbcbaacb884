"""Modules that the user wrote, imported by name or by file."""

from __future__ import annotations

import importlib
import importlib.util
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType

from asyncrl.errors import ConfigError
from asyncrl.util.redaction import describe

IMPORT_S = 120.0
"""Longest time that the import of a module may take."""


class _OutOfTimeError(BaseException):
    """No `Exception`: a module that swallows those while it is imported is interrupted, too."""


def import_module(name: str, *, key: str) -> ModuleType:
    """The module of this name on the Python path. Raises ConfigError, which begins with `key`, whatever it raises."""
    with _guarded(f"{key}: cannot import {name}"):
        return importlib.import_module(name)


def import_file(path: Path, *, key: str) -> ModuleType:
    """The module in a .py file, which may import its neighbors. Raises ConfigError as `import_module` does."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"asyncrl_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # always so for a .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with _guarded(f"{key}: cannot import {path}"):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _guarded(what: str) -> Iterator[None]:
    try:
        with _time_limit(IMPORT_S):
            yield
    except _OutOfTimeError:
        raise ConfigError(
            f"{what}: it is not done after {IMPORT_S:g} s; do what takes so long when the function is called first"
        ) from None
    except SystemExit as error:
        raise ConfigError(
            f"{what}: it ends the process (SystemExit: {error.code}); put what is for the command line under "
            "if __name__ == '__main__'"
        ) from error
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ConfigError(f"{what}: {describe(error)}") from error


@contextmanager
def _time_limit(timeout_s: float) -> Iterator[None]:
    """Raises _OutOfTimeError in it after so long. Only the main thread can be interrupted: others have no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise _OutOfTimeError

    former = signal.signal(signal.SIGALRM, interrupt)
    started_s = time.monotonic()
    left_s, every_s = signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        if left_s:  # somebody else's alarm
            signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - started_s), 1e-3), every_s)
