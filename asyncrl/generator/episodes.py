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

import numpy as np
import structlog
from numpy.typing import NDArray

from asyncrl.config import Config
from asyncrl.generator.groups import EndedEpisode, Running
from asyncrl.generator.vllm_backend.completion import Completion
from asyncrl.generator.vllm_backend.engine import Engine
from asyncrl.types import NO_VERSION, EpisodeOutcome

if TYPE_CHECKING:
    from asyncrl.environments.pool import EnvironmentPool
    from asyncrl.wire.environment_messages import EpisodeEnded

log = structlog.get_logger()

SLOW_WAIT_S = 0.1
"""A turn after which the generator waits longer for the environment counts as slow."""
MAX_HOST_LOSSES = 3
"""Tries of an episode whose host died that do not count as retries."""


@dataclass(slots=True)
class Sequence:
    """What the policy saw and said in an episode, append-only."""

    prompt: NDArray[np.int32]
    tokens: list[int] = field(init=False)
    """The prompt, the turns and the observations."""
    turns: list[tuple[int, Completion]] = field(default_factory=list[tuple[int, Completion]])
    """Each turn with the number of tokens before it."""

    def __post_init__(self) -> None:
        self.tokens = self.prompt.tolist()

    def observe(self, tokens: Iterable[int]) -> list[int]:
        """Appends what the environment says. Returns all tokens, behind which the next turn is sampled."""
        self.tokens.extend(tokens)
        return self.tokens

    def act(self, turn: Completion) -> None:
        """Appends a turn of the policy, which was sampled behind these tokens."""
        self.turns.append((len(self.tokens), turn))
        self.tokens.extend(turn.tokens)

    @property
    def num_action_tokens(self) -> int:
        """Tokens sampled by the policy."""
        return sum(len(turn.tokens) for _, turn in self.turns)

    @property
    def num_observation_tokens(self) -> int:
        """Tokens of the environment between the first and the last turn."""
        if not self.turns:
            return 0
        (first, _), (last, turn) = self.turns[0], self.turns[-1]
        return last + len(turn.tokens) - first - self.num_action_tokens

    def to_completion(self, key: str, status: str) -> Completion:
        """Everything behind the prompt up to the last turn, as one completion; what the environment said is masked."""
        start = len(self.prompt)
        end = self.turns[-1][0] + len(self.turns[-1][1].tokens) if self.turns else len(self.tokens)
        length = end - start
        mask, logprobs = np.zeros(length, dtype=np.bool_), np.zeros(length, dtype=np.float32)
        versions = np.full(length, NO_VERSION, dtype=np.int32)
        for begin, turn in self.turns:
            own = slice(begin - start, begin - start + len(turn.tokens))
            mask[own], logprobs[own], versions[own] = True, turn.logprobs, turn.versions
        return Completion(key, self.tokens[start:end], logprobs, versions, status, mask)  # type: ignore[arg-type]


@dataclass(slots=True)
class _Episode:
    group: Running
    index: int
    """Of the member in the group."""
    sequence: Sequence
    tries: int = 0
    """Failed tries that count."""
    host_losses: int = 0
    lost_tokens: int = 0
    in_engine: bool = False
    waits_since_s: float = 0.0
    """Time at which the environment was asked last."""
    reset_s: float = 0.0
    """This and the next two as in `EpisodeOutcome`."""
    wait_s: float = 0.0
    slow_turns: int = 0

    def asked(self) -> None:
        """The environment was asked for the next turn."""
        self.waits_since_s = time.monotonic()

    def answered(self) -> None:
        """It has answered."""
        waited_s = time.monotonic() - self.waits_since_s
        if not self.sequence.turns:
            self.reset_s += waited_s
            return
        self.wait_s += waited_s
        self.slow_turns += waited_s > SLOW_WAIT_S


class Episodes:
    """The episodes of one generator in progress, by the engine's keys. No method waits."""

    def __init__(self, config: Config, pool: EnvironmentPool, engine: Engine) -> None:
        self._config = config
        self._pool, self._engine = pool, engine
        self._live: dict[str, _Episode] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._live

    @property
    def num_unsampled(self) -> int:
        """Episodes whose first turn has not arrived in the engine."""
        return sum(not one.sequence.turns and not one.in_engine for one in self._live.values())

    @property
    def num_live(self) -> int:
        """Episodes in progress."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Episodes that wait for their environments."""
        return sum(not one.in_engine for one in self._live.values())

    @property
    def num_free(self) -> int | None:
        """Episodes that may start beside those in progress; None if there is no limit."""
        limit = self._config.environment.max_episodes
        return None if limit is None else limit - len(self._live)

    def num_action_tokens(self, key: str) -> int:
        """Tokens sampled so far in the turns that have ended, and in failed tries."""
        one = self._live[key]
        return one.lost_tokens + one.sequence.num_action_tokens

    def start(self, group: Running, index: int, key: str) -> None:
        """Starts the episode of a member of the group."""
        self._live[key] = _Episode(group, index, Sequence(group.lease.prompt.tokens))
        self._play(key)

    def act(self, completion: Completion) -> None:
        """Passes on a turn of the policy."""
        one = self._live[completion.key]
        one.in_engine = False
        one.sequence.act(completion)
        status = "truncated" if completion.status == "truncated" else "completed"
        self._pool.said(completion.key, completion.tokens, status)
        one.asked()

    def poll(self) -> list[EndedEpisode]:
        """Adds the next turns to the engine, and returns the members that are complete."""
        ended: list[EndedEpisode] = []
        for wish in self._pool.poll():
            if wish.episode not in self._live:
                continue
            one = self._live[wish.episode]
            if not one.in_engine:
                one.answered()
            if isinstance(wish, tuple):
                self._add(wish.episode, one, one.sequence.observe(wish.observation.tolist()), wish.max_tokens)
            elif not self._tried_again(one, wish):
                ended.append(self._end(one, wish))
        return ended

    def drop(self, keys: Iterable[str]) -> None:
        """Ends episodes without a result; their turns in the engine are the caller's to abort."""
        dropped = [key for key in keys if self._live.pop(key, None) is not None]
        self._pool.drop(dropped)

    def in_engine(self, key: str) -> bool:
        """True if a turn of the episode is being sampled."""
        return self._live[key].in_engine

    def _play(self, key: str) -> None:
        one = self._live[key]
        group, lease = one.group, one.group.lease
        self._pool.start(key, lease.prompt, seed=group.task_seed(self._config.seed), evaluation=lease.evaluation)
        one.asked()

    def _add(self, key: str, one: _Episode, tokens: list[int], max_tokens: int) -> None:
        group, turn = one.group, len(one.sequence.turns)
        seed = None
        if self._config.deterministic:
            seed = group.seed(self._config.seed, one.index, turn)
        one.in_engine = True
        kind = group.sampling(one.index)
        salt = group.start_version if turn else None
        self._engine.add(key, tokens, kind=kind, seed=seed, max_tokens=max_tokens, salt=salt)

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
        if one.in_engine:
            self._engine.abort([ended.episode])
            one.in_engine = False
        one.lost_tokens += one.sequence.num_action_tokens
        one.sequence = Sequence(one.sequence.prompt)
        self._play(ended.episode)
        return True

    def _end(self, one: _Episode, ended: EpisodeEnded) -> EndedEpisode:
        key = ended.episode
        if one.in_engine:  # its host died
            self._engine.abort([key])
        del self._live[key]
        outcome = EpisodeOutcome(
            ended=ended.ended,
            turn_rewards=ended.turn_rewards,
            observation_tokens=one.sequence.num_observation_tokens,
            environment_s=ended.environment_s,
            tries=one.tries + one.host_losses,
            lost_tokens=one.lost_tokens,
            reset_s=one.reset_s,
            wait_s=one.wait_s,
            slow_turns=one.slow_turns,
        )
        completion = one.sequence.to_completion(key, ended.status)
        return EndedEpisode(one.group, one.index, completion, outcome, ended)
