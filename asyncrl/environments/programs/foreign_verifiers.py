"""Environments of the verifiers library, in the interpreter that has it: Python 3.9 or later, loaded by `foreign.py`.

There are two generations: modules with `load_environment(**options)` (tested with 0.3.1), and tasksets (with 0.4.0). An
episode is one rollout against the base URL of the episode: its reward is the score, its metrics are the parts.
"""

import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import shutil

CLASSIC, TASKSETS = "0.3.1", "0.4.0"
"""Versions of the two generations."""
POLICY_ERRORS = ("EmptyModelResponseError", "ToolParseError")
"""Errors of a rollout for what the policy said: the rubric scores it."""
TURNS_USED = "max_turns"
"""Code with which the gateway refuses another turn."""
TIMEOUT_S = 600.0
"""Time limit of a request. The client then repeats it, and waits for the same turn."""


class RolloutFailed(Exception):
    """A rollout with an error; `result` is the reward that it has nevertheless."""

    def __init__(self, text, result=None):
        super().__init__(text)
        self.result = result


def load(name, options, refused):
    """Returns the program of the environment. Raises `refused` with a text that says what is missing."""
    try:
        verifiers = importlib.import_module("verifiers")
    except ModuleNotFoundError as error:
        if error.name != "verifiers":
            raise
        raise refused(
            f"it has no package verifiers; install verifiers=={CLASSIC} in it for an environment with "
            f"load_environment, or verifiers=={TASKSETS} for a taskset"
        ) from None
    has_classic = hasattr(verifiers, "load_environment")
    module = name.split("/")[-1].split("@")[0].replace("-", "_")
    if not has_classic:
        module = module.lower()
    if importlib.util.find_spec(module) is None and (has_classic or not _is_builtin(module)):
        raise refused(
            f"there is no environment {name!r}: no module {module}. Install its package in this interpreter, or start "
            "in the folder that has it"
        )
    is_classic = _is_classic(module)
    if is_classic != has_classic:
        wanted, kind = (CLASSIC, "with load_environment") if is_classic else (TASKSETS, "of a taskset")
        raise refused(
            f"{name!r} is an environment {kind}, which verifiers {verifiers.__version__} does not load; name an "
            f"interpreter with verifiers=={wanted}"
        )
    try:
        return Classic(name, options) if is_classic else Tasks(name, options, refused)
    except Exception as error:
        if type(error).__name__ != "MissingKeyError" and "api_key" not in str(error).lower():
            raise
        text = str(error).split("\n")[0]
        raise refused(f"it asks for a key: {text}. Set the variable where asyncrl is started") from error


def _is_classic(module):
    """True if the module has `load_environment`, also if the library is too new for it to be imported."""
    spec = importlib.util.find_spec(module)
    if spec is None:
        return False
    try:
        return hasattr(importlib.import_module(module), "load_environment")
    except (ImportError, AttributeError):
        if spec.origin is not None and os.path.isfile(spec.origin):
            with open(spec.origin, encoding="utf-8") as file:
                if "load_environment" in file.read():
                    return True
        raise


def _is_builtin(module):
    return importlib.util.find_spec("verifiers.v1.tasksets." + module) is not None


def _row_of(task):
    row = task["extra_info"].get("verifiers")
    if not isinstance(row, str):
        raise RolloutFailed(
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


def _can_be_scored(error):
    """True if a rollout ended without an error, for what the policy said, or because it has had all its turns."""
    is_policys = error is None or type(error).__name__ in POLICY_ERRORS
    return is_policys or any(getattr(one, "code", None) == TURNS_USED for one in _causes(error))


def _causes(error):
    return [] if error is None else [error, *_causes(error.__cause__)]


def _scored(score, parts):
    """The reward with its parts; a part that is named as the score gets another name."""
    parts = {name: value for name, value in parts.items() if value is not None}
    return {**{f"{name}_metric" if name == "score" else name: value for name, value in parts.items()}, "score": score}


class Classic:
    """An environment of `load_environment`."""

    def __init__(self, name, options):
        import verifiers  # pyright: ignore[reportMissingImports]

        self._environment = verifiers.load_environment(name, **options)
        self._http = None

    @contextlib.asynccontextmanager
    async def running(self):
        """Holds the HTTP client of all episodes."""
        import httpx  # pyright: ignore[reportMissingImports]

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=TIMEOUT_S, trust_env=False) as self._http:
            try:
                yield
            finally:
                await self._environment._teardown()

    def rows(self, split, limit):
        """Returns the rows of a split."""
        environment = self._environment
        dataset = environment.get_dataset if split == "train" else environment.get_eval_dataset
        for row in dataset(n=limit or -1):
            answer = row.get("answer")
            yield {
                "prompt": _messages(row["prompt"]),
                "ground_truth": "" if answer is None else answer,
                "row": _json(row),
            }

    async def play(self, task, base_url, api_key, member):
        """Returns the reward of a rollout."""
        import openai  # pyright: ignore[reportMissingImports]
        from verifiers import EnvGroup  # pyright: ignore[reportMissingImports]
        from verifiers.clients import OpenAIChatCompletionsClient  # pyright: ignore[reportMissingImports]

        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=self._http)  # pyright: ignore[reportArgumentType]
        client = OpenAIChatCompletionsClient(client)
        environment, row = self._environment, _row_of(task)
        while isinstance(environment, EnvGroup):
            name, row, _ = environment._route_child_input(row)
            environment = environment.get_env_for_name(name)
        if environment.requires_group_rollouts:
            return await self._play_member(environment, row, client, member)
        output = await environment.run_rollout(row, client, "policy", {})
        result, error = _scored(output["reward"], output["metrics"] or {}), output["error"]
        if error is not None and error["error"] not in POLICY_ERRORS:
            raise RolloutFailed(error["error_chain_repr"], result)
        return result

    async def _play_member(self, environment, row, client, member):
        """Returns the reward of a rollout that is compared with the others of its group."""
        member.is_scored_together()
        state, rubric = await environment.rollout(row, client, "policy", {}), environment.rubric
        try:
            if not _can_be_scored(state["error"]):
                raise RolloutFailed(" -> ".join(map(repr, _causes(state["error"]))))
            await member.scored(state, rubric.score_group if environment.score_rollouts else rubric.dummy_score_group)
        finally:
            await rubric.cleanup(state)
        return _scored(state["reward"], state["metrics"] or {})


class Tasks:
    """A taskset, with the harness that plays it."""

    def __init__(self, name, options, refused):
        from verifiers import v1  # pyright: ignore[reportMissingImports]

        given = {**options, "taskset": {**options.get("taskset", {}), "id": name}}
        kind = v1.env_config_type(name, given.get("id", ""))
        config = v1.resolve_env_config(given)
        roles = [role for role, field in kind.model_fields.items() if isinstance(field.default, v1.AgentConfig)]
        own = [role for role in roles if getattr(config, role).client is None]
        if len(own) != 1:
            raise refused(
                f"{len(own)} of its agents have no endpoint of their own ({', '.join(own)}), but one is trained; give "
                f"the others a model and a client, as {roles[-1]}.client.base_url"
            )
        harnesses = config.agent_harnesses()
        for role in roles:
            settings = _with_runtime(v1, role, given.get(role, {}), kind.model_fields[role].default, harnesses[role])
            if isinstance(settings, str):
                raise refused(f"harness {harnesses[role].id!r} of {role} {settings}")
            given[role] = settings
        self._environment = v1.load_environment(v1.resolve_env_config(given))
        self._task = type(self._environment.taskset).task_type()
        self._keys = itertools.count()

    @contextlib.asynccontextmanager
    async def running(self):
        """Holds the tool servers that all tasks share."""
        async with self._environment.serving():
            # The server that episodes share would keep a client for the base URL of every episode.
            self._environment._interception = None
            yield

    def rows(self, split, limit):
        """Returns the rows of a split; a taskset has one only."""
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

    async def play(self, task, base_url, api_key, member):
        """Returns the reward of a rollout."""
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
            raise RolloutFailed("; ".join(f"{error.type}: {error.message}" for error in errors) or "it is not ok")
        own = [trace for trace in episode.traces if trace.agent.config.client.base_url == base_url]
        if len(own) != 1 or not own[0].agent.trainable:
            names = ", ".join(trace.agent.name for trace in own)
            raise RolloutFailed(f"the policy played {len(own)} rollouts ({names}) in an episode, which has one reward")
        parts = {name: None if one is None else one.score for name, one in own[0].rewards.items()}
        return _scored(own[0].reward, {**own[0].metrics, **parts})


def _with_runtime(v1, role, given, declared, harness):
    """Returns the settings of an agent, which by default runs on this machine if it cannot do harm there; or a text
    that says what is missing."""
    module = v1.import_harness(harness.id)
    kinds = [getattr(module, name) for name in module.__all__]
    found = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, v1.Harness)]
    where = given.get("runtime", {}).get("type")
    if where is None and "runtime" not in declared.model_fields_set:
        if any(kind.EXECUTES_CODE or kind.NEEDS_CONTAINER for kind in found):
            return (
                f"runs programs that the policy writes. Say where, as {role}.runtime.type=docker, or choose another "
                f"harness by {role}.harness.id"
            )
        where, given = "subprocess", {**given, "runtime": {"type": "subprocess"}}
    if where == "subprocess" and module.__name__.startswith("verifiers.") and shutil.which("uv") is None:
        return (
            f"needs uv, which is not installed; install uv in this interpreter, or choose another by {role}.harness.id"
        )
    return given


def _json(row):
    for name, value in row.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise ValueError(f"column {name!r}: {error}; it cannot be kept with the rows") from None
    return json.dumps(row)
