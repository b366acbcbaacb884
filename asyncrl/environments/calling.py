"""Calls the methods of a user's environment: each within its time, and with its result checked."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, cast

from asyncrl.environments.environment import Message, Step
from asyncrl.errors import AsyncrlError
from asyncrl.types import MAX_REWARD, EpisodeEnd
from asyncrl.util.text import describe, redact
from asyncrl.wire.messages import MAX_PARTS

MAX_SHOWN_CHARACTERS = 80


class EpisodeFailedError(AsyncrlError):
    """An episode has no reward."""

    def __init__(self, ended: EpisodeEnd, text: str) -> None:
        super().__init__(redact(text))
        self.ended: EpisodeEnd = ended


class Caller:
    """Calls the methods of one environment. `environment_s` are the seconds spent in them."""

    def __init__(self, name: str, threads: Executor, *, step_timeout_s: float, timeout_s: float) -> None:
        """`timeout_s` is the time of the complete episode, from now on."""
        self.name = name
        self.environment_s = 0.0
        self.stuck: list[asyncio.Future[Any]] = []
        """Calls in threads that did not return in time."""
        self._threads = threads
        self._step_timeout_s, self._timeout_s = step_timeout_s, timeout_s
        self._began_s = time.monotonic()
        self._in_threads: set[asyncio.Future[Any]] = set()
        """Calls of tools in threads that have not returned."""

    async def __call__(self, method: str, function: Callable[..., Any], *arguments: Any, at_once: bool) -> Any:
        """Returns the result of a method. A function that is not async runs in a thread unless it returns `at_once`.
        Raises EpisodeFailedError if it raises or takes too long."""
        left_s = self._began_s + self._timeout_s - time.monotonic()
        timeout_s = min(self._step_timeout_s, left_s)
        began_s = time.monotonic()
        try:
            if timeout_s <= 0:
                raise TimeoutError
            return await self._result(function, arguments, at_once, timeout_s)
        except TimeoutError:
            key = "step_timeout_s" if timeout_s == self._step_timeout_s else "timeout_s"
            limit_s = self._step_timeout_s if timeout_s == self._step_timeout_s else self._timeout_s
            text = f"{self.name}.{method} took longer than environment.{key} = {limit_s:g} s"
            raise EpisodeFailedError("timeout", text) from None
        except _UserError as error:
            raise EpisodeFailedError("environment", f"{self.name}.{method} raised {error}") from error.__cause__
        finally:
            self.environment_s += time.monotonic() - began_s

    async def _result(self, function: Callable[..., Any], arguments: Any, at_once: bool, timeout_s: float) -> Any:
        if at_once or inspect.iscoroutinefunction(function):
            result = _guarded(function, arguments)
        else:
            future = asyncio.get_running_loop().run_in_executor(self._threads, _guarded, function, arguments)
            done, _ = await asyncio.wait({future}, timeout=timeout_s)
            if not done:
                self._note_stuck(future)
                raise TimeoutError
            result = future.result()
        if not inspect.isawaitable(result):
            return result
        task = asyncio.ensure_future(_awaited(result))
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            task.cancel()  # not awaited: the user's code may ignore it
            for future in self._in_threads:
                self._note_stuck(future)
            raise TimeoutError
        return task.result()

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        """Returns the result of a function that is called in a thread, from a method that is being awaited."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, function)
        self._in_threads.add(future)
        future.add_done_callback(self._in_threads.discard)
        return await asyncio.shield(future)

    def _note_stuck(self, future: asyncio.Future[Any]) -> None:
        self.stuck.append(future)
        future.add_done_callback(self._returned)

    def _returned(self, future: asyncio.Future[Any]) -> None:
        self.stuck.remove(future)
        if not future.cancelled():
            future.exception()  # it comes too late


class _UserError(Exception):
    """The exception of the user's code, as a text. Not a TimeoutError, whatever it was."""


def _guarded(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:  # the user's code: fails its episode, never the host
        raise _UserError(describe(error)) from error


async def _awaited(result: Any) -> Any:
    try:
        return await result
    except (Exception, SystemExit) as error:  # the user's code: fails its episode, never the host
        raise _UserError(describe(error)) from error


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
