"""The classes that users derive from: an environment, which answers the policy until the episode ends.

    from asyncrl.environments import Environment, Step

    class GuessNumber(Environment):
        def reset(self):
            self.secret = int(self.task.ground_truth)

        def step(self, action):
            guess = int(action.text)
            if guess == self.secret:
                return Step(reward=1.0, done=True)
            return "<" if self.secret < guess else ">"

Or tools, which are methods that the policy calls:

    class Shop(ToolEnvironment):
        def price(self, item: str) -> str:
            \"\"\"Returns the price of an item.

            Args:
                item: The name of the item.
            \"\"\"
            return self.task.extra_info["prices"][item]

        def reward(self):
            return float(self.answer == self.task.ground_truth)
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar, NotRequired, get_type_hints

from typing_extensions import TypedDict

from asyncrl.errors import ConfigError
from asyncrl.util.text import describe

Message = dict[str, Any]
"""One message of a chat, in the form of the OpenAI API: "role" and "content"; of a tool also "tool_call_id" and "name";
of the policy also "reasoning_content" and "tool_calls"."""

Say = str | Message | list[Message] | None
"""An observation for the policy. With a chat template a text is a message of the user."""

Schema = dict[str, Any]
"""The description of a tool for the policy: {"type": "function", "function": {"name", "description", "parameters"}}."""


@dataclass(frozen=True, slots=True)
class Task:
    """The row of the data that an episode is about."""

    prompt: str | list[Message]
    """The text of the prompt, or its messages."""
    ground_truth: str
    data_source: str
    extra_info: Mapping[str, Any]
    columns: Mapping[str, Any]
    """The row's other columns."""
    row: int
    """Number of the row in the data."""
    seed: int
    """The same for all members of a group, so that they have the same task."""
    evaluation: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by the policy."""

    name: str
    arguments: dict[str, Any]
    id: str
    """The "tool_call_id" of its answer."""


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the policy."""

    text: str
    """All of it, without special tokens."""
    turn: int
    """Number of the turn, from 0."""
    truncated: bool = False
    """True if the turn was cut at the token limit."""
    message: Message = field(default_factory=dict[str, Any])
    """The turn as a message: "content" is the text without reasoning and calls."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls of the turn, in order."""
    problems: tuple[str, ...] = ()
    """Why text that looks like a call is none. It stays in the content."""


@dataclass(frozen=True, slots=True)
class Step:
    """The answer to an action."""

    observation: Say = None
    """The observation before the policy's next turn. Not needed when the episode is done."""
    reward: float = 0.0
    """Reward of this turn; the reward of an episode is the sum over its turns and `Environment.reward`."""
    done: bool = False
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Named numbers of this turn, which become metrics, summed over an episode's turns."""


class Environment:
    """One episode. An instance is made for each episode, used by it alone, and closed when it has ended, also if it
    failed. Each method may be `async`.

    An exception in a method is not a reward: the episode is tried again, and then its group is refunded.
    """

    max_turns: ClassVar[int | None] = None
    """Turns after which the episode is cut; None for `environment.max_turns`."""
    returns_at_once: ClassVar[bool] = False
    """True if no method ever waits: they are then called without a separate thread, which is much cheaper."""
    tools: Sequence[Schema] = ()
    """The tools that the chat template shows to the policy; `ToolEnvironment` makes them from its methods."""

    def __init__(self, task: Task) -> None:
        """A subclass may have options: keyword-only arguments, set by `environment.options`."""
        self.task = task
        self.random = random.Random(task.seed)
        """The same draws for all members of a group."""

    @classmethod
    def check_setup(cls, **options: Any) -> None:
        """Raises `asyncrl.errors.ConfigError` if no episode can be played with these options. Called when a run starts,
        and in each process that plays episodes."""

    def reset(self) -> Any:
        """Prepares the episode. Returns the messages after the prompt, before the first turn, as a Say; None for
        nothing."""

    def step(self, action: Action) -> Any:
        """Returns the answer to the action: a Step, or only its observation."""
        raise NotImplementedError

    def reward(self) -> Any:
        """Returns the reward of the episode after its last turn, in addition to its steps' rewards: a number, or a dict
        with "score" and named parts."""
        return 0.0

    def close(self) -> Any:
        """Releases what the episode holds."""


MAX_TOOLS = 100
UNKNOWN = "unknown"
"""Stands in the parts of the reward for all names that are no tool, which the policy makes up."""


class ToolError(Exception):
    """Raised by a tool for what the policy did wrong: its text is the answer to the call. Any other exception of a tool
    fails the episode."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A method that the policy can call."""

    name: str
    schema: Schema
    is_async: bool
    arguments: Any = None
    """Validates the arguments, as a `pydantic.TypeAdapter`; None if the tool does so itself."""

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments in the types of the method. Raises ToolError for those that it does not take."""
        from pydantic import ValidationError

        if self.arguments is None:
            return dict(arguments)
        try:
            return self.arguments.validate_python(arguments)
        except ValidationError as error:
            first = error.errors()[0]
            raise ToolError(f"{self.name}: argument {first['loc'][0]}: {first['msg']}") from None


class _Schemas:
    """The schemas of a class, made when they are first needed."""

    def __get__(self, instance: object, owner: type[ToolEnvironment]) -> list[Schema]:
        return [tool.schema for tool in (owner._known or tools_of(owner)).values()]


class ToolEnvironment(Environment):
    """An environment whose public methods are the tools that the policy can call, with type hints and a docstring that
    describes the tool and each argument (Google style). They may be `async`.

    A turn without a call ends the episode. The calls of a turn are made in its order; async ones that follow each other
    at the same time. An unknown tool, arguments that it does not take, and a ToolError are answers that the policy
    reads. Parts of the reward: the numbers of calls, `calls/TOOL`, and of those without a result, `calls_failed/TOOL`.
    """

    tools: Any = _Schemas()
    _known: ClassVar[Mapping[str, Tool] | None] = None
    """The tools of a class whose own methods are none, by name."""
    _errors_are_answers: ClassVar[bool] = False
    """True if the policy reads every exception of a tool."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.answer = ""
        """The text of the last message without a call."""
        self.in_thread: Callable[[Callable[[], Any]], Awaitable[Any]] = asyncio.to_thread
        """Calls a function in a thread."""

    def _tools(self) -> Mapping[str, Tool]:
        """The tools of the episode, by name."""
        return self._known or tools_of(type(self))

    async def _run_tool(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        """The result of a tool."""
        method = getattr(self, tool.name)
        if tool.is_async:
            return await method(**arguments)
        return method(**arguments) if self.returns_at_once else await self.in_thread(partial(method, **arguments))

    def _text(self, name: str, result: Any) -> str:
        """The text of a tool's result: JSON unless it is a text."""
        if isinstance(result, str):
            return result
        try:
            return json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            text = f"{name} returned {type(result).__name__}, which is neither a text nor JSON: {error}"
            raise TypeError(text) from None

    async def step(self, action: Action) -> Step:
        """Makes the calls of a turn. The answer to each is a message of the role "tool"."""
        tools = self._tools()
        parts = {f"{count}/{name}": 0.0 for name in (*tools, UNKNOWN) for count in COUNTS}
        if not action.tool_calls and not action.problems:
            self.answer = action.message["content"]
            return Step(done=True, parts=parts)
        answers = await self._answers(action.tool_calls)
        for call, (_, failed) in zip(action.tool_calls, answers, strict=True):
            name = call.name if call.name in tools else UNKNOWN
            parts[f"calls/{name}"] += 1.0
            parts[f"calls_failed/{name}"] += failed
        said = [_answer(call.name, call.id, text) for call, (text, _) in zip(action.tool_calls, answers, strict=True)]
        for number, problem in enumerate(action.problems):
            parts[f"calls/{UNKNOWN}"] += 1.0
            parts[f"calls_failed/{UNKNOWN}"] += 1.0
            said.append(_answer(UNKNOWN, f"none{number:05d}", f"Error: {problem}"))
        return Step(list(said), parts=parts)

    async def _answers(self, calls: tuple[ToolCall, ...]) -> list[tuple[str, bool]]:
        """The answer to each call, and true if it failed."""
        tools, running = self._tools(), list[asyncio.Future[tuple[str, bool]]]()
        try:
            for call in calls:
                tool = tools.get(call.name)
                if tool is None or not tool.is_async:
                    await asyncio.gather(*running)
                running.append(asyncio.ensure_future(self._call(tool, call)))
                if tool is None or not tool.is_async:
                    await running[-1]
            return await asyncio.gather(*running)
        finally:
            for future in running:
                future.cancel()

    async def _call(self, tool: Tool | None, call: ToolCall) -> tuple[str, bool]:
        try:
            if tool is None:
                raise ToolError(f"there is no tool {call.name!r}; there are {', '.join(self._tools())}")
            result = await self._run_tool(tool, tool.read(call.arguments))
            return self._text(call.name, result), False
        except (Exception, SystemExit) as error:  # the latter would end the event loop
            if isinstance(error, ToolError) or (self._errors_are_answers and isinstance(error, Exception)):
                return f"Error: {error}", True
            raise RuntimeError(f"{call.name} raised {describe(error)}") from error


COUNTS = ("calls", "calls_failed")
METHODS = frozenset(dir(ToolEnvironment))
"""Methods of every environment; they are no tools."""
ATTRIBUTES = ("answer", "check_setup", "in_thread", "random", "task")


@cache
def tools_of(kind: type[ToolEnvironment]) -> Mapping[str, Tool]:
    """The tools of a class, by name. Raises ConfigError for a method that cannot be one, and if there is none."""
    for name in ATTRIBUTES:
        if inspect.isfunction(getattr(kind, name, None)):
            raise ConfigError(f"{kind.__name__}.{name}: is an attribute of every ToolEnvironment; rename the tool")
    names = [name for name in dir(kind) if not name.startswith("_") and name not in METHODS]
    return make_tools(kind, [name for name in names if _is_method(getattr(kind, name))])


def make_tools(kind: type, names: Sequence[str]) -> Mapping[str, Tool]:
    """The tools that are the methods of these names of a class. Raises ConfigError for a method that cannot be one, and
    if there is none."""
    tools = {name: _tool(kind, name, getattr(kind, name)) for name in names}
    if not 0 < len(tools) <= MAX_TOOLS:
        raise ConfigError(
            f"{kind.__name__}: has {len(tools)} tools, which are its public methods; at least 1 and at most "
            f"{MAX_TOOLS}; a method that is no tool begins with an underscore"
        )
    return tools


def _is_method(value: Any) -> bool:
    return inspect.isfunction(value) or inspect.ismethod(value)


def _tool(kind: type, name: str, function: Any) -> Tool:
    from pydantic import TypeAdapter
    from transformers.utils.chat_template_utils import get_json_schema

    where, hint = f"{kind.__name__}.{name}", "; a method that is no tool begins with an underscore"
    bound = isinstance(inspect.getattr_static(kind, name), staticmethod | classmethod)
    parameters = list(inspect.signature(function).parameters.values())[0 if bound else 1 :]
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{where}: argument {parameter} has no name that a call could give{hint}")
    try:
        with _without_torch():
            schema = get_json_schema(function)
        arguments = TypeAdapter(_arguments(function, parameters))
    except Exception as error:  # of several classes of transformers and pydantic
        raise ConfigError(f"{where}: {error}{hint}") from None
    return Tool(name, schema, inspect.iscoroutinefunction(function), arguments)


def _arguments(function: Any, parameters: Sequence[inspect.Parameter]) -> type:
    """A dict of exactly the arguments, in their types."""
    hints = get_type_hints(function, include_extras=True)
    fields = {
        parameter.name: hints[parameter.name]
        if parameter.default is parameter.empty
        else NotRequired[hints[parameter.name]]
        for parameter in parameters
    }
    arguments: Any = TypedDict("Arguments", fields)  # type: ignore[misc]
    arguments.__pydantic_config__ = {"extra": "forbid"}
    return arguments


@contextmanager
def _without_torch() -> Iterator[None]:
    """Keeps transformers from importing torch, only to ask whether a hint is a tensor. A host has no use for it."""
    from transformers.utils import chat_template_utils as module

    chat_template_utils: Any = module
    available = chat_template_utils.is_torch_available
    chat_template_utils.is_torch_available = lambda: False
    try:
        yield
    finally:
        chat_template_utils.is_torch_available = available


def _answer(name: str, call: str, text: str) -> Message:
    return {"role": "tool", "name": name, "tool_call_id": call, "content": text}
