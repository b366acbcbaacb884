"""`asyncrl play`: plays episodes of an environment in this process and prints them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from asyncrl.cli.evaluate import quiet_logs
from asyncrl.config.config import Config
from asyncrl.environments.dialogue.conversation import Display, Shown
from asyncrl.environments.dialogue.dialogue import Dialogue
from asyncrl.environments.episode import Limits, PolicyTurn
from asyncrl.environments.player import Player, play_alone
from asyncrl.environments.programs.program_player import ProgramPlayer, play_program
from asyncrl.environments.table import EnvironmentTable, Named
from asyncrl.errors import ConfigError
from asyncrl.launch.checks import check_data, check_environments, check_model, run_recipes
from asyncrl.observe.console import EXIT_DONE, EXIT_FAILED
from asyncrl.types import Prompt
from asyncrl.util.model_files import end_tokens
from asyncrl.util.text import printable
from asyncrl.wire.service_messages import EpisodeEnded, EpisodeStart, NextTurn

if TYPE_CHECKING:
    from asyncrl.generator.engine import Engine

Speaker = Callable[[list[int], int], PolicyTurn]
"""Returns the policy's turn after the tokens, of at most this many tokens."""


class EpisodePart(NamedTuple):
    """A part of an episode."""

    tokens: list[int]
    said: bool
    """True for the policy's text."""
    branch: int = 0
    kept: tuple[int, list[int]] | None = None
    """For the first part of a branch: the branch that it continues, and the tokens taken from that one."""


class Transcript:
    """The parts of an episode, and the tokens of its branches."""

    def __init__(self, prompt: Prompt, speaker: Speaker) -> None:
        tokens = prompt.tokens.tolist()
        self.lines = [EpisodePart(tokens, said=False)]
        self._speaker, self._prompt = speaker, tokens
        self._branches: dict[int, list[int]] = {}

    def say(self, player: Player | ProgramPlayer, wish: NextTurn, observation: list[int]) -> None:
        """Samples the policy's turn after the observation."""
        is_new = wish.branch not in self._branches
        if is_new:
            source = self._branches[wish.source] if wish.branch else self._prompt
            self._branches[wish.branch] = source[: wish.keep]
        if not wish.keep and not wish.branch:  # another prompt than the row's
            self.lines.clear()
        tokens = self._branches[wish.branch]
        if observation:
            kept = (wish.source, list(tokens)) if is_new and wish.branch else None
            self.lines.append(EpisodePart(observation, False, wish.branch, kept))
        tokens += observation
        turn = self._speaker(tokens, wish.max_tokens)
        tokens += turn.tokens
        self.lines.append(EpisodePart(list(turn.tokens), True, wish.branch))
        player.receive(wish.branch, turn)


def play(config: Config, console: Console, *, rows: int, say: list[str], typed: bool) -> int:
    """Plays the first `rows` rows of the training data, and returns the exit code: EXIT_FAILED if an environment has
    failed. The policy is the model in `model.path`, the texts `say`, one in each turn, or the user (`typed`).

    Raises ConfigError when config, model or data cannot be used, and if there is no environment.
    """
    if config.environment.name is None:
        raise ConfigError("environment.name: required, but not set; give one as environment.name=file.py:Class")
    if say and typed:
        raise ConfigError("--say and --typed: both give the policy's turns; use one of them")
    run_recipes(config, console)
    prompt_tokens = check_model(config)
    check_data(config, console)
    check_environments(config, console, prompt_tokens)
    from asyncrl.data.prompts import TrainingRows

    prompts = TrainingRows(config, limit_tokens=prompt_tokens)
    window = prompt_tokens + config.generator.max_new_tokens
    dialogue = Dialogue.of(config)
    speaker, close = _speaker(config, dialogue, _ends(config, prompts.prompt(0), dialogue), say, typed)
    failed = 0
    try:
        for row in range(rows):
            ended = _play(config, prompts.prompt(row), dialogue, speaker, window, console)
            failed += ended.status == "failed"
    finally:
        close()
    return EXIT_FAILED if failed else EXIT_DONE


def _play(
    config: Config, prompt: Prompt, dialogue: Dialogue, speaker: Speaker, window: int, console: Console
) -> EpisodeEnded:
    settings = config.environment
    assert settings.name is not None
    found = EnvironmentTable(settings.name, settings.options, python=settings.python).of(prompt.data_source)
    seed = int(np.random.SeedSequence([config.seed, 0, prompt.row]).generate_state(1)[0])
    start = EpisodeStart(f"row-{prompt.row}", prompt, seed)
    limits, transcript = Limits.of(config, window_tokens=window), Transcript(prompt, speaker)
    if isinstance(found, Named):
        threads = ThreadPoolExecutor(1)
        player = Player(start, found, dialogue, limits, threads, transcript.say)
        ended = play_alone(player)
    else:
        chat = dialogue.chat_for(prompt.columns)
        ended = asyncio.run(play_program(start, found, chat, limits, transcript.say))
    is_chat = prompt.chat is not None or not isinstance(found, Named)
    _print(console, prompt, transcript.lines, dialogue, ended, is_chat=is_chat)
    return ended


def _print(
    console: Console,
    prompt: Prompt,
    lines: list[EpisodePart],
    dialogue: Dialogue,
    ended: EpisodeEnded,
    *,
    is_chat: bool,
) -> None:
    console.print(Text(f"row {prompt.row}, data source {prompt.data_source}", style="bold"))
    display = Display(dialogue.chat) if is_chat else None
    rewards = iter(ended.turn_rewards)
    for line in lines:
        if line.kept is not None:
            source, kept = line.kept
            text = f"branch {line.branch}: the first {len(kept)} tokens of branch {source}, and from there"
            console.print(Text(f"{'':>12}  {text}", style="dim"), soft_wrap=True)
        for number, (name, text) in enumerate(shown := _shown(line, dialogue, display)):
            content = Text(f"{name:>12}  ", style="dim")
            content.append(printable(text), style=_style(name, line.said))
            if number == len(shown) - 1:
                reward = next(rewards, None) if line.said else None
                end = f", branch {line.branch}" if line.branch else ""
                end += "" if reward is None else f", reward {reward:g}"
                content.append(f"   {len(line.tokens)} tokens{end}", style="dim")
            console.print(content, soft_wrap=True)
    parts = "".join(f", {name} {value:g}" for name, value in sorted(ended.parts.items()))
    result = f"error: {ended.error}" if ended.error else f"reward {ended.reward:g}{parts}"
    console.print(Text(f"{ended.status} ({ended.ended}): {result}\n", style="red" if ended.error else ""))


def _shown(line: EpisodePart, dialogue: Dialogue, display: Display | None) -> list[Shown]:
    """The messages of a part of the episode; at least one."""
    if display is None:
        return [Shown("policy" if line.said else "environment", dialogue.text_of(line.tokens))]
    if line.said:
        return display.said(line.tokens)
    before = [] if line.kept is None else line.kept[1]
    return display.heard(line.tokens, before=before) or [Shown("environment", "")]


def _style(name: str, said: bool) -> str:
    if not said:
        return "cyan"
    return {"reasoning": "green", "calls": "bold magenta"}.get(name, "bold green")


def _ends(config: Config, prompt: Prompt, dialogue: Dialogue) -> list[int]:
    """The end of a given turn: the token with which the chat template ends one, or one at which the engine stops."""
    if prompt.chat is not None:
        return [dialogue.chat.ends.last]
    return end_tokens(config.model.path, trust_remote_code=config.model.trust_remote_code)[:1]


def _speaker(
    config: Config, dialogue: Dialogue, ends: list[int], say: list[str], typed: bool
) -> tuple[Speaker, Callable[[], None]]:
    """Returns the policy, and what ends it."""
    if typed:
        return lambda tokens, _: _typed(dialogue, tokens, ends), lambda: None
    if say:
        texts = iter(say * config.environment.max_turns)
        return lambda _, limit: _of_text(dialogue, next(texts), ends, limit), lambda: None
    from asyncrl.generator.engine import make_own_engine

    quiet_logs()
    engine = make_own_engine(config)
    return lambda tokens, limit: _sampled(engine, tokens, limit), engine.close


def _typed(dialogue: Dialogue, tokens: list[int], ends: list[int]) -> PolicyTurn:
    sys.stdout.write(f"{dialogue.text_of(tokens)}\n> ")
    sys.stdout.flush()
    line = sys.stdin.readline()
    if not line:
        raise ConfigError("--typed: the input has ended before the episode")
    return PolicyTurn([*dialogue.encode(line.rstrip("\n")), *ends], "completed")


def _of_text(dialogue: Dialogue, text: str, ends: list[int], limit: int) -> PolicyTurn:
    tokens = [*dialogue.encode(text), *ends]
    return PolicyTurn(tokens[:limit], "completed" if len(tokens) <= limit else "truncated")


def _sampled(engine: Engine, tokens: list[int], limit: int) -> PolicyTurn:
    engine.add("turn", tokens, max_tokens=limit)
    while True:
        for completion in engine.step():
            return PolicyTurn(completion.tokens, "truncated" if completion.status == "truncated" else "completed")
