"""Plays one episode of an agent program: opens a session of the gateway, runs the program, and reads its reward."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from asyncrl.environments.dialogue.dialogue import Dialogue
from asyncrl.environments.episode import Limits, PolicyTurn, task_of
from asyncrl.environments.gateway.gateway import Gateway
from asyncrl.environments.gateway.session import Session
from asyncrl.environments.method_calls import EpisodeFailedError, to_json, to_reward
from asyncrl.environments.programs.program import Program, ProgramError, ProgramLostError
from asyncrl.types import EpisodeEnd
from asyncrl.wire.service_messages import EpisodeEnded, EpisodeStart, EpisodeStatus, NextTurn


async def play_program(
    start: EpisodeStart,
    program: Program,
    dialogue: Dialogue,
    limits: Limits,
    say: Callable[[ProgramPlayer, NextTurn, list[int]], None],
) -> EpisodeEnded:
    """Plays one episode, with a separate gateway."""
    gateway = Gateway()
    await gateway.start()
    try:
        return await ProgramPlayer(start, program, dialogue, limits, gateway, say).play()
    finally:
        await program.close()
        await gateway.close()


@dataclass
class ProgramPlayer:
    """One episode of a program. `say` asks the policy for a turn, which `receive` receives."""

    start: EpisodeStart
    program: Program
    dialogue: Dialogue
    limits: Limits
    gateway: Gateway
    say: Callable[[ProgramPlayer, NextTurn, list[int]], None]
    keeps_messages: bool = True
    """True if the messages are sent with the end of the episode."""
    session: Session = field(init=False)

    def __post_init__(self) -> None:
        self.session = Session(
            self.start.episode, self.dialogue, self.limits, lambda wish, tokens: self.say(self, wish, tokens)
        )

    def receive(self, branch: int, turn: PolicyTurn) -> None:
        """Receives the policy's turn after a `say`."""
        self.session.receive(branch, turn)

    async def play(self) -> EpisodeEnded:
        """Plays the episode to its end, which is returned; a failed one is also an end."""
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
        return EpisodeEnded(
            episode=self.start.episode,
            status=status,
            ended=ended,
            reward=reward,
            parts=parts,
            unused=unused,
            environment_s=max(0.0, time.monotonic() - began_s - self.session.sampling_s),
            error=error,
            messages=to_json(self.session.messages) if self.keeps_messages else b"",
        )

    async def _result(self, access: Any) -> Any:
        """The reward that the program returned; None if it gave up because of a limit. Raises EpisodeFailedError."""
        task = task_of(self.start, self.dialogue.text_of(self.start.prompt.tokens.tolist()))
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                return await self.program.run(asdict(task), access)
        except TimeoutError:
            text = f"{self.program.name} took longer than environment.timeout_s = {self.limits.timeout_s:g} s"
            raise EpisodeFailedError("timeout", text) from None
        except ProgramLostError as error:
            raise EpisodeFailedError("host", f"{self.program.name}: {error}") from None
        except ProgramError as error:
            if self.session.refused is None:
                raise EpisodeFailedError("environment", f"{self.program.name} failed: {error}") from None
            return None

    def _judge(self, result: Any) -> tuple[float, dict[str, float], EpisodeStatus, EpisodeEnd]:
        """Reward, parts, status and end. Raises EpisodeFailedError if there is no reward."""
        name, refused = self.program.name, self.session.refused
        if not self.session.num_turns:
            raise EpisodeFailedError("environment", f"{name} ended without a request for a turn of the policy")
        answer = self.session.posted if result is None else result
        if answer is None and refused is None:
            raise EpisodeFailedError("environment", f"{name} ended without a reward: it returned and posted none")
        reward, parts = (0.0, {}) if answer is None else to_reward(name, answer)
        if refused is None:
            return reward, parts, "truncated" if self.session.was_cut else "completed", "done"
        return reward, parts, "truncated", "max_turns" if refused.code == "max_turns" else "window"

    def _close(self) -> list[int]:
        self.gateway.end(self.session)
        return self.session.close()
