"""What is known of an episode before it is played: its task and its limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.config.config import Config
from asyncrl.environments.environment import Task
from asyncrl.types import Prompt
from asyncrl.wire.environment_messages import EpisodeStart, GroupPlace, TurnStatus


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an episode."""

    window_tokens: int
    """Of the complete sequence: prompt, turns and observations."""
    max_new_tokens: int
    """Of a turn."""
    max_turns: int
    """Of an environment that has no limit of its own."""
    timeout_s: float
    step_timeout_s: float
    retries: int = 0

    @property
    def group_timeout_s(self) -> float:
        """Of the wait for the other members of a group, which may be tried again."""
        return self.timeout_s * (1 + self.retries)

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
            retries=settings.retries,
        )


def start_of(
    episode: str, prompt: Prompt, *, seed: int, evaluation: bool, place: GroupPlace | None = None
) -> EpisodeStart:
    """The start of an episode about the prompt; `seed` is that of its task."""
    return EpisodeStart(
        episode=episode,
        row=prompt.row,
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        extra_info=prompt.extra_info,
        chat=prompt.chat,
        columns=prompt.columns,
        seed=seed,
        evaluation=evaluation,
        place=place,
    )


def task_of(start: EpisodeStart, prompt: str) -> Task:
    """The task of an episode; `prompt` is its text, unless it has messages."""
    return Task(
        prompt=prompt if start.chat is None else start.chat,
        ground_truth=start.ground_truth,
        data_source=start.data_source,
        extra_info=start.extra_info,
        columns=start.columns,
        row=start.row,
        seed=start.seed,
        evaluation=start.evaluation,
    )


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy said."""

    tokens: Sequence[int]
    status: TurnStatus
