"""An episode: its task, its limits, and what the policy reads before each turn (`environment.history`).

keep       all that it has read and written, followed by the observation: one branch
template   what the chat template renders for all messages. Where that does not continue the branch, it begins
           another one
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from asyncrl.config.config import Config
from asyncrl.environments.dialogue.conversation import ConversationRenderer, Spoken, note_refusal, num_common
from asyncrl.environments.dialogue.dialogue import Dialogue, check_appendable
from asyncrl.environments.dialogue.rendering import DialogueError
from asyncrl.environments.environment import Message, Schema, Task, ToolCall
from asyncrl.wire.service_messages import EpisodeStart, TurnStatus


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an episode."""

    window_tokens: int
    """Limit of the complete sequence: prompt, turns and observations."""
    max_new_tokens: int
    """Limit of a turn."""
    max_turns: int
    """Limit for environments without one."""
    timeout_s: float
    step_timeout_s: float

    @classmethod
    def of(cls, config: Config, *, window_tokens: int) -> Limits:
        """The limits of the run's episodes in an engine with this window."""
        settings = config.environment
        return cls(
            window_tokens=window_tokens,
            max_new_tokens=config.generator.max_new_tokens,
            max_turns=settings.max_turns,
            timeout_s=settings.timeout_s,
            step_timeout_s=settings.step_timeout_s,
        )


def task_of(start: EpisodeStart, text: str) -> Task:
    """The task of an episode; `text` is its prompt, unless it has messages."""
    prompt = start.prompt
    return Task(
        prompt=text if prompt.chat is None else prompt.chat,
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        extra_info=prompt.extra_info,
        columns=prompt.columns,
        row=prompt.row,
        seed=start.seed,
        evaluation=start.evaluation,
    )


@dataclass(frozen=True, slots=True)
class PolicyTurn:
    """The text of the policy."""

    tokens: Sequence[int]
    status: TurnStatus


class TurnPlace(NamedTuple):
    """The place of a turn: in a branch, after `tokens`, which follow the first `keep` of the branch `source`."""

    branch: int
    source: int
    keep: int
    tokens: list[int]

    @property
    def num_tokens(self) -> int:
        """Tokens before the turn."""
        return self.keep + len(self.tokens)


class KeptHistory:
    """Observations are appended to all that the policy has read and written."""

    def __init__(self, words: Dialogue, tools: Sequence[Schema], num_tokens: int) -> None:
        """`num_tokens` are before the first turn."""
        self._words, self._tools = words, tools
        self.branch = 0
        self.num_tokens = num_tokens
        self._closed = False
        self._calls: Sequence[ToolCall] = ()

    def receive(self, tokens: Sequence[int], message: Message, calls: Sequence[ToolCall]) -> None:
        """Notes the policy's turn, also as a message, which is not kept."""
        self.num_tokens += len(tokens)
        self._closed, self._calls = self._words.closes(tokens), calls

    def follow(self, said: Sequence[Message]) -> TurnPlace:
        """Returns the place of the next turn, after the observation. Raises DialogueError."""
        tokens = self._words.follow(said, self._tools, closed=self._closed, calls=self._calls)
        position = TurnPlace(self.branch, self.branch, self.num_tokens, tokens)
        self.num_tokens = position.num_tokens
        return position


class RenderedHistory(KeptHistory):
    """All messages are rendered before each turn. If the template refuses them, the observation is appended."""

    def __init__(
        self,
        words: Dialogue,
        tools: Sequence[Schema],
        renderer: ConversationRenderer,
        messages: Sequence[Message],
        tokens: Sequence[int],
    ) -> None:
        """`tokens` are those before the first turn, for the messages."""
        super().__init__(words, tools, len(tokens))
        self._renderer = renderer
        self._messages = copy.deepcopy(list(messages))
        self._turns: dict[int, Spoken] = {}
        self._tokens = list(tokens)
        renderer.begin(messages, tools, tokens)

    def receive(self, tokens: Sequence[int], message: Message, calls: Sequence[ToolCall]) -> None:
        super().receive(tokens, message, calls)
        message = copy.deepcopy(message)  # the environment gets the same
        if self._messages and self._messages[-1]["role"] == "assistant":  # the row's prompt begins the turn
            message["content"] = f"{self._messages.pop()['content']}{message['content']}"
        self._turns[len(self._messages)] = self._renderer.spoken(tokens)
        self._messages.append(message)
        self._tokens += tokens

    def follow(self, said: Sequence[Message]) -> TurnPlace:
        check_appendable(said)
        self._messages += map(self._renderer.shortened, said)
        try:
            tokens = self._renderer.prompt(self._messages, self._tools, self._turns)
        except DialogueError as error:
            note_refusal(str(error.__cause__ or error))
            position = super().follow(said)
            self._tokens += position.tokens
            return position
        keep, source = num_common(self._tokens, tokens), self.branch
        if keep < len(self._tokens):
            keep, self.branch = min(keep, len(tokens) - 1), source + 1
        self._tokens, self.num_tokens = tokens, len(tokens)
        return TurnPlace(self.branch, source, keep, tokens[keep:])


def history_of(
    words: Dialogue, tools: Sequence[Schema], messages: Sequence[Message] | None, tokens: Sequence[int]
) -> KeptHistory:
    """The history of an episode that begins with these tokens; `messages` are None if they are plain text."""
    renderer = ConversationRenderer.of(words)
    if renderer is None or messages is None:
        return KeptHistory(words, tools, len(tokens))
    return RenderedHistory(words, tools, renderer, messages, tokens)
