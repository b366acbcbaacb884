"""Calls the methods of a user's environment: each within its time, and with its result checked."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from asyncrl.environments.environment import Message, Step
from asyncrl.environments.episode import Limits
from asyncrl.errors import AsyncrlError
from asyncrl.types import MAX_NAME_CHARACTERS, MAX_REWARD, EpisodeEnd
from asyncrl.util.text import describe, encodable, redact
from asyncrl.wire.messages import MAX_PARTS

MAX_SHOWN_CHARACTERS = 80
P = ParamSpec("P")
T = TypeVar("T")


class EpisodeFailedError(AsyncrlError):
    """An episode has no reward."""

    def __init__(self, ended: EpisodeEnd, text: str) -> None:
        super().__init__(encodable(redact(text)))
        self.ended: EpisodeEnd = ended


class Caller:
    """Calls the methods of one environment. `environment_s` are the seconds spent in them."""

    def __init__(self, name: str, threads: Executor, stuck: set[asyncio.Future[Any]], limits: Limits) -> None:
        """The time of the complete episode runs from now on. `stuck` receives calls in threads that do not return in
        time, until they return."""
        self.name = name
        self.environment_s = 0.0
        self._threads, self._stuck, self._limits = threads, stuck, limits
        self._began_s = time.monotonic()
        self._in_threads: set[asyncio.Future[Any]] = set()

    async def __call__(self, method: str, function: Callable[..., Any], *arguments: Any, at_once: bool) -> Any:
        """Returns the result of a method. A function that is not async runs in a thread unless it returns `at_once`.
        Raises EpisodeFailedError if it raises or takes too long."""
        began_s = time.monotonic()
        limits = self._limits
        left_s = math.inf if method == "close" else self._began_s + limits.timeout_s - began_s
        timeout_s, key = min((left_s, "timeout_s"), (limits.step_timeout_s, "step_timeout_s"))
        late = f"{self.name}.{method} took longer than environment.{key} = {getattr(limits, key):g} s"
        if timeout_s <= 0:
            raise EpisodeFailedError("timeout", late)
        task = asyncio.ensure_future(self._result(partial(function, *arguments), at_once))
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        self.environment_s += time.monotonic() - began_s
        if not done:
            task.cancel()  # not awaited: the user's code may ignore it
            for future in self._in_threads:
                self._stuck.add(future)
                future.add_done_callback(self._stuck.discard)
            raise EpisodeFailedError("timeout", late)
        result, error = task.result()
        if error is not None:
            text = f"{self.name}.{method} raised {describe(error)}"
            raise EpisodeFailedError("environment", text) from error
        return result

    async def _result(self, function: Callable[[], Any], at_once: bool) -> tuple[Any, BaseException | None]:
        try:
            is_async = inspect.iscoroutinefunction(function)
            result = function() if at_once or is_async else await self.in_thread(function)
            return await result if inspect.isawaitable(result) else result, None
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # the user's code: fails its episode alone
            return None, error

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        """Returns the result of a function that is called in a thread, from a method that is being awaited."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, _caught, function)
        self._in_threads.add(future)
        future.add_done_callback(self._in_threads.discard)
        result, error = await asyncio.shield(future)
        if error is not None:
            raise error
        return result


def _caught(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Result or error of a function; some errors cannot pass from a thread to a coroutine."""
    try:
        return function(), None
    except (Exception, SystemExit) as error:
        return None, error


def _readable(read: Callable[Concatenate[str, P], T]) -> Callable[Concatenate[str, P], T]:
    """The function, which also raises EpisodeFailedError if a value of the user raises while it is read."""

    @wraps(read)
    def reading(name: str, *arguments: P.args, **options: P.kwargs) -> T:
        try:
            return read(name, *arguments, **options)
        except EpisodeFailedError:
            raise
        except Exception as error:  # of methods of the value
            raise EpisodeFailedError("environment", f"{name}: an answer cannot be read: {describe(error)}") from error

    return reading


@_readable
def to_step(name: str, value: Any) -> Step:
    """The Step that a `step` returned. Raises EpisodeFailedError if it is none."""
    if value is None or isinstance(value, str | dict | list):
        value = Step(cast("Any", value))
    if not isinstance(value, Step):
        raise EpisodeFailedError("environment", f"{name}.step returned {shown(value)}, which is no Step and no text")
    if not value.done and not value.observation:
        raise EpisodeFailedError("environment", f"{name}.step said nothing, and the episode is not done")
    check_number(f"{name}.step: reward", value.reward)
    check_parts(f"{name}.step", value.parts)
    return value


@_readable
def to_messages(name: str, method: str, said: Any, *, is_chat: bool) -> list[Message]:
    """The messages of an environment; a text is one of the user. Raises EpisodeFailedError if it is neither, and
    for messages without a chat template."""
    where = f"{name}.{method}"
    if said is None or said == "":
        return []
    if not isinstance(said, str | dict | list):
        expected = "no text and no messages" if is_chat else "no text"
        raise EpisodeFailedError("environment", f"{where} said {shown(said)}, which is {expected}")
    if isinstance(said, str):
        said = {"role": "user", "content": said}
    elif not is_chat:
        text = (
            "the row's prompt is plain text, without roles; give prompts as messages, or set data.string_prompts=user"
        )
        raise EpisodeFailedError("environment", f"{where} said {shown(said)}, but {text}")
    messages = cast("list[Any]", said if isinstance(said, list) else [said])
    for message in messages:
        if not isinstance(message, dict):
            raise EpisodeFailedError("environment", f"{where} said {shown(message)}, which is no message")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            text = f'{where} said {shown(message)}: "role" and "content" must be texts'
            raise EpisodeFailedError("environment", text)
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise EpisodeFailedError("environment", f"{where} said what is no valid text: {error}") from None
    return messages


def to_spoken(message: Message) -> Message:
    """The message of an environment with its texts only."""
    return {key: str(message[key]) for key in ("role", "content", "name", "tool_call_id") if key in message}


def to_json(messages: Sequence[Message]) -> bytes:
    """The messages as JSON in ASCII, which may hold any text."""
    return json.dumps(messages).encode()


@_readable
def to_reward(name: str, value: Any) -> tuple[float, dict[str, float]]:
    """Reward and parts that `reward` returned. Raises EpisodeFailedError if they are no finite numbers."""
    parts: dict[str, float] = {}
    if isinstance(value, Mapping):
        if "score" not in value:
            raise EpisodeFailedError("environment", f'{name}.reward returned {shown(value)}, without "score"')
        parts = {str(key): part for key, part in value.items() if key != "score"}
        value = value["score"]
    check_parts(f"{name}.reward", parts)
    return check_number(f"{name}.reward", value), parts


def check_parts(what: str, parts: Any) -> None:
    """Raises EpisodeFailedError unless the parts are named finite numbers."""
    if not isinstance(parts, Mapping) or len(parts) > MAX_PARTS:
        raise EpisodeFailedError("environment", f"{what}: parts are {shown(parts)}, not at most {MAX_PARTS} numbers")
    for key, part in parts.items():
        if len(str(key).encode()) > MAX_NAME_CHARACTERS:
            raise EpisodeFailedError("environment", f"{what}: part {shown(key)} has a name that is too long")
        check_number(f"{what}: part {key!r}", part)


def check_number(what: str, value: Any) -> float:
    """The number. Raises EpisodeFailedError unless it is a finite one."""
    good = isinstance(value, int | float) or hasattr(value, "__float__")
    if not good or not math.isfinite(number := float(value)) or abs(number) > MAX_REWARD:
        raise EpisodeFailedError("environment", f"{what} is {shown(value)}, not a finite number")
    return number


def shown(value: Any) -> str:
    """A short text of a value, with its type."""
    text = redact(repr(value))
    if len(text) > MAX_SHOWN_CHARACTERS:
        text = f"{text[: MAX_SHOWN_CHARACTERS - 3]}..."
    return f"{text} ({type(value).__name__})"
