"""Runs agent programs in an interpreter that has nothing of asyncrl: standard library only, Python 3.9 or later.

Started as `PYTHON foreign.py SPEC`, with SPEC as JSON: {"kind", "name", "options"}. Messages are lines of JSON.

    this process -> host    {"ready": true} or {"error": TEXT}, once
    host -> this process    {"run": ID, "task": {...}, "base_url": URL, "api_key": KEY}
                            {"cancel": ID}
    this process -> host    {"run": ID, "result": REWARD} or {"run": ID, "error": TEXT}

It ends when its standard input does. What programs print goes to standard error.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

MAX_ERROR_CHARACTERS = 2000
MAX_THREADS = 1024


def load_agent(name, options):
    """Returns the coroutine function that plays an episode with the function `name`, as `file.py:run`."""
    where, _, attribute = name.rpartition(":")
    if where.endswith(".py"):
        folder = os.path.dirname(os.path.abspath(where))
        sys.path.insert(0, folder)
        spec = importlib.util.spec_from_file_location(os.path.splitext(os.path.basename(where))[0], where)
        if spec is None or spec.loader is None or not os.path.isfile(where):
            raise ImportError(f"there is no file {where}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        module = importlib.import_module(where)
    found = getattr(module, attribute)

    async def play(task, base_url, api_key):
        function, own = found, dict(options)
        if isinstance(function, type):
            function, own = function(**own).run, {}
        known = {"base_url": base_url, "api_key": api_key, "model": "policy", **own}
        parameters = inspect.signature(function).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            known = {key: value for key, value in known.items() if key in parameters}
        if asyncio.iscoroutinefunction(function):
            return await function(task, **known)
        result = await asyncio.get_running_loop().run_in_executor(None, lambda: function(task, **known))
        return await result if inspect.isawaitable(result) else result

    return play


LOADERS = {"agent": load_agent}


class Host:
    """Plays the episodes that the host asks for."""

    def __init__(self, play, write):
        self._play, self._write = play, write
        self._tasks = {}

    def handle(self, message):
        """Starts or cancels an episode."""
        if "cancel" in message:
            task = self._tasks.pop(message["cancel"], None)
            if task is not None:
                task.cancel()
            return
        self._tasks[message["run"]] = asyncio.ensure_future(self._run(message))

    async def _run(self, message):
        number = message["run"]
        try:
            result = await self._play(message["task"], message["base_url"], message["api_key"])
            answer = json.dumps({"run": number, "result": result}, default=float)
        except asyncio.CancelledError:
            raise
        except (Exception, SystemExit) as error:  # the user's code: fails its episode, never the process
            answer = json.dumps({"run": number, "error": describe(error)})
        self._tasks.pop(number, None)
        self._write(answer)


def describe(error):
    """Returns type and text of an exception."""
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]


async def serve(play, lines, write):
    """Serves until standard input ends."""
    host, loop = Host(play, write), asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(MAX_THREADS))

    def read():
        for line in lines:
            loop.call_soon_threadsafe(host.handle, json.loads(line))
        os._exit(0)  # whatever programs are doing

    threading.Thread(target=read, daemon=True).start()
    await asyncio.Event().wait()


def main():
    """Loads the program, says so, and serves."""
    spec = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lock = threading.Lock()

    def write(line):
        with lock:
            out.write(line + "\n")
            out.flush()

    try:
        play = LOADERS[spec["kind"]](spec["name"], spec["options"])
    except (Exception, SystemExit) as error:
        write(json.dumps({"error": describe(error)}))
        return
    write(json.dumps({"ready": True}))
    asyncio.run(serve(play, sys.stdin, write))


if __name__ == "__main__":
    main()
