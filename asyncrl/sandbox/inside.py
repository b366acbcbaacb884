"""The program of a sandbox's interpreter: `python -P -s -S -B inside.py CONTROL_FD PARENT_PID`, standard library only.

It receives the descriptors of one task after the other on a unix socket. For each it forks a process, which reads the
task (JSON), confines itself, writes "ready" or the reason of failure to a pipe, closes it, and only then runs the
untrusted code. The interpreter itself runs none: it answers with the process and a descriptor of it (pidfd), then with
the exit code. Every case of a task adds a line to the result file: the nonce, the number of the case, and
{"value": ...} or {"error": ...}. Values are compared in another process, which the code cannot reach.
"""

import ctypes
import functools
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

PR_SET_PDEATHSIG = 1
DESCRIPTORS = 5
"""Names of a task's file descriptors: the task, standard input, output, the pipe for "ready", the result file."""

READY = b"ready"


def main(control_fd: int, parent: int) -> None:
    """Serves tasks until the other side closes the socket."""
    _end_with(parent)
    confine = _confinement()
    gc.freeze()  # existing objects are not collected, so that programs end faster
    control = socket.socket(fileno=control_fd)
    own = os.getpid()
    while True:
        _, descriptors, *_ = socket.recv_fds(control, 1, DESCRIPTORS)
        if not descriptors:
            return
        child = os.fork()
        if not child:
            control.close()
            _run_task(confine, own, *descriptors)
            return  # and ends as any program does: waits for its threads, flushes its output
        for descriptor in descriptors:
            os.close(descriptor)
        handle = os.pidfd_open(child)
        socket.send_fds(control, [str(child).encode()], [handle])
        os.close(handle)
        control.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())


def _confinement() -> Callable[..., None]:
    """A function that confines the calling process to a folder, within limits; steps that all tasks share are done."""
    # The path has no folder of ours, so that no file in it shadows a module of the standard library.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.append(here)
    import confine  # pyright: ignore[reportMissingImports]

    sys.path.remove(here)
    try:
        return functools.partial(confine.confine, confine.readable_files())
    except confine.Unconfined as error:
        return functools.partial(_refuse, error)


def _refuse(error: Exception, *_: Any, **__: Any) -> None:
    raise error


def _run_task(
    confine: Callable[..., None],
    parent: int,
    task_file: int,
    given: int,
    output: int,
    ready_file: int,
    result_file: int,
) -> None:
    with os.fdopen(task_file) as file:
        task = json.load(file)
    try:
        _end_with(parent)
        os.dup2(given, 0)
        os.dup2(output, 1)
        os.close(given)
        os.close(output)
        os.chdir(task["folder"])
        os.environ |= {"HOME": task["folder"], "TMPDIR": task["folder"]}
        confine(task["folder"], **task["limits"])
    except BaseException as error:  # whatever it is, the code must not run
        os.write(ready_file, f"{error or type(error).__name__}".encode())
        os._exit(3)
    os.write(ready_file, READY)
    os.close(ready_file)
    if task["cases"] is None:
        os.close(result_file)
        _run(task["source"], "__main__")
    else:
        _run_cases(task["source"], task["cases"], task["nonce"], result_file)


def _end_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


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


def _run(source: str, name: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": name, "__builtins__": __builtins__}
    exec(compile(source, "program.py", "exec"), space)
    return space


def _run_cases(source: str, cases: list[dict[str, Any]], nonce: str, result_file: int) -> None:
    space = _run(source, "program")
    for number, case in enumerate(cases):
        try:
            answer = json.dumps({"value": plain(_value(case, space))})
        except BaseException as error:  # SystemExit of the code fails a case like any other error
            answer = json.dumps({"error": type(error).__name__})
        os.write(result_file, f"{nonce} {number} {answer}\n".encode())
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
