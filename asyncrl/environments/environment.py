"""What a user writes: an environment, which answers the policy until the episode ends.

    from asyncrl.environments import Environment, Step

    class GuessNumber(Environment):
        def reset(self):
            self.secret = int(self.task.ground_truth)

        def step(self, action):
            guess = int(action.text)
            if guess == self.secret:
                return Step(reward=1.0, done=True)
            return "<" if self.secret < guess else ">"

This module imports the standard library only.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

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
    """The turn as a message: "content" is what is neither reasoning nor a call."""
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
    """Named numbers of this turn, which become metrics; those of an episode's turns are added up."""


class Environment:
    """One episode. An instance is made for each episode, used by it alone, and closed when it has ended, also if it
    failed. Each method may be `async`.

    An exception in a method is not a reward: the episode is tried again, and then its group is refunded.
    """

    max_turns: ClassVar[int | None] = None
    """Turns after which the episode is cut; None for `environment.max_turns`."""
    returns_at_once: ClassVar[bool] = False
    """True if no method ever waits: they are then called without a thread of their own, which is much cheaper."""
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
        """Prepares the episode. Returns what is said behind the prompt before the first turn, as a Say; None for
        nothing."""

    def step(self, action: Action) -> Any:
        """Returns the answer to the action: a Step, or only its observation."""
        raise NotImplementedError

    def reward(self) -> Any:
        """Returns the reward of the episode after its last turn, in addition to those of its steps: a number, or a dict
        with "score" and named parts."""
        return 0.0

    def close(self) -> Any:
        """Releases what the episode holds."""
