"""Plays one episode in an environment host: calls the environment, and waits for the policy's turns.

    reset -> [sample a turn -> step] repeated -> reward -> close

A row whose prompt is messages is played under the model's chat template, one whose prompt is text without.

An episode ends when a step ends it, after `max_turns`, or when the next turn does not fit the window; the
last two are "truncated", and so is an episode whose last turn was cut. All of these have the environment's reward.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import structlog

from asyncrl.environments.dialogue.dialogue import Dialogue
from asyncrl.environments.dialogue.rendering import DialogueError
from asyncrl.environments.environment import Action, Environment, Message, Schema, ToolEnvironment
from asyncrl.environments.episode import KeptHistory, Limits, PolicyTurn, TurnPlace, history_of, task_of
from asyncrl.environments.method_calls import (
    Caller,
    EpisodeFailedError,
    check_parts,
    to_json,
    to_messages,
    to_reward,
    to_spoken,
    to_step,
)
from asyncrl.environments.table import Named
from asyncrl.errors import ConfigError
from asyncrl.types import EpisodeEnd
from asyncrl.wire.service_messages import EpisodeEnded, EpisodeStart, EpisodeStatus, NextTurn

log = structlog.get_logger()

CLOSE_S = 3.0
"""Deadline for what an episode has left running."""


def play_alone(player: Player) -> EpisodeEnded:
    """Plays an episode in this thread, which has no event loop. What it has left running is ended; calls that ignore
    their end are left behind."""
    loop = asyncio.new_event_loop()
    ended = loop.run_until_complete(player.play())
    if running := asyncio.all_tasks(loop):
        for task in running:
            task.cancel()
        loop.run_until_complete(asyncio.wait(running, timeout=CLOSE_S))
    return ended


def joined(chat: Sequence[Message], said: Sequence[Message], *, is_text: bool) -> list[Message]:
    """The messages of a row and of `reset`: a text is appended to the last message if this is the user's,
    otherwise messages behind all."""
    last = chat[-1] if chat else {}
    content = last.get("content")
    if not is_text or last.get("role") != "user" or not isinstance(content, str | list):
        return [*chat, *said]
    text: str = said[0]["content"]
    more = f"{content}{text}" if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return [*chat[:-1], {**last, "content": more}]


@dataclass
class Player:
    """One episode. `say` asks the policy for a turn behind these tokens, which `receive` receives."""

    start: EpisodeStart
    named: Named
    dialogue: Dialogue
    limits: Limits
    threads: Executor
    say: Callable[[Player, NextTurn, list[int]], None]
    keeps_messages: bool = True
    """True if the messages are sent with the end of the episode."""
    stuck: set[asyncio.Future[Any]] = field(default_factory=set[asyncio.Future[Any]])
    """Receives calls in threads that do not return in time, until they return."""
    said: asyncio.Queue[PolicyTurn] = field(default_factory=asyncio.Queue[PolicyTurn])
    turn_rewards: list[float] = field(default_factory=list[float])
    parts: Counter[str] = field(default_factory=Counter[str])
    messages: list[Message] = field(default_factory=list[Message])
    """The policy's turns so far, and the observations between them."""
    num_calls: int = 0
    """Calls of tools so far."""
    caller: Caller = field(init=False)
    words: Dialogue = field(init=False)
    """The dialogue that fits the row's prompt."""

    def __post_init__(self) -> None:
        self.words = self.dialogue
        self.caller = Caller(self.named.kind.__name__, self.threads, self.stuck, self.limits)

    def receive(self, branch: int, turn: PolicyTurn) -> None:
        """Receives the policy's turn after a `say`."""
        self.said.put_nowait(turn)

    async def play(self) -> EpisodeEnded:
        """Plays the episode to its end, which is returned; a failed one is also an end."""
        environment: Environment | None = None
        caller, named = self.caller, self.named
        try:
            if self.start.prompt.chat is not None:
                self.words = self.dialogue.chat_for(self.start.prompt.columns)
            task = task_of(self.start, self.dialogue.text_of(self.start.prompt.tokens.tolist()))
            made: Environment = await caller("__init__", named.make, task, at_once=named.kind.returns_at_once)
            environment = made
            if isinstance(made, ToolEnvironment):
                made.in_thread = caller.in_thread
            ended, status = await self._turns(made)
            answer = await self._call(made, "reward")
            score, parts = to_reward(self.caller.name, answer)
            self.parts.update(parts)
            check_parts(caller.name, self.parts)
            return self._end(status, ended, reward=sum(self.turn_rewards) + score)
        except EpisodeFailedError as error:
            return self._end("failed", error.ended, error=str(error))
        except (ConfigError, DialogueError) as error:  # of the chat template
            return self._end("failed", "environment", error=f"{caller.name}: {error}")
        finally:
            if environment is not None:
                await self._close(environment)

    async def _turns(self, environment: Environment) -> tuple[EpisodeEnd, EpisodeStatus]:
        name, words, tools = self.caller.name, self.words, list(environment.tools)
        position, history = self._opening(await self._call(environment, "reset"), tools)
        if not position.num_tokens:
            raise EpisodeFailedError("environment", f"{name}.reset said nothing, and the row has no prompt")
        if self._room(position) < 1:
            text = f"{position.num_tokens} tokens before the first turn, the window has "
            raise EpisodeFailedError("overlong", f"{name}: {text}{self.limits.window_tokens}")
        said: list[Message] = []
        for number in range(self.named.max_turns(self.limits.max_turns)):
            if number and not position.tokens:
                raise EpisodeFailedError("environment", f"{name}.step said nothing, and the episode is not done")
            turn = await self._sample(position)
            action = self._action(turn, number, tools)
            history.receive(turn.tokens, action.message, action.tool_calls)
            self.messages += [*map(to_spoken, said), action.message]
            step = to_step(name, await self._call(environment, "step", action))
            self.turn_rewards.append(float(step.reward))
            self.parts.update({str(key): float(part) for key, part in step.parts.items()})
            if step.done:
                return "done", turn.status
            said = to_messages(name, "step", step.observation, is_chat=words.is_chat)
            position = history.follow(said)
            if self._room(position) < 1:
                return "window", "truncated"
        return "max_turns", "truncated"

    def _opening(self, said: object, tools: Sequence[Schema]) -> tuple[TurnPlace, KeptHistory]:
        """The place of the first turn, and the history that makes the places of the next ones."""
        keep, tokens, messages = self._begun(said, tools)
        history = history_of(self.words, tools, messages, [*self.start.prompt.tokens[:keep].tolist(), *tokens])
        return TurnPlace(0, 0, keep, tokens), history

    def _begun(self, said: object, tools: Sequence[Schema]) -> tuple[int, list[int], list[Message] | None]:
        """The number of tokens kept of the row's prompt, and the following tokens; and all messages before the first
        turn, None without a chat template."""
        messages = to_messages(self.caller.name, "reset", said, is_chat=self.words.is_chat)
        chat, length = self.start.prompt.chat, len(self.start.prompt.tokens)
        if chat is None and tools:
            text = "has tools, which a chat template shows, but the row's prompt is plain text"
            raise EpisodeFailedError("environment", f"{self.caller.name} {text}; set data.string_prompts=user")
        if chat is None:
            return length, self.words.begin(messages, tools), None
        if not messages and not tools:
            return length, [], chat
        messages = joined(chat, messages, is_text=isinstance(said, str))
        return 0, self.words.begin(messages, tools), messages

    def _action(self, turn: PolicyTurn, number: int, tools: Sequence[Schema]) -> Action:
        read = self.words.read(turn.tokens, tools, first_call=self.num_calls)
        self.num_calls += len(read.calls)
        return Action(
            text=self.words.text_of(turn.tokens),
            turn=number,
            truncated=turn.status == "truncated",
            message=read.message,
            tool_calls=read.calls,
            problems=read.problems,
        )

    async def _sample(self, position: TurnPlace) -> PolicyTurn:
        """Returns the policy's turn at the place."""
        max_tokens = min(self.limits.max_new_tokens, self._room(position))
        wish = NextTurn(self.start.episode, position.branch, position.source, position.keep, max_tokens, [])
        self.say(self, wish, position.tokens)
        return await self.said.get()

    def _room(self, position: TurnPlace) -> int:
        """Tokens of the window that are left for a turn at the place."""
        return self.limits.window_tokens - position.num_tokens

    async def _call(self, environment: Environment, method: str, *arguments: object) -> object:
        function = getattr(environment, method)
        if getattr(type(environment), method) is getattr(Environment, method):
            return function(*arguments)  # does nothing
        return await self.caller(method, function, *arguments, at_once=self.named.kind.returns_at_once)

    async def _close(self, environment: Environment) -> None:
        """Closes the environment. A failure does not change the episode's reward."""
        try:
            await self._call(environment, "close")
        except EpisodeFailedError as error:
            log.warning("environment not closed", episode=self.start.episode, error=str(error))

    def _end(self, status: EpisodeStatus, ended: EpisodeEnd, *, reward: float = 0.0, error: str = "") -> EpisodeEnded:
        return EpisodeEnded(
            episode=self.start.episode,
            status=status,
            ended=ended,
            reward=reward,
            parts=dict(self.parts),
            turn_rewards=list(self.turn_rewards),
            environment_s=self.caller.environment_s,
            error=error,
            messages=to_json(self.messages) if self.keeps_messages and self.words.is_chat else b"",
        )
