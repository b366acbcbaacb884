"""Runs agent programs in an interpreter that has nothing of asyncrl: standard library only, Python 3.9 or later.

Started as `PYTHON foreign.py SPEC`, with SPEC as JSON: {"kind", "name", "options"}. Messages are lines of JSON.

    this process -> host    {"ready": true} or {"error": TEXT}, once
    host -> this process    {"run": ID, "task": {...}, "base_url": URL, "api_key": KEY,
                             "place": {"group": NAME, "member": NUMBER, "size": NUMBER} or null}
                            {"cancel": ID}
    this process -> host    {"run": ID, "group": "together"} before, and {"run": ID, "group": "waits"} when it waits to
                            be scored with the other members of its group
                            {"run": ID, "result": REWARD} or {"run": ID, "error": TEXT, "result": REWARD or null}

With {"rows": {"split", "limit"}} in SPEC it prints {"row": {...}} for each row of the environment, {"rows": NUMBER} at
last, and ends. Otherwise it ends when its standard input does. What programs print goes to standard error.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

HERE = os.path.dirname(os.path.abspath(__file__))
MAX_ERROR_CHARACTERS = 2000
MAX_THREADS = 1024
CLOSE_S = 10.0
"""Time for programs to release what they hold when the host has ended."""


class Refused(Exception):
    """A program that cannot be loaded. The text says why, and the way out."""


class Agent:
    """A function that plays an episode, as `file.py:run`."""

    def __init__(self, name, options):
        where, _, attribute = name.rpartition(":")
        if where.endswith(".py"):
            if not os.path.isfile(where):
                raise Refused(f"there is no file {where}")
            sys.path.insert(0, os.path.dirname(os.path.abspath(where)))
            module = module_of(where, os.path.splitext(os.path.basename(where))[0])
        else:
            sys.path.insert(0, os.getcwd())
            module = importlib.import_module(where)
        self._found, self._options = getattr(module, attribute), options

    @contextlib.asynccontextmanager
    async def running(self):
        """Holds what its episodes share."""
        yield

    async def play(self, task, base_url, api_key, member):
        """Returns the reward of an episode."""
        function, own = self._found, dict(self._options)
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


def module_of(path, name):
    """Returns the module of a file, executed."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # always so for a .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_verifiers(name, options):
    """Returns the program of a verifiers environment."""
    sys.path.insert(0, os.getcwd())
    return module_of(os.path.join(HERE, "foreign_verifiers.py"), "asyncrl_foreign_verifiers").load(
        name, options, Refused
    )


LOADERS = {"agent": Agent, "verifiers": load_verifiers}


class Group:
    """The members of a group that have been played. They wait until the last one scores all of them together, in its
    own time."""

    def __init__(self, size):
        self._size, self._is_scoring = size, False
        self._states, self._scored = {}, {}

    def __len__(self):
        return len(self._states)

    async def scored(self, member, state, score, waits):
        """Returns when `score` has been called with the states of all members, in their order. Calls `waits` before it
        waits for the others."""
        self._states[member], self._scored[member] = state, asyncio.get_running_loop().create_future()
        own = self._scored[member]
        try:
            while not own.done():
                if len(self) == self._size and not self._is_scoring:
                    await self._score(score)
                else:
                    waits()
                    await own
        finally:
            del self._states[member], self._scored[member]

    async def _score(self, score):
        scored, self._is_scoring = dict(self._scored), True
        try:
            await score([state for _, state in sorted(self._states.items(), key=lambda item: item[0])])
        finally:
            self._is_scoring = False
        if scored == self._scored and not any(one.cancelled() for one in scored.values()):  # nobody has left meanwhile
            for one in scored.values():
                one.set_result(None)


class Member:
    """An episode as a member of its group, for programs that score the members of a group together."""

    def __init__(self, place, groups, say):
        self._place = place or {"group": object(), "member": 0, "size": 1}
        self._groups, self._say = groups, say

    def is_scored_together(self):
        """Says that without this episode the others of its group have no reward."""
        self._say("together")

    async def scored(self, state, score):
        """Returns when `score` has been called with the states of all members of the group."""
        name = self._place["group"]
        group = self._groups.setdefault(name, Group(self._place["size"]))
        try:
            await group.scored(self._place["member"], state, score, lambda: self._say("waits"))
        finally:
            if not group:
                self._groups.pop(name, None)


class Host:
    """Plays the episodes that the host asks for."""

    def __init__(self, play, write):
        self._play, self._write = play, write
        self._tasks, self._groups = {}, {}

    def handle(self, message):
        """Starts or cancels an episode."""
        if "cancel" in message:
            task = self._tasks.pop(message["cancel"], None)
            if task is not None:
                task.cancel()
            return
        self._tasks[message["run"]] = asyncio.ensure_future(self._run(message))

    async def end(self):
        """Cancels all episodes, and waits for them."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, message):
        number = message["run"]
        member = Member(
            message["place"], self._groups, lambda what: self._write(json.dumps({"run": number, "group": what}))
        )
        try:
            result = await self._play(message["task"], message["base_url"], message["api_key"], member)
            answer = json.dumps({"run": number, "result": result}, default=float)
        except asyncio.CancelledError:
            raise
        except (Exception, SystemExit) as error:  # the user's code: fails its episode, never the process
            answer = json.dumps({"run": number, "error": describe(error), "result": getattr(error, "result", None)})
        self._tasks.pop(number, None)
        self._write(answer)


def describe(error):
    """Returns type and text of an exception."""
    text = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
    return text[:MAX_ERROR_CHARACTERS]


async def serve(program, lines, write):
    """Serves until standard input ends; then the process does."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.set_default_executor(ThreadPoolExecutor(MAX_THREADS))

    def read(host):
        for line in lines:
            loop.call_soon_threadsafe(host.handle, json.loads(line))
        loop.call_soon_threadsafe(ended.set)
        threading.Event().wait(CLOSE_S)
        end_now()

    async with program.running():
        host = Host(program.play, write)
        write(json.dumps({"ready": True}))
        threading.Thread(target=read, args=(host,), daemon=True).start()
        await ended.wait()
        await host.end()
    end_now()  # threads may still run


def end_now():
    """Ends the process with all of its group, whatever programs are doing."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def print_rows(program, wish, write):
    """Prints the rows of an environment."""
    number = 0
    for row in program.rows(wish["split"], wish["limit"]):
        write(json.dumps({"row": row}))
        number += 1
    write(json.dumps({"rows": number}))


def take_pipes():
    """Returns the lines of standard input, and a function that writes one to standard output. Programs, and what they
    start, get neither."""
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    lock = threading.Lock()

    def write(line):
        with lock:
            out.write(line + "\n")
            out.flush()

    return lines, write


def main():
    """Loads the program, says so, and serves."""
    spec = json.loads(sys.argv[1])
    lines, write = take_pipes()
    sys.path[:] = [
        path for path in sys.path if os.path.abspath(path or ".") != HERE
    ]  # modules of programs are no user's
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
    try:
        program = LOADERS[spec["kind"]](spec["name"], spec["options"])
        if "rows" in spec:
            print_rows(program, spec["rows"], write)
            end_now()
        else:
            asyncio.run(serve(program, lines, write))
    except (Exception, SystemExit) as error:
        write(json.dumps({"error": describe(error)}))


if __name__ == "__main__":
    main()
