"""Runs agent programs in an interpreter that needs nothing of asyncrl: standard library only, Python 3.9 or later.

Started as `PYTHON subprocess_agent.py SPEC`, with SPEC as JSON: {"kind", "name", "options"}. Messages are JSON lines.

    this process -> host    {"ready": true} or {"error": TEXT}, once
    host -> this process    {"run": ID, "task": {...}, "base_url": URL, "api_key": KEY}
                            {"cancel": ID}
    this process -> host    {"run": ID, "result": REWARD} or {"run": ID, "error": TEXT}; {"run": ID} for "cancel"

With {"rows": LIMIT} in SPEC, which may be null, it prints {"row": {...}} for each row of the environment, then
{"done": true}, and ends. Otherwise it ends when its standard input does. What programs print goes to standard error.

A program is a function or class of the user, a command, or a taskset of the verifiers library (0.4 or later): an
episode is one rollout against the base URL of the episode, its reward is the score, its metrics are the parts.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

HERE = os.path.dirname(os.path.abspath(__file__))
MAX_ERROR_CHARACTERS = 2000
MAX_SHOWN_CHARACTERS = 400
"""Maximum length of a command's errors or reward in an error."""
MAX_OUTPUT_BYTES = 1 << 20
"""Maximum size of the end of a command's standard output, and of its errors, that is kept."""
END_S = 3.0
"""Deadline for a killed command to end."""
CANCEL_S = 60.0
"""Deadline for the call in a thread of a cancelled episode to return."""
MAX_STUCK = 8
"""Late calls in threads after which the process ends, and another one is started."""
GUARDED = """{ read -r _; kill -s KILL -- -$$; } <"/dev/fd/$1" >/dev/null 2>&1 &
exec /bin/sh -c "$0"
"""
"""Runs the command $0 in the shell's process group, which is killed when the pipe $1 has no writer any more."""
OLDEST = (3, 9)
MAX_THREADS = 1024
CLOSE_S = 10.0
"""Time for programs to release what they hold when the host has ended."""
VERIFIERS = "0.4.0"
"""The version of verifiers that is tested, and the oldest."""
STUCK = {}
"""Calls in threads that continue after their episode was cancelled, and when it was."""


class Refused(Exception):
    """A program that cannot be loaded, or an episode without a reward. The text is complete."""


class EpisodePlayer:
    """What plays episodes: `play(task, base_url, api_key)` returns the reward of one."""

    @contextlib.asynccontextmanager
    async def running(self):
        """Holds what its episodes share."""
        yield


class Agent(EpisodePlayer):
    """A function `run(task, *, base_url, api_key)`, or a class with such a method, of which an instance is made for
    each episode. It may be async; otherwise it runs in a thread. It may also take `model` and its options."""

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
        self._threads = ThreadPoolExecutor(MAX_THREADS)

    async def play(self, task, base_url, api_key):
        function, arguments = self._found, dict(self._options)
        if isinstance(function, type):
            function, arguments = function(**arguments).run, {}
        known = {"base_url": base_url, "api_key": api_key, "model": "policy", **arguments}
        known = accepted(function, known)
        if asyncio.iscoroutinefunction(function):
            return await function(task, **known)
        call = self._threads.submit(function, task, **known)
        try:
            result = await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            if call.running():
                STUCK[call] = time.monotonic()
                call.add_done_callback(STUCK.pop)
            raise
        return await result if inspect.isawaitable(result) else result


def accepted(function, known):
    """Returns the arguments that the function has parameters for."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(known)
    return {name: value for name, value in known.items() if name in parameters}


def module_of(path, name):
    """Returns the module of a file, executed."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # always so for a .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Command(EpisodePlayer):
    """A command, started for each episode, with the task as JSON at its standard input. Its reward is the last line of
    its output as JSON. It ends, with all processes of its group, when the episode ends or this process is killed."""

    def __init__(self, name, options):
        self._command, self._options = name, options
        self._alive, _ = os.pipe()  # only this process has its writing end

    async def play(self, task, base_url, api_key):
        variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_MODEL": "policy"}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", GUARDED, self._command, str(self._alive), stdin=pipe, stdout=pipe, stderr=pipe,
            env={**os.environ, **variables}, start_new_session=True, pass_fds=(self._alive,),
        )  # fmt: skip
        content = json.dumps({**task, "options": self._options}).encode()
        try:
            output, errors, *_ = await asyncio.gather(
                _tail(process.stdout), _tail(process.stderr), _feed(process.stdin, content), process.wait()
            )
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            ends = (process.wait(), _tail(process.stdout), _tail(process.stderr))  # at their ends its pipes are closed
            _, late = await asyncio.wait(map(asyncio.ensure_future, ends), timeout=END_S)
            for end in late:
                end.cancel()
        if process.returncode:
            text = errors.decode(errors="replace").strip()[-MAX_SHOWN_CHARACTERS:]
            raise Refused(f"exit code {process.returncode}: {text}")
        *_, last = ["null", *filter(str.strip, output.decode(errors="replace").splitlines())]
        try:
            return json.loads(last)
        except ValueError:
            raise Refused(f"the last line of its output is no reward: {last[:MAX_SHOWN_CHARACTERS]!r}") from None


async def _tail(stream):
    """Reads the stream to its end, and returns its last MAX_OUTPUT_BYTES."""
    tail = bytearray()
    while chunk := await stream.read(1 << 16):
        tail += chunk
        if len(tail) > 2 * MAX_OUTPUT_BYTES:
            del tail[:-MAX_OUTPUT_BYTES]
    return bytes(tail[-MAX_OUTPUT_BYTES:])


async def _feed(stream, content):
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended, or does not read its input
        stream.write(content)
        await stream.drain()
    stream.close()


def load_verifiers(name, options):
    """Returns the program of a verifiers taskset. Raises Refused with a text that names the missing part."""
    sys.path.insert(0, os.getcwd())
    install = f"install verifiers=={VERIFIERS} in this interpreter"
    try:
        verifiers = importlib.import_module("verifiers")
    except ModuleNotFoundError as error:
        if error.name != "verifiers":
            raise
        raise Refused(f"it has no package verifiers; {install}") from None
    if hasattr(verifiers, "load_environment"):
        raise Refused(f"its verifiers {verifiers.__version__} is too old, tasksets are needed; {install}")
    module = name.split("/")[-1].split("@")[0].replace("-", "_").lower()
    if importlib.util.find_spec(module) is None and not _is_builtin(module):
        raise Refused(
            f"there is no environment {name!r}: no module {module}. Install its package in this interpreter, or start "
            "in the folder that has it"
        )
    return Taskset(name, options)


def _is_builtin(module):
    return importlib.util.find_spec("verifiers.v1.tasksets." + module) is not None


def _row_of(task):
    row = task["extra_info"].get("verifiers")
    if not isinstance(row, str):
        raise Refused(
            "the row has no extra_info.verifiers, the row of the environment; make the data with asyncrl data verifiers"
        )
    return json.loads(row)


def _messages(prompt):
    """The messages of a prompt, with texts as contents."""
    if not isinstance(prompt, list):
        return [{"role": "user", "content": prompt or ""}]
    return [{**message, "content": _text(message.get("content"))} for message in prompt]


def _text(content):
    if not isinstance(content, list):
        return content or ""
    for part in content:
        if part.get("type") != "text":
            raise ValueError(f"a prompt has a part of type {part.get('type')!r}; the policy reads text only")
    return "".join(part["text"] for part in content)


def _scored(score, parts):
    """The reward with its parts; a part that is named as the score gets another name."""
    parts = {name: value for name, value in parts.items() if value is not None}
    return {**{f"{name}_metric" if name == "score" else name: value for name, value in parts.items()}, "score": score}


class Taskset(EpisodePlayer):
    """A taskset, with the harness that plays it."""

    def __init__(self, name, options):
        from verifiers import v1  # pyright: ignore[reportMissingImports]

        values = {**options, "taskset": {**options.get("taskset", {}), "id": name}}
        kind = v1.env_config_type(name, values.get("id", ""))
        config = v1.resolve_env_config(values)
        roles = [role for role, field in kind.model_fields.items() if isinstance(field.default, v1.AgentConfig)]
        trained = [role for role in roles if getattr(config, role).client is None]
        if len(trained) != 1:
            raise Refused(
                f"{len(trained)} of its agents have no endpoint of their own ({', '.join(trained)}), but one is "
                f"trained; give the others a model and a client, as {roles[-1]}.client.base_url"
            )
        harnesses = config.agent_harnesses()
        for role in roles:
            settings = _with_runtime(v1, role, values.get(role, {}), kind.model_fields[role].default, harnesses[role])
            if isinstance(settings, str):
                raise Refused(f"harness {harnesses[role].id!r} of {role} {settings}")
            values[role] = settings
        self._environment = v1.load_environment(v1.resolve_env_config(values))
        self._task = type(self._environment.taskset).task_type()
        self._keys = itertools.count()

    @contextlib.asynccontextmanager
    async def running(self):
        """Holds the tool servers that all tasks share."""
        async with self._environment.serving():
            # The server that episodes share would keep a client for the base URL of every episode.
            self._environment._interception = None
            yield

    def rows(self, limit):
        """Returns the rows of the taskset, at most `limit`."""
        taskset = self._environment.taskset
        if limit is None and not taskset.bounded:
            raise ValueError("it has endless rows; give a number of them")
        for task in taskset if limit is None else taskset.take(limit):
            data = task.data
            system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
            prompt = data.model_dump(mode="json")["prompt"]
            answer = getattr(data, "answer", None)
            yield {
                "prompt": [*system, *_messages(prompt)],
                "ground_truth": "" if answer is None else answer,
                "row": data.model_dump_json(),
            }

    async def play(self, task, base_url, api_key):
        from verifiers import v1  # pyright: ignore[reportMissingImports]

        environment = self._environment
        data = self._task.data_type().model_validate(_row_of(task))
        # The library reads keys from the environment only, once for each rollout.
        variable = f"ASYNCRL_API_KEY_{next(self._keys)}"
        os.environ[variable] = api_key
        try:
            client = v1.EvalClientConfig(base_url=base_url, api_key_var=variable)
            context = v1.ModelContext(model="policy", client=client, sampling=v1.SamplingConfig())
            (slot,) = environment.slots(self._task(data, environment.config.taskset.task))
            episode = await environment.run_slot(slot, context)
        finally:
            del os.environ[variable]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise Refused("; ".join(f"{error.type}: {error.message}" for error in errors) or "it is not ok")
        trained = [trace for trace in episode.traces if trace.agent.config.client.base_url == base_url]
        if len(trained) != 1 or not trained[0].agent.trainable:
            names = ", ".join(trace.agent.name for trace in trained)
            raise Refused(f"the policy played {len(trained)} rollouts ({names}) in an episode, which has one reward")
        parts = {name: None if reward is None else reward.score for name, reward in trained[0].rewards.items()}
        return _scored(trained[0].reward, {**trained[0].metrics, **parts})


def _with_runtime(v1, role, settings, declared, harness):
    """Returns the settings of an agent, which by default runs on this machine if it cannot do harm there; or a text
    that names the missing part."""
    module = v1.import_harness(harness.id)
    kinds = [getattr(module, name) for name in module.__all__]
    harnesses = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, v1.Harness)]
    where = settings.get("runtime", {}).get("type")
    if where is None and "runtime" not in declared.model_fields_set:
        if any(kind.EXECUTES_CODE or kind.NEEDS_CONTAINER for kind in harnesses):
            return (
                f"runs programs that the policy writes. Say where, as {role}.runtime.type=docker, or choose another "
                f"harness by {role}.harness.id"
            )
        where, settings = "subprocess", {**settings, "runtime": {"type": "subprocess"}}
    if where == "subprocess" and module.__name__.startswith("verifiers.") and shutil.which("uv") is None:
        return (
            f"needs uv, which is not installed; install uv in this interpreter, or choose another by {role}.harness.id"
        )
    return settings


LOADERS = {"agent": Agent, "command": Command, "verifiers": load_verifiers}


class AgentHost:
    """Plays the episodes that the host asks for."""

    def __init__(self, play, write):
        self._play, self._write = play, write
        self._tasks = {}

    def handle(self, message):
        """Starts or cancels an episode."""
        if "cancel" in message:
            self._write(json.dumps({"run": message["cancel"]}))
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
        try:
            result = await self._play(message["task"], message["base_url"], message["api_key"])
            answer = json.dumps({"run": number, "result": result}, default=float)
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # fails its episode, never the process
            answer = json.dumps({"run": number, "error": describe(error)})
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
        host = AgentHost(program.play, write)
        write(json.dumps({"ready": True}))
        threading.Thread(target=read, args=(host,), daemon=True).start()
        threading.Thread(target=watch, daemon=True).start()
        await ended.wait()
        await host.end()
    end_now()  # threads may still run


def watch():
    """Ends the process when many calls in threads do not return."""
    while True:
        time.sleep(CANCEL_S)
        before_s = time.monotonic() - CANCEL_S
        if sum(since_s < before_s for since_s in list(STUCK.values())) >= MAX_STUCK:
            end_now()


def end_now():
    """Ends the process with all of its group, whatever programs are doing."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


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
    """Loads the program, reports that, and serves."""
    spec = json.loads(sys.argv[1])
    lines, write = take_pipes()
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != HERE]  # programs import none of ours
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
    try:
        if tuple(sys.version_info) < OLDEST:
            raise Refused(f"it is Python {sys.version_info[0]}.{sys.version_info[1]}; 3.9 or later is needed")
        program = LOADERS[spec["kind"]](spec["name"], spec["options"])
        if "rows" in spec:
            for row in program.rows(spec["rows"]):
                write(json.dumps({"row": row}))
            write(json.dumps({"done": True}))
            end_now()
        else:
            asyncio.run(serve(program, lines, write))
    except (Exception, SystemExit) as error:
        write(json.dumps({"error": describe(error)}))


if __name__ == "__main__":
    main()
