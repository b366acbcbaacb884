"""Plays one episode of an agent program: opens a session of the gateway, runs the program, and reads its reward."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from asyncrl.environments.calling import EpisodeFailedError, to_json, to_reward
from asyncrl.environments.dialogue import TextDialogue
from asyncrl.environments.episode import Limits, Turn, task_of
from asyncrl.environments.gateway.errors import TurnsUsedError
from asyncrl.environments.gateway.server import Gateway
from asyncrl.environments.gateway.session import Session
from asyncrl.environments.programs.program import Program, ProgramError, ProgramLostError
from asyncrl.types import EpisodeEnd
from asyncrl.util.redaction import describe
from asyncrl.wire.environment_messages import EpisodeEnded, EpisodeStart, EpisodeStatus, GroupPlace, SayNext


async def play_program(
    start: EpisodeStart,
    prompt: Sequence[int],
    program: Program,
    dialogue: TextDialogue,
    limits: Limits,
    say: Callable[[ProgramPlayer, SayNext, list[int]], None],
) -> EpisodeEnded:
    """Plays one episode, with a gateway of its own."""
    gateway = Gateway(dialogue)
    await gateway.start()
    try:
        return await ProgramPlayer(start, prompt, program, dialogue, limits, gateway, say).play()
    finally:
        await program.close()
        await gateway.close()


@dataclass
class ProgramPlayer:
    """One episode of a program. `say` asks the policy for a turn, which `hear` receives."""

    start: EpisodeStart
    prompt: Sequence[int]
    program: Program
    dialogue: TextDialogue
    limits: Limits
    gateway: Gateway
    say: Callable[[ProgramPlayer, SayNext, list[int]], None]
    waiting: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    """The members of each group that wait to be scored with the others. The players of a host share it."""
    keeps_messages: bool = True
    """True if the messages are sent with the end of the episode."""
    stuck_calls: list[asyncio.Future[Any]] = field(default_factory=list[asyncio.Future[Any]])
    """Calls in threads that did not return in time."""
    session: Session = field(init=False)
    place: GroupPlace | None = field(init=False)
    _scored_together: bool = field(init=False, default=False)
    _waits_since_s: float | None = field(init=False, default=None)
    _deadline: asyncio.Timeout | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.place = self.start.place
        self.session = Session(
            self.start.episode, self.dialogue, self.limits, lambda wish, tokens: self.say(self, wish, tokens)
        )

    @property
    def stuck(self) -> int:
        """Number of calls that did not return in time, and still run."""
        return len(self.stuck_calls)

    def hear(self, branch: int, turn: Turn) -> None:
        """Receives the policy's turn after a `say`."""
        self.session.hear(branch, turn)

    def is_scored_together(self) -> None:
        """Notes that without this episode the others of its group have no reward."""
        self._scored_together = True

    def waits(self) -> None:
        """Notes that the episode has been played, and waits for the others: this is not its own time."""
        if self.place is None or self._deadline is None or self._deadline.expired():
            return
        self.waiting.setdefault(self.place.group, set()).add(self.place.member)
        self._waits_since_s = time.monotonic()
        self._deadline.reschedule(asyncio.get_running_loop().time() + self.limits.group_timeout_s)

    async def play(self) -> EpisodeEnded:
        """Plays the episode to its end, which is returned; a failed one is an end, too."""
        access, began_s = self.gateway.open(self.session), time.monotonic()
        unused: list[int] = []
        reward, parts, error = 0.0, dict[str, float](), ""
        status, ended = "failed", "environment"
        try:
            result = await self._result(access)
            unused = self._close()
            reward, parts, status, ended = self._judge(result)
        except EpisodeFailedError as failure:
            ended, error = failure.ended, str(failure)
        finally:
            self._close()
        now_s = time.monotonic()
        group_wait_s = 0.0 if self._waits_since_s is None else now_s - self._waits_since_s
        return EpisodeEnded(
            episode=self.start.episode,
            status=status,
            ended=ended,
            reward=reward,
            parts=parts,
            turn_rewards=[],
            unused=unused,
            environment_s=max(0.0, now_s - began_s - self.session.sampling_s - group_wait_s),
            error=error,
            scored_together=self._scored_together,
            group_wait_s=group_wait_s,
            messages=to_json(self.session.messages) if self.keeps_messages else b"",
        )

    async def _result(self, access: Any) -> Any:
        """The reward that the program returned or, if it gave up because of a limit, that it has. Raises
        EpisodeFailedError."""
        task = task_of(self.start, self.dialogue.text_of(self.prompt))
        try:
            async with asyncio.timeout(self.limits.timeout_s) as self._deadline:
                return await self.program.run(asdict(task), access, stuck=self.stuck_calls, member=self)
        except TimeoutError:
            raise EpisodeFailedError("timeout", self._lateness()) from None
        except ProgramLostError as error:
            raise EpisodeFailedError("host", f"{self.program.name}: {error}") from None
        except ProgramError as error:
            self._gave_up(str(error))
            return error.result
        except Exception as error:  # the user's code: fails its episode, never the host
            self._gave_up(describe(error))
            return None

    def _lateness(self) -> str:
        """Who has not ended in time."""
        if self._waits_since_s is None or self.place is None:
            return f"{self.program.name} took longer than environment.timeout_s = {self.limits.timeout_s:g} s"
        missing = sorted(set(range(self.place.size)) - self.waiting[self.place.group])
        return (
            f"{self.program.name} waited {self.limits.group_timeout_s:g} s (environment.timeout_s for each try) for "
            f"the other members of its group, to be scored with them; not ended: {', '.join(map(str, missing))}"
        )

    def _gave_up(self, problem: str) -> None:
        """Raises EpisodeFailedError unless the last request was refused for a limit, and the episode can be scored
        without the others of its group."""
        if self.session.refused is None or self._scored_together:
            raise EpisodeFailedError("environment", f"{self.program.name} failed: {problem}")

    def _judge(self, result: Any) -> tuple[float, dict[str, float], EpisodeStatus, EpisodeEnd]:
        """Reward, parts, status and end. Raises EpisodeFailedError if there is no reward."""
        name, refused = self.program.name, self.session.refused
        if not self.session.num_turns:
            raise EpisodeFailedError("environment", f"{name} ended without a request for a turn of the policy")
        given = self.session.posted if result is None else result
        if given is None and refused is None:
            raise EpisodeFailedError("environment", f"{name} ended without a reward: it returned and posted none")
        reward, parts = (0.0, {}) if given is None else to_reward(name, given)
        if refused is None:
            return reward, parts, "truncated" if self.session.was_cut else "completed", "done"
        return reward, parts, "truncated", "max_turns" if isinstance(refused, TurnsUsedError) else "window"

    def _close(self) -> list[int]:
        if self.place is not None and self.place.group in self.waiting:
            self.waiting[self.place.group].discard(self.place.member)
            if not self.waiting[self.place.group]:
                del self.waiting[self.place.group]
        self.gateway.end(self.session)
        return self.session.close()
