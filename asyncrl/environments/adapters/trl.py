"""Environments of TRL: classes with `reset(**row)`, tools as public methods and, mostly, `get_reward()`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from asyncrl.config.sections import Options
from asyncrl.environments.adapters.answers import own_function
from asyncrl.environments.environment import Action, Message, Step, Task, Tool, ToolEnvironment, make_tools
from asyncrl.environments.programs.subprocess_agent import accepted
from asyncrl.environments.table import Named, checked
from asyncrl.errors import ConfigError
from asyncrl.util.user_code import resolve_function

CONTROL = ("reset", "get_reward")
"""Public methods that are no tools."""


def load_trl(rest: str, options: Options, python: str | None) -> Named:
    """A class of TRL, as `trl:FILE.py:CLASS`: its public methods are tools. Option `reward`: a reward function in TRL's
    form, which may take `environments`."""
    name = f"trl:{rest}"
    if ":" not in rest:
        raise ConfigError(f"environment.name = {name!r}: names no class; give one as trl:file.py:Class")
    factory = resolve_function("environment.name", rest, {})
    foreign: type = factory if inspect.isclass(factory) else type(factory())
    if not inspect.isfunction(getattr(foreign, "reset", None)):
        raise ConfigError(f"environment.name = {name!r}: {foreign.__name__} has no method reset(self, **row)")
    if not hasattr(foreign, "get_reward") and options.get("reward") is None:
        raise ConfigError(
            f"environment.name = {name!r}: {foreign.__name__} has no method get_reward(self); add it, or give a reward "
            "function in TRL's form by environment.options.NAME.reward"
        )
    functions = inspect.getmembers(foreign, inspect.isfunction)
    names = [method for method, _ in functions if not method.startswith("_") and method not in CONTROL]
    try:
        tools = make_tools(foreign, names)
    except ConfigError as error:
        raise ConfigError(f"environment.name = {name!r}: {error}") from None
    members = {"factory": staticmethod(factory), "_known": tools}
    return checked(name, type(foreign.__name__, (TrlEnvironment,), members), options)


class TrlEnvironment(ToolEnvironment):
    """Plays an instance of TRL's class in the manner of its trainer. Every exception of a tool is an answer."""

    factory: ClassVar[Any]
    """Returns an instance of the class of TRL."""
    _errors_are_answers = True

    def __init__(self, task: Task, *, reward: str | None = None) -> None:
        super().__init__(task)
        self._function = None if reward is None else own_function("reward", reward)
        self._said: list[Message] = []
        self._foreign: Any = None

    @classmethod
    def check_setup(cls, **options: Any) -> None:
        if options.get("reward") is not None:
            own_function("reward", options["reward"])

    def reset(self) -> Any:
        self._foreign = self.factory()
        row = {**self._columns(), "prompt": self.task.prompt}
        return self._foreign.reset(**accepted(self._foreign.reset, row))

    async def step(self, action: Action) -> Step:
        step = await super().step(action)
        self._said += [{"role": "assistant", **action.message}, *(step.observation or [])]  # type: ignore[misc]
        return step

    async def reward(self) -> float:
        score = 0.0
        if hasattr(self._foreign, "get_reward"):
            score += await self._called(self._foreign.get_reward)
        if self._function is not None:
            row = {name: [value] for name, value in self._columns().items()}
            row |= {"prompts": [self.task.prompt], "completions": [self._said], "environments": [self._foreign]}
            scores = await self._called(self._function, **accepted(self._function, row))
            score += scores[0] or 0.0  # None: the function does not apply
        return score

    def _columns(self) -> dict[str, Any]:
        task = self.task
        columns = {
            "ground_truth": task.ground_truth,
            "data_source": task.data_source,
            "extra_info": dict(task.extra_info),
        }
        return {**task.extra_info, **task.columns, **columns}

    async def _run_tool(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        return await self._called(getattr(self._foreign, tool.name), **arguments)

    def _text(self, name: str, result: Any) -> str:
        """The text of a tool's result; blocks of a message are joined. Raises ValueError for pictures."""
        if not isinstance(result, list) or not all(isinstance(block, dict) and "type" in block for block in result):
            return str(result)
        if kinds := sorted({str(block["type"]) for block in result} - {"text"}):
            raise ValueError(f"the tool returned {', '.join(kinds)}; only text can be shown")
        return "".join(str(block["text"]) for block in result)

    async def _called(self, function: Callable[..., Any], **arguments: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        return await self.in_thread(lambda: function(**arguments))
