"""Episodes in progress in a generator: their exact tokens, and the exchange with the environment hosts.

    start -> pool -> NextTurn  -> observe -> engine.add -> a completion -> act -> pool -> NextTurn ...
                  -> ended     -> tried again, or the member of its group is complete

The engine's prompt of a turn is the list of tokens that is trained; what was sampled is never encoded again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from asyncrl.config import Config
from asyncrl.errors import InvariantError
from asyncrl.generator.branch import Branch
from asyncrl.generator.groups import EndedEpisode, Running
from asyncrl.generator.vllm_backend.completion import Completion
from asyncrl.generator.vllm_backend.engine import Engine
from asyncrl.types import EpisodeOutcome

if TYPE_CHECKING:
    from asyncrl.environments.pool import EnvironmentPool, NextTurn
    from asyncrl.wire.environment_messages import EpisodeEnded

log = structlog.get_logger()

SLOW_WAIT_S = 0.1
"""A turn after which the generator waits longer for the environment counts as slow."""
MAX_HOST_LOSSES = 3
"""Tries of an episode whose host died that do not count as retries."""


@dataclass(slots=True)
class _Episode:
    """A member's episode. Its branches are by number; all but the first come from a conversation that was rewritten."""

    group: Running
    index: int
    """Of the member in the group."""
    branches: dict[int, Branch] = field(default_factory=dict[int, Branch])
    num_turns: int = 0
    """Turns that were asked for."""
    tries: int = 0
    """Failed tries that count."""
    host_losses: int = 0
    lost_tokens: int = 0
    waits_since_s: float = 0.0
    """Time at which the environment was asked last."""
    reset_s: float = 0.0
    """This and the next two as in `EpisodeOutcome`."""
    wait_s: float = 0.0
    slow_turns: int = 0

    def asked(self) -> None:
        """The environment was asked for what comes next."""
        if self.waits:
            self.waits_since_s = time.monotonic()

    def answered(self) -> None:
        """It has answered."""
        if not self.waits:
            return
        waited_s = time.monotonic() - self.waits_since_s
        if not self.has_sampled:
            self.reset_s += waited_s
            return
        self.wait_s += waited_s
        self.slow_turns += waited_s > SLOW_WAIT_S

    @property
    def num_action_tokens(self) -> int:
        """Tokens of the turns that have ended."""
        return sum(branch.num_action_tokens for branch in self.branches.values())

    @property
    def has_sampled(self) -> bool:
        """True if a turn has ended."""
        return any(branch.turns for branch in self.branches.values())

    @property
    def waits(self) -> bool:
        """True if none of its turns is in the engine."""
        return not any(branch.in_engine for branch in self.branches.values())


class Episodes:
    """The episodes of one generator in progress, by the engine's keys of their group's members. No method waits."""

    def __init__(self, config: Config, pool: EnvironmentPool, engine: Engine) -> None:
        self._config = config
        self._pool, self._engine = pool, engine
        self._live: dict[str, _Episode] = {}
        self._turns: dict[str, tuple[str, int]] = {}
        """The episode and the branch of each turn in the engine, by the engine's key of the turn."""

    @property
    def num_unsampled(self) -> int:
        """Episodes whose first turn has not arrived in the engine."""
        return sum(not one.num_turns for one in self._live.values())

    @property
    def num_live(self) -> int:
        """Episodes in progress."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Episodes that wait for their environments."""
        return sum(one.waits for one in self._live.values())

    @property
    def num_free(self) -> int | None:
        """Episodes that may start beside those in progress; None if there is no limit."""
        limit = self._config.environment.max_episodes
        return None if limit is None else limit - len(self._live)

    def num_action_tokens(self, key: str) -> int:
        """Tokens sampled so far: in turns that have ended, in those that are being sampled, and in failed tries."""
        one = self._live[key]
        running = sum(self._engine.num_generated(turn) for turn in self._turns_of(key))
        return one.lost_tokens + one.num_action_tokens + running

    def start(self, group: Running, index: int, key: str) -> None:
        """Starts the episode of a member of the group."""
        self._live[key] = _Episode(group, index)
        self._play(key)

    def act(self, completion: Completion) -> None:
        """Passes on a turn of the policy."""
        key, number = self._turns.pop(completion.key)
        branch = self._live[key].branches[number]
        branch.in_engine = False
        branch.act(completion)
        status = "truncated" if completion.status == "truncated" else "completed"
        self._pool.said(key, completion.tokens, status, branch=number)
        self._live[key].asked()

    def poll(self) -> list[EndedEpisode]:
        """Adds the next turns to the engine, and returns the members that are complete."""
        ended: list[EndedEpisode] = []
        for wish in self._pool.poll():
            if wish.episode not in self._live:
                continue
            one = self._live[wish.episode]
            one.answered()
            if isinstance(wish, tuple):
                self._add(one, wish)
            elif not self._tried_again(one, wish):
                ended.append(self._end(one, wish))
        return ended

    def drop(self, keys: Iterable[str]) -> None:
        """Ends episodes without a result."""
        keys = list(keys)
        for key in keys:
            self._abort(key)
            del self._live[key]
        self._pool.drop(keys)

    def _play(self, key: str) -> None:
        one = self._live[key]
        group, lease = one.group, one.group.lease
        self._pool.start(key, lease.prompt, seed=group.task_seed(self._config.seed), evaluation=lease.evaluation)
        one.asked()

    def _add(self, one: _Episode, wish: NextTurn) -> None:
        """Adds a turn to the engine. Raises InvariantError if its host sees another sequence than this process."""
        group, has_sampled = one.group, one.has_sampled
        branch = self._branch(one, wish)
        branch.observe(wish.observation.tolist())
        branch.numbers.append(one.num_turns)
        one.num_turns += 1
        branch.in_engine = True
        seed = None
        if self._config.deterministic:
            seed = group.seed(self._config.seed, one.index, len(branch.turns), wish.branch)
        turn = f"{wish.episode}/{wish.branch}" if wish.branch else wish.episode
        self._turns[turn] = wish.episode, wish.branch
        self._engine.add(
            turn,
            branch.tokens,
            kind=group.sampling(one.index),
            seed=seed,
            max_tokens=wish.max_tokens,
            salt=group.start_version if has_sampled else None,
            stop=wish.stop,
            priority=group.lease.ticket,
        )

    def _branch(self, one: _Episode, wish: NextTurn) -> Branch:
        """The branch of the wish, which is made when it is named for the first time."""
        branch = one.branches.get(wish.branch)
        if branch is None:
            prompt = one.group.lease.prompt.tokens
            source = one.branches[wish.source] if wish.branch else Branch(prompt.tolist())
            branch = one.branches[wish.branch] = source.fork(wish.keep)
            branch.has_row_prompt = wish.keep >= len(prompt) and (source.has_row_prompt or not wish.branch)
        if branch.in_engine or len(branch.tokens) != wish.keep:
            where = f"episode {wish.episode}, branch {wish.branch}"
            raise InvariantError(f"{where}: {len(branch.tokens)} tokens, its host says {wish.keep}")
        return branch

    def _turns_of(self, key: str) -> list[str]:
        """The engine's keys of the turns of an episode that are being sampled."""
        return [turn for turn, (episode, _) in self._turns.items() if episode == key]

    def _abort(self, key: str) -> int:
        """Aborts the turns that are being sampled. Returns the number of their tokens."""
        turns = self._turns_of(key)
        tokens = sum(self._engine.num_generated(turn) for turn in turns)
        self._engine.abort(turns)
        for turn in turns:
            del self._turns[turn]
        return tokens

    def _tried_again(self, one: _Episode, ended: EpisodeEnded) -> bool:
        """Starts the episode again if it failed and may be tried again. Returns True if it did."""
        if ended.status != "failed" or ended.ended == "overlong":
            return False
        if ended.ended == "host" and one.host_losses < MAX_HOST_LOSSES:
            one.host_losses += 1
        elif one.tries < self._config.environment.retries:
            one.tries += 1
        else:
            return False
        log.warning("episode tried again", episode=ended.episode, reason=ended.error)
        one.lost_tokens += self._abort(ended.episode) + one.num_action_tokens
        one.branches, one.num_turns = {}, 0
        self._play(ended.episode)
        return True

    def _end(self, one: _Episode, ended: EpisodeEnded) -> EndedEpisode:
        """Removes the episode. Each of its branches in which the policy has said something is a row."""
        key, prompt = ended.episode, one.group.lease.prompt.tokens
        one.lost_tokens += self._abort(key)
        for branch in one.branches.values():
            del branch.numbers[len(branch.turns) :]
            while branch.numbers and branch.numbers[-1] in ended.unused:
                one.lost_tokens += branch.drop_last_turn()
        del self._live[key]
        branches = [one.branches[number] for number in sorted(one.branches) if one.branches[number].turns]
        said = [
            (number, turn.tokens) for one in branches for number, (_, turn) in zip(one.numbers, one.turns, strict=True)
        ]
        turns = [tokens for _, tokens in sorted(said, key=lambda pair: pair[0])]
        branches = branches or [Branch(prompt.tolist(), has_row_prompt=True)]
        outcomes = [self._outcome(one, ended, branch, is_first=branch is branches[0]) for branch in branches]
        rows = [branch.to_completion(key, ended.status, len(prompt)) for branch in branches]
        return EndedEpisode(one.group, one.index, rows, outcomes, ended, turns)

    def _outcome(self, one: _Episode, ended: EpisodeEnded, branch: Branch, *, is_first: bool) -> EpisodeOutcome:
        """The outcome of a row; what is of the complete episode is with the first one."""
        rewards = ended.turn_rewards or [0.0] * one.num_turns
        return EpisodeOutcome(
            ended=ended.ended,
            turn_rewards=[rewards[number] for number in branch.numbers if number < len(rewards)],
            observation_tokens=branch.num_observation_tokens,
            environment_s=ended.environment_s if is_first else 0.0,
            tries=one.tries + one.host_losses if is_first else 0,
            lost_tokens=one.lost_tokens if is_first else 0,
            reset_s=one.reset_s if is_first else 0.0,
            wait_s=one.wait_s if is_first else 0.0,
            slow_turns=one.slow_turns if is_first else 0,
        )
