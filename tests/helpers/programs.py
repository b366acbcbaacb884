"""Plays episodes of agent programs through a gateway, with a policy of given texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.sections import Options
from asyncrl.environments.episode import Limits
from asyncrl.environments.gateway.gateway import Gateway
from asyncrl.environments.programs.program_player import ProgramPlayer
from asyncrl.environments.table import load_environment
from asyncrl.types import Prompt
from asyncrl.wire.service_messages import EpisodeEnded, EpisodeStart, NextTurn
from tests.helpers.dialogues import Branches, CharacterDialogue, policy_turn

LIMITS = Limits(2000, 200, 8, 60.0, 60.0)


@dataclass
class PlayedProgram(Branches):
    """An episode: its end, and the branches that a generator would have."""

    ended: EpisodeEnded = field(init=False)

    @property
    def texts(self) -> list[str]:
        """The text of each branch."""
        return [CharacterDialogue().text_of(tokens) for tokens in self.branches.values()]


def play_program(
    name: str,
    prompts: Sequence[Prompt],
    policy: Callable[[int, int], str],
    *,
    python: str | None = None,
    options: Options | None = None,
    limits: Limits = LIMITS,
) -> list[PlayedProgram]:
    """Plays an episode of each prompt at once. `policy` returns its text in an episode and a turn."""
    return asyncio.run(_play(load_environment(name, options or {}, python=python), prompts, policy, limits))


async def _play(
    program: Any, prompts: Sequence[Prompt], policy: Callable[[int, int], str], limits: Limits
) -> list[PlayedProgram]:
    dialogue, gateway, played = CharacterDialogue(), Gateway(), [PlayedProgram() for _ in prompts]

    def say(player: ProgramPlayer, wish: NextTurn, tokens: list[int]) -> None:
        number = int(player.start.episode)
        said = policy_turn(policy(number, len(played[number].wishes)))
        played[number].add(wish, tokens, said.tokens)
        asyncio.get_running_loop().call_later(0.01, player.receive, wish.branch, said)

    await gateway.start()
    try:
        players = [
            ProgramPlayer(EpisodeStart(str(number), prompt), program, dialogue, limits, gateway, say)
            for number, prompt in enumerate(prompts)
        ]
        for one, ended in zip(played, await asyncio.gather(*(player.play() for player in players)), strict=True):
            one.ended = ended
    finally:
        await program.close()
        await gateway.close()
    return played
