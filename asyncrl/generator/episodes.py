"""Episodes in progress in a generator: their exact tokens, and the exchange with the environment hosts.

    start -> pool -> NextTurn -> engine.add -> a completion -> act -> pool -> NextTurn ...
                  -> EpisodeEnded -> tried again, or the member of its group is complete

The engine's prompt of a turn is the list of tokens that is trained; sampled tokens are never encoded again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import structlog

from asyncrl.config.config import Config
from asyncrl.errors import InvariantError
from asyncrl.generator.engine import Completion, Engine
from asyncrl.generator.groups import GroupInProgress
from asyncrl.types import NO_VERSION, EpisodeOutcome, Status
from asyncrl.wire.service_messages import EpisodeEnded, NextTurn

if TYPE_CHECKING:
    from asyncrl.environments.pool import EnvironmentPool

log = structlog.get_logger()

SLOW_WAIT_S = 0.1
"""A turn after which the generator waits longer for the environment counts as slow."""
MAX_HOST_LOSSES = 3
"""Tries of an episode whose host died that do not count as retries."""
RETRIES, RETRY_PAUSE_S = 1, 1.0
"""Retries of an episode whose environment failed, before it counts as failed, and the pause before one."""


@dataclass(slots=True)
class Branch:
    """One sequence of an episode, append-only. It begins with context: tokens that are not trained here."""

    tokens: list[int]
    """The context, the turns and the observations."""
    turns: list[tuple[int, Completion]] = field(default_factory=list[tuple[int, Completion]])
    """Each turn with the number of tokens before it."""
    has_row_prompt: bool = False
    """True if it begins with the prompt of the row."""
    numbers: list[int] = field(default_factory=list[int])
    """The number of each turn in the episode."""
    in_engine: bool = False
    """True while a turn is sampled."""

    def act(self, turn: Completion) -> None:
        """Appends a turn of the policy, which was sampled after these tokens."""
        self.turns.append((len(self.tokens), turn))
        self.tokens.extend(turn.tokens)

    def drop_last_turn(self) -> int:
        """Removes the last turn, and the observation before it. Returns the number of its tokens."""
        begin, turn = self.turns.pop()
        self.numbers.pop()
        del self.tokens[begin:]
        return len(turn.tokens)

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

    def to_completion(self, key: str, status: Status, row_prompt_tokens: int) -> Completion:
        """Returns everything after the prompt up to the last turn, as one completion, in which observations are masked.
        The prompt is the row's or, if the branch does not begin with it, all that comes before the first turn."""
        end = self.turns[-1][0] + len(self.turns[-1][1].tokens) if self.turns else len(self.tokens)
        first = self.turns[0][0] if self.turns else len(self.tokens)
        start = row_prompt_tokens if self.has_row_prompt else first
        length = end - start
        mask, logprobs = np.zeros(length, dtype=np.bool_), np.zeros(length, dtype=np.float32)
        versions = np.full(length, NO_VERSION, dtype=np.int32)
        for begin, turn in self.turns:
            span = slice(begin - start, begin - start + len(turn.tokens))
            mask[span], logprobs[span], versions[span] = True, turn.logprobs, turn.versions
        prompt = None if self.has_row_prompt else np.asarray(self.tokens[:start], dtype=np.int32)
        return Completion(key, self.tokens[start:end], logprobs, versions, status, mask, prompt)


@dataclass(slots=True)
class _Episode:
    """A member's episode. Its branches are by number; all but the first come from a conversation that was rewritten."""

    group: GroupInProgress
    index: int
    """Number of the member in the group."""
    branches: dict[int, Branch] = field(default_factory=dict[int, Branch])
    num_turns: int = 0
    """Turns that were requested."""
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
        """Notes that the environment was asked for its next observation."""
        if self.waits:
            self.waits_since_s = time.monotonic()

    def answered(self) -> None:
        """Notes its answer."""
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
        return sum(branch.num_action_tokens for branch in self.branches.values())

    @property
    def has_sampled(self) -> bool:
        """True if a turn has ended."""
        return any(branch.turns for branch in self.branches.values())

    @property
    def waits(self) -> bool:
        """True if none of its turns is in the engine."""
        return not any(branch.in_engine for branch in self.branches.values())


def _turn_key(episode: str, branch: int) -> str:
    return f"{episode}/{branch}" if branch else episode


class Episodes:
    """The episodes of one generator in progress, by the engine's keys of their group's members. No method waits."""

    def __init__(self, config: Config, pool: EnvironmentPool, engine: Engine) -> None:
        self._config = config
        self._pool, self._engine = pool, engine
        self._live: dict[str, _Episode] = {}
        self._turns: dict[str, tuple[str, int]] = {}
        """The episode and the branch of each turn in the engine, by the engine's key of the turn."""
        self._retries: list[tuple[float, str]] = []
        """When episodes are to be tried again, and their keys."""

    @property
    def num_starting(self) -> int:
        """Episodes whose first turn has not arrived in the engine."""
        return sum(not episode.num_turns for episode in self._live.values())

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Episodes that wait for their environments."""
        return sum(episode.waits for episode in self._live.values())

    @property
    def num_free(self) -> int | None:
        """Episodes that may start in addition to those in progress; None if there is no limit."""
        limit = self._config.environment.max_episodes
        return None if limit is None else limit - len(self._live)

    def num_action_tokens(self, key: str) -> int:
        """Tokens sampled so far: in turns that have ended, in those that are being sampled, and in failed tries."""
        episode = self._live[key]
        running = sum(self._engine.num_generated(turn) for turn in self._turns_of(key))
        return episode.lost_tokens + episode.num_action_tokens + running

    def start(self, group: GroupInProgress, index: int, key: str) -> None:
        """Starts the episode of a member of the group."""
        self._live[key] = _Episode(group, index)
        self._play(key)

    def flush(self) -> None:
        """Sends pending turns to the environments."""
        self._pool.flush()

    def act(self, completion: Completion) -> None:
        """Passes on a turn of the policy."""
        key, number = self._turns.pop(completion.key)
        branch = self._live[key].branches[number]
        branch.in_engine = False
        branch.act(completion)
        status = "truncated" if completion.status == "truncated" else "completed"
        self._pool.said(key, completion.tokens, status, branch=number)
        self._live[key].asked()

    def poll(self) -> list[list[Completion]]:
        """Adds the next turns to the engine, and returns the rows of the members that are complete: one for each
        sequence of tokens; a conversation that was rewritten has several."""
        ended: list[list[Completion]] = []
        self._start_retries()
        for reply, observation in self._pool.poll():
            if reply.episode not in self._live:
                continue
            episode = self._live[reply.episode]
            episode.answered()
            if isinstance(reply, NextTurn):
                self._add(episode, reply, observation.tolist())
            elif not self._tried_again(episode, reply):
                ended.append(self._end(episode, reply))
        return ended

    def drop(self, keys: Iterable[str]) -> None:
        """Ends episodes without a result."""
        keys = list(keys)
        for key in keys:
            self._abort(key)
            del self._live[key]
        self._pool.drop(keys)

    def _start_retries(self) -> None:
        now_s = time.monotonic()
        due = [key for due_s, key in self._retries if due_s <= now_s]
        self._retries = [(due_s, key) for due_s, key in self._retries if due_s > now_s]
        for key in due:
            if key in self._live:
                self._play(key)

    def _play(self, key: str) -> None:
        episode = self._live[key]
        group, lease = episode.group, episode.group.lease
        seed = group.task_seed(self._config.seed)
        self._pool.start(key, lease.prompt, seed=seed, evaluation=lease.evaluation)
        episode.asked()

    def _add(self, episode: _Episode, reply: NextTurn, observation: list[int]) -> None:
        """Adds a turn to the engine. Raises InvariantError if its host sees another sequence than this process."""
        group, has_sampled = episode.group, episode.has_sampled
        branch = self._branch(episode, reply)
        branch.tokens += observation
        branch.numbers.append(episode.num_turns)
        episode.num_turns += 1
        branch.in_engine = True
        seed = None
        if self._config.deterministic:
            seed = group.seed(self._config.seed, episode.index, len(branch.turns), reply.branch)
        turn = _turn_key(reply.episode, reply.branch)
        self._turns[turn] = reply.episode, reply.branch
        self._engine.add(
            turn,
            branch.tokens,
            kind=group.sampling(episode.index),
            seed=seed,
            max_tokens=reply.max_tokens,
            salt=group.start_version if has_sampled else None,
            stop=reply.stop,
            priority=group.lease.ticket,
        )

    def _branch(self, episode: _Episode, reply: NextTurn) -> Branch:
        branch = episode.branches.get(reply.branch)
        if branch is None:
            prompt = episode.group.lease.prompt.tokens
            source = episode.branches[reply.source] if reply.branch else Branch(prompt.tolist())
            branch = episode.branches[reply.branch] = Branch(source.tokens[: reply.keep])
            branch.has_row_prompt = reply.keep >= len(prompt) and (source.has_row_prompt or not reply.branch)
        if branch.in_engine or len(branch.tokens) != reply.keep:
            where = f"episode {reply.episode}, branch {reply.branch}"
            raise InvariantError(f"{where}: {len(branch.tokens)} tokens, its host has {reply.keep}")
        return branch

    def _turns_of(self, key: str) -> list[str]:
        """Returns the engine's keys of the turns of an episode that are being sampled."""
        return [_turn_key(key, number) for number, branch in self._live[key].branches.items() if branch.in_engine]

    def _abort(self, key: str) -> int:
        """Aborts the turns that are being sampled. Returns the number of their tokens."""
        turns = self._turns_of(key)
        tokens = sum(self._engine.num_generated(turn) for turn in turns)
        self._engine.abort(turns)
        for turn in turns:
            del self._turns[turn]
        return tokens

    def _tried_again(self, episode: _Episode, ended: EpisodeEnded) -> bool:
        """Starts the episode again if it failed and may be tried again. Returns True if it did."""
        if ended.status != "failed" or ended.ended == "overlong":
            return False
        pause_s = 0.0
        if ended.ended == "host" and episode.host_losses < MAX_HOST_LOSSES:
            episode.host_losses += 1
        elif episode.tries < RETRIES:
            pause_s = RETRY_PAUSE_S
            episode.tries += 1
        else:
            return False
        log.warning("episode tried again", episode=ended.episode, reason=ended.error, pause_s=pause_s)
        episode.lost_tokens += self._abort(ended.episode) + episode.num_action_tokens
        episode.branches, episode.num_turns = {}, 0
        self._retries.append((time.monotonic() + pause_s, ended.episode))
        return True

    def _end(self, episode: _Episode, ended: EpisodeEnded) -> list[Completion]:
        """Removes the episode. Each of its branches with a turn of the policy is a row."""
        key, prompt = ended.episode, episode.group.lease.prompt.tokens
        episode.lost_tokens += self._abort(key)
        for branch in episode.branches.values():
            del branch.numbers[len(branch.turns) :]
            while branch.numbers and branch.numbers[-1] in ended.unused:
                episode.lost_tokens += branch.drop_last_turn()
        del self._live[key]
        branches = [episode.branches[number] for number in sorted(episode.branches) if episode.branches[number].turns]
        turns = {number: turn.tokens for x in branches for number, (_, turn) in zip(x.numbers, x.turns, strict=True)}
        branches = branches or [Branch(prompt.tolist(), has_row_prompt=True)]
        group, index = episode.group, episode.index
        group.ends[index], group.turns[index] = ended, [turns[number] for number in sorted(turns)]
        group.outcomes[index] = [_outcome(episode, ended, branch, is_first=not i) for i, branch in enumerate(branches)]
        return [branch.to_completion(key, ended.status, len(prompt)) for branch in branches]


def _outcome(episode: _Episode, ended: EpisodeEnded, branch: Branch, *, is_first: bool) -> EpisodeOutcome:
    """Returns the outcome of a row; the first one has the values of the complete episode."""
    rewards = ended.turn_rewards or [0.0] * episode.num_turns
    return EpisodeOutcome(
        ended=ended.ended,
        turn_rewards=[rewards[number] for number in branch.numbers if number < len(rewards)],
        observation_tokens=branch.num_observation_tokens,
        environment_s=ended.environment_s if is_first else 0.0,
        tries=episode.tries + episode.host_losses if is_first else 0,
        lost_tokens=episode.lost_tokens if is_first else 0,
        reset_s=episode.reset_s if is_first else 0.0,
        wait_s=episode.wait_s if is_first else 0.0,
        slow_turns=episode.slow_turns if is_first else 0,
    )
