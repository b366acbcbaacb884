"""The program of a sandbox's process: `python -P -s -S inside.py TASK_FD READY_FD RESULT_FD`, standard library only.

Reads its task (JSON), confines itself, writes "ready" or the reason of failure to a pipe, closes it, and only then
runs the untrusted code. Every case of the task adds a line to the result file, {"nonce", "case", "value"} or
{"nonce", "case", "error"}. The values are compared in another process, which the code cannot reach.
"""

import ctypes
import json
import os
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1


READY = b"ready"


def main(task_file: int, ready_file: int, result_file: int) -> None:
    """Runs the task; the arguments are file descriptors."""
    with os.fdopen(task_file) as file:
        task = json.load(file)
    try:
        _confine(task)
    except Exception as error:  # whatever it is, the code must not run
        os.write(ready_file, f"{error or type(error).__name__}".encode())
        os._exit(3)
    os.write(ready_file, READY)
    os.close(ready_file)
    if task["cases"] is None:
        os.close(result_file)
        _run(task["source"], "__main__")
    else:
        _run_cases(task["source"], task["cases"], task["nonce"], result_file)


def plain(value: Any) -> Any:
    """A value in JSON types. Two values have equal plain forms exactly if Python's `==` holds for them.

    Values of unsupported types have a form that equals no expected value.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, complex | bytes):
        return {"repr": repr(value)}
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [plain(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {"set": sorted((plain(item) for item in value), key=_order)}
    if isinstance(value, dict):
        return {"dict": sorted(([plain(key), plain(item)] for key, item in value.items()), key=_order)}
    return {"other": type(value).__name__}


def _order(item: Any) -> str:
    return json.dumps(item, sort_keys=True)


def _confine(task: dict[str, Any]) -> None:
    # Last in the path, so that no file of this folder shadows a module of the standard library.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.append(here)
    from confine import confine  # pyright: ignore[reportMissingImports]

    sys.path.remove(here)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != task["parent"]:
        os._exit(1)
    confine(task["folder"], **task["limits"])


def _run(source: str, name: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": name, "__builtins__": __builtins__}
    exec(compile(source, "program.py", "exec"), space)
    return space


def _run_cases(source: str, cases: list[dict[str, Any]], nonce: str, result_file: int) -> None:
    space = _run(source, "program")
    for number, case in enumerate(cases):
        answer: dict[str, Any] = {"nonce": nonce, "case": number}
        try:
            answer["value"] = plain(_value(case, space))
        except BaseException as error:  # SystemExit of the code fails a case like any other error
            answer["error"] = type(error).__name__
        os.write(result_file, json.dumps(answer).encode() + b"\n")
    # Skips threads, exit handlers and finalizers of the code.
    os._exit(0)


def _value(case: dict[str, Any], space: dict[str, Any]) -> Any:
    if "call" in case:
        owner = space["Solution"]() if "Solution" in space and case["call"] not in space else None
        function = space[case["call"]] if owner is None else getattr(owner, case["call"])
        return function(*case["arguments"])
    if "evaluate" in case:
        return eval(case["evaluate"], space)
    exec(case["execute"], space)
    return True


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
