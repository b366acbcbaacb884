"""The tokens that the engine does not sample: those that end a completion, before `generator.min_new_tokens`.

The engine's log-probs are those of the distribution without these tokens. Policy and reference policy exclude the same
tokens, so that importance ratios, divergence and entropy are those of the distribution that was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.config import Config
from asyncrl.errors import InvariantError
from asyncrl.types import Group
from asyncrl.util.tokenizer import end_tokens


@dataclass(frozen=True, slots=True)
class Excluded:
    """Tokens that are excluded from the first `places` tokens of a completion."""

    places: int
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, config: Config) -> Excluded | None:
        """Returns the excluded tokens of a run; None if there are none."""
        if not config.generator.min_new_tokens:
            return None
        ends = end_tokens(config.model.path, trust_remote_code=config.model.trust_remote_code)
        return cls(config.generator.min_new_tokens, tuple(ends)) if ends else None

    def is_early(self, logit_index: Tensor) -> Tensor:
        """Returns a mask [N], true for the action tokens from which the tokens are excluded, from the positions [N]
        that score them. A completion is a run of consecutive positions."""
        begins = torch.ones_like(logit_index, dtype=torch.bool)
        begins[1:] = logit_index[1:] != logit_index[:-1] + 1
        index = torch.arange(len(logit_index), device=logit_index.device)
        first = torch.where(begins, index, 0).cummax(dim=0).values if len(index) else index
        return index - first < self.places

    def check(self, groups: Sequence[Group]) -> None:
        """Raises InvariantError if a trajectory has one of the tokens where it is excluded."""
        for group in groups:
            for number, trajectory in enumerate(group.trajectories):
                if trajectory.status == "failed":  # it is not trained
                    continue
                actions = torch.from_numpy(np.flatnonzero(trajectory.action_mask))
                early = actions[self.is_early(actions)].numpy()
                found = np.isin(trajectory.tokens[early], self.tokens)
                if found.any():
                    raise InvariantError(
                        f"ticket {group.ticket}, trajectory {number}: it has the end token "
                        f"{trajectory.tokens[early][found][0]} before generator.min_new_tokens = {self.places}"
                    )
