"""The sequence of tokens of an episode: what the policy saw and said."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from asyncrl.generator.engine import Completion
from asyncrl.types import NO_VERSION, Status


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
    """The number of each turn among those of the episode."""
    in_engine: bool = False
    """True while a turn is sampled."""

    def fork(self, keep: int) -> Branch:
        """Returns a branch that begins with the first `keep` tokens."""
        return Branch(self.tokens[:keep])

    def observe(self, tokens: Iterable[int]) -> None:
        """Appends what the environment says."""
        self.tokens.extend(tokens)

    def act(self, turn: Completion) -> None:
        """Appends a turn of the policy, which was sampled behind these tokens."""
        self.turns.append((len(self.tokens), turn))
        self.tokens.extend(turn.tokens)

    def drop_last_turn(self) -> int:
        """Removes the last turn, and what was said before it. Returns the number of its tokens."""
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
        """Everything behind its prompt up to the last turn as one completion, in which what the environment said is
        masked. The prompt is that of the row or, if the branch does not begin with it, all that comes before the first
        turn."""
        end = self.turns[-1][0] + len(self.turns[-1][1].tokens) if self.turns else len(self.tokens)
        first = self.turns[0][0] if self.turns else len(self.tokens)
        start = row_prompt_tokens if self.has_row_prompt else first
        length = end - start
        mask, logprobs = np.zeros(length, dtype=np.bool_), np.zeros(length, dtype=np.float32)
        versions = np.full(length, NO_VERSION, dtype=np.int32)
        for begin, turn in self.turns:
            own = slice(begin - start, begin - start + len(turn.tokens))
            mask[own], logprobs[own], versions[own] = True, turn.logprobs, turn.versions
        prompt = None if self.has_row_prompt else np.asarray(self.tokens[:start], dtype=np.int32)
        return Completion(key, self.tokens[start:end], logprobs, versions, status, mask, prompt)
