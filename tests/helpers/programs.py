"""Plays episodes of agent programs through a gateway, with a policy of given texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncrl.config.sections import Options
from asyncrl.environments.environment import Task
from asyncrl.environments.episode import Limits, PolicyTurn
from asyncrl.environments.gateway.server import Gateway
from asyncrl.environments.programs.program_player import ProgramPlayer
from asyncrl.environments.table import load_environment
from asyncrl.types import Prompt
from asyncrl.wire.service_messages import EpisodeEnded, EpisodeStart, NextTurn
from tests.helpers.dialogues import CharacterDialogue, turn


@dataclass
class Played:
    """An episode: its end, and the branches that a generator would have."""

    ended: EpisodeEnded
    branches: dict[int, list[int]] = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=list)
    wishes: list[NextTurn] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        """The text of each branch."""
        return [CharacterDialogue().text_of(tokens) for tokens in self.branches.values()]


def play_program(
    name: str,
    tasks: Sequence[Task],
    policy: Callable[[int, int], str],
    *,
    python: str | None = None,
    options: Options | None = None,
    limits: Limits | None = None,
) -> list[Played]:
    """Plays an episode of each task at once. `policy` returns its text in an episode and a turn; a text that ends
    in ~ is cut there."""
    limits = limits or Limits(2000, 200, 8, 60.0, 60.0)
    return asyncio.run(_play(name, tasks, policy, python, options or {}, limits))


async def _play(
    name: str,
    tasks: Sequence[Task],
    policy: Callable[[int, int], str],
    python: str | None,
    options: Options,
    limits: Limits,
) -> list[Played]:
    program: Any = load_environment(name, options, python=python)
    dialogue = CharacterDialogue()
    gateway, played = Gateway(), [Played(None) for _ in tasks]  # type: ignore[arg-type]

    def say(player: ProgramPlayer, wish: NextTurn, tokens: list[int]) -> None:
        number = int(player.start.episode)
        one = played[number]
        if wish.branch not in one.branches:
            one.branches[wish.branch] = one.branches.get(wish.source, [])[: wish.keep]
        branch = one.branches[wish.branch]
        assert len(branch) == wish.keep, "generator and host must agree on the length of a branch"
        branch += tokens
        text = policy(number, len(one.wishes))
        cut = text.endswith("~")
        said = [*map(ord, text[:-1])] if cut else turn(text)
        one.prompts.append(list(branch))
        one.wishes.append(wish)
        branch += said
        asyncio.get_running_loop().call_later(
            0.01, player.receive, wish.branch, PolicyTurn(said, "truncated" if cut else "completed")
        )

    await gateway.start()
    try:
        players = [
            ProgramPlayer(_start(number, task), program, dialogue, limits, gateway, say)
            for number, task in enumerate(tasks)
        ]
        for one, ended in zip(played, await asyncio.gather(*(player.play() for player in players)), strict=True):
            one.ended = ended
    finally:
        await program.close()
        await gateway.close()
    return played


def _start(number: int, task: Task) -> EpisodeStart:
    chat = task.prompt if isinstance(task.prompt, list) else [{"role": "user", "content": task.prompt}]
    prompt = Prompt(
        row=task.row,
        tokens=np.zeros(0, np.int32),
        ground_truth=task.ground_truth,
        data_source=task.data_source,
        extra_info=dict(task.extra_info),
        chat=chat,
        columns=dict(task.columns),
    )
    return EpisodeStart(str(number), prompt, task.seed)
