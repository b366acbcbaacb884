"""Finds the part that a config names: a built-in one from a table, or the user's own from a module or a file."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.util.text import describe, did_you_mean

IMPORT_S = 120.0
"""Longest time that the import of a module may take."""


_file_lock = threading.RLock()
"""Held while a file is executed, so that another thread does not get its module half executed."""


_importing: list[str] = []
"""The files and modules of the user that are being imported."""


class _OutOfTimeError(BaseException):
    """Not an `Exception`, so that a module which catches those while it is imported is also interrupted."""


def resolve(key: str, name: str, table: Mapping[str, Any]) -> Any:
    """Returns the part that the config names: an entry of the table, or the user's own.

    An entry is an object, or text `module:function` that is imported here. The user's own is `module:function` or
    `file.py:function`; modules are looked up on the Python path and in the working directory, and a file may import its
    neighbors. Both are executed once in a process, so that the functions of a file share its state. Raises ConfigError,
    which begins with the config key, if the part is unknown or its import fails.
    """
    entry = table.get(name, name)
    if not isinstance(entry, str):
        return entry
    what = f"{key} = {name!r}"
    where, colon, attribute = entry.rpartition(":")
    if not colon:
        raise ConfigError(
            f"{what}: not one of {', '.join(table)}{did_you_mean(name, table)}; "
            "one of your own is module:function or file.py:function"
        )
    module = _import_file(Path(where), what) if where.endswith(".py") else _import_module(where, what)
    try:
        return getattr(module, attribute)
    except AttributeError:
        names = [known for known in vars(module) if not known.startswith("_")]
        raise ConfigError(f"{what}: {where} has no {attribute!r}{did_you_mean(attribute, names)}") from None


def resolve_function(key: str, name: str, table: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns the function or class that the config names. Raises ConfigError as `resolve` does, and for other objects
    and functions whose parameters cannot be read."""
    found = resolve(key, name, table)
    if not callable(found):
        raise ConfigError(f"{key} = {name!r}: is a {type(found).__name__}, not a function")
    try:
        inspect.signature(found)
    except (ValueError, TypeError):
        raise ConfigError(
            f"{key} = {name!r}: its parameters cannot be read, as it is not written in Python; wrap it in a function"
        ) from None
    return found


def name_of(key: str, function: Callable[..., Any]) -> str:
    """Returns the name by which `resolve` finds a function in another process. Raises ConfigError, which begins with
    the config key, for a function that cannot be imported there."""
    name, module = getattr(function, "__qualname__", repr(function)), getattr(function, "__module__", None)
    file = getattr(sys.modules.get("__main__"), "__file__", None) if module == "__main__" else None
    if "." in name or "<" in name or module is None or (module == "__main__" and file is None):
        raise ConfigError(
            f"{key} = {name}: other processes cannot import it; define it at the top level of a file (in a notebook: "
            "%%writefile my_reward.py) and give it by name, as in my_reward.py:score"
        )
    return f"{Path(file).resolve() if file else module}:{name}"


def refuse_while_importing(what: str) -> None:
    """Raises ConfigError while `resolve` imports a file or module of the user, since every process of a run imports it
    and would do the same."""
    if _importing:
        raise ConfigError(
            f"{what} was called while {_importing[-1]} is imported for its functions; put the call under "
            "if __name__ == '__main__'"
        )


def _import_module(name: str, what: str) -> ModuleType:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    with _guarded(f"{what}: cannot import {name}", name):
        return importlib.import_module(name)


def _import_file(path: Path, what: str) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        neighbors = [file.name for file in path.parent.glob("*.py")]
        raise ConfigError(f"{what}: no file {path}{did_you_mean(path.name, neighbors)}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # Files in different folders may have the same name.
    name = f"asyncrl_user_{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"
    with _guarded(f"{what}: cannot import {path}", str(path)), _file_lock:
        if name not in sys.modules:
            _execute_file(name, path)
        return sys.modules[name]


def _execute_file(name: str, path: Path) -> None:
    """Executes the file as the module of this name. If that fails, the module is removed."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # always so for a .py file
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise


@contextmanager
def _guarded(what: str, where: str) -> Iterator[None]:
    _importing.append(where)
    try:
        with _time_limit(IMPORT_S):
            yield
    except _OutOfTimeError:
        raise ConfigError(
            f"{what}: it is not done after {IMPORT_S:g} s; do what takes long in the first call of the function"
        ) from None
    except SystemExit as error:
        raise ConfigError(
            f"{what}: it ends the process (SystemExit: {error.code}); put what is for the command line under "
            "if __name__ == '__main__'"
        ) from error
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ConfigError(f"{what}: {describe(error)}") from error
    finally:
        _importing.pop()


@contextmanager
def _time_limit(timeout_s: float) -> Iterator[None]:
    """Raises _OutOfTimeError in the block at the time limit. Other threads than the main one cannot be interrupted and
    have no limit."""
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
        if left_s:  # an alarm that was set before
            signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - started_s), 1e-3), every_s)
