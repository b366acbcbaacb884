"""Plays one episode in an environment host: asks the environment, and waits for what the policy says.

    reset -> [sample a turn -> step] repeated -> reward -> close

An episode ends when a step says that it is done, after `max_turns`, or when the next turn does not fit the window; the
last two are "truncated", and so is an episode whose last turn was cut. All of these have the environment's reward.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import structlog

from asyncrl.config import Config
from asyncrl.environments.calling import Caller, EpisodeFailedError, to_reward, to_step, to_text
from asyncrl.environments.dialogue import Dialogue
from asyncrl.environments.environment import Action, Environment, Task
from asyncrl.environments.table import Named
from asyncrl.types import EpisodeEnd, Prompt
from asyncrl.wire.environment_messages import EpisodeEnded, EpisodeStart, EpisodeStatus, SayNext, TurnStatus

log = structlog.get_logger()


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


def start_of(episode: str, prompt: Prompt, *, seed: int, evaluation: bool) -> EpisodeStart:
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
    )


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy said."""

    tokens: Sequence[int]
    status: TurnStatus


def play_alone(player: Player) -> EpisodeEnded:
    """Plays an episode in this thread, which has no event loop. Calls that ignore their end are left behind."""
    loop = asyncio.new_event_loop()
    return loop.run_until_complete(player.play())


@dataclass
class Player:
    """One episode. `say` asks the policy for a turn behind these tokens, which `hear` receives."""

    start: EpisodeStart
    prompt: Sequence[int]
    named: Named
    dialogue: Dialogue
    limits: Limits
    threads: Executor
    say: Callable[[Player, SayNext, list[int]], None]
    said: asyncio.Queue[Turn] = field(default_factory=asyncio.Queue[Turn])
    num_tokens: int = 0
    """Length of the sequence so far."""
    turn_rewards: list[float] = field(default_factory=list[float])
    parts: Counter[str] = field(default_factory=Counter[str])
    caller: Caller = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt)
        times = {"step_timeout_s": self.limits.step_timeout_s, "timeout_s": self.limits.timeout_s}
        self.caller = Caller(self.named.kind.__name__, self.threads, **times)

    @property
    def stuck(self) -> int:
        """Number of calls that did not return in time, and still run."""
        return len(self.caller.stuck)

    def hear(self, branch: int, turn: Turn) -> None:
        """Receives the policy's turn after a `say`."""
        self.said.put_nowait(turn)

    async def play(self) -> EpisodeEnded:
        """Plays the episode to its end, which is returned; a failed one is an end, too."""
        environment: Environment | None = None
        caller, named = self.caller, self.named
        try:
            if self.start.chat is not None:
                raise EpisodeFailedError("environment", f"row {self.start.row}: the prompt is no plain text")
            made: Environment = await caller("__init__", named.make, self._task(), at_once=named.kind.returns_at_once)
            environment = made
            ended, status = await self._turns(made)
            given = await self._call(made, "reward")
            score, parts = to_reward(self.caller.name, given)
            self.parts.update(parts)
            return self._end(status, ended, reward=sum(self.turn_rewards) + score)
        except EpisodeFailedError as error:
            return self._end("failed", error.ended, error=str(error))
        finally:
            if environment is not None:
                await self._close(environment)

    async def _turns(self, environment: Environment) -> tuple[EpisodeEnd, EpisodeStatus]:
        name, dialogue = self.caller.name, self.dialogue
        observation = dialogue.encode(to_text(name, "reset", await self._call(environment, "reset")))
        if not self.num_tokens + len(observation):
            raise EpisodeFailedError("environment", f"{name}.reset said nothing, and the row has no prompt")
        if self._room(observation) < 1:
            text = f"{self.num_tokens + len(observation)} tokens before the first turn, the window has "
            raise EpisodeFailedError("overlong", f"{name}: {text}{self.limits.window_tokens}")
        for number in range(self.named.max_turns(self.limits.max_turns)):
            turn = await self._sample(observation)
            cut = turn.status == "truncated"
            action = Action(dialogue.text_of(turn.tokens), number, truncated=cut)
            step = to_step(name, await self._call(environment, "step", action))
            self.turn_rewards.append(float(step.reward))
            self.parts.update({key: float(part) for key, part in step.parts.items()})
            if step.done:
                return "done", turn.status
            observation = dialogue.encode(to_text(name, "step", step.observation))
            if self._room(observation) < 1:
                return "window", "truncated"
        return "max_turns", "truncated"

    async def _sample(self, observation: list[int]) -> Turn:
        """Returns the policy's turn behind the observation."""
        max_tokens = min(self.limits.max_new_tokens, self._room(observation))
        keep, self.num_tokens = self.num_tokens, self.num_tokens + len(observation)
        self.say(self, SayNext(self.start.episode, 0, 0, keep, max_tokens), observation)
        turn = await self.said.get()
        self.num_tokens += len(turn.tokens)
        return turn

    def _room(self, observation: Sequence[int]) -> int:
        """Tokens of the window that are left behind the observation."""
        return self.limits.window_tokens - self.num_tokens - len(observation)

    def _task(self) -> Task:
        start = self.start
        return Task(
            prompt=self.dialogue.text_of(self.prompt) if start.chat is None else start.chat,
            ground_truth=start.ground_truth,
            data_source=start.data_source,
            extra_info=start.extra_info,
            columns=start.columns,
            row=start.row,
            seed=start.seed,
            evaluation=start.evaluation,
        )

    async def _call(self, environment: Environment, method: str, *arguments: object) -> object:
        function = getattr(environment, method)
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
            unused=[],
            environment_s=self.caller.environment_s,
            error=error,
        )
