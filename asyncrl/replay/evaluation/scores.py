"""Metrics of an evaluation: rewards and pass@k, over all prompts and by data source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np

from asyncrl.types import Status
from asyncrl.util.durable import Durable
from asyncrl.wire.messages import Evaluated

CORRECT = 1.0 - 1e-6
"""A completion with at least this reward is correct."""


class PromptScore(Durable):
    """The result of one evaluation prompt."""

    data_source: str
    rewards: list[float]
    """Reward of each completion; 0 for a failed one."""
    status: list[Status]
    tokens: int
    """Tokens of all completions."""

    @classmethod
    def of(cls, result: Evaluated) -> Self:
        """The score of an evaluated prompt."""
        return cls(result.data_source, result.rewards, result.status, result.tokens)

    @property
    def num_correct(self) -> int:
        """Completions with a reward of at least CORRECT."""
        return sum(
            reward >= CORRECT and status != "failed" for reward, status in zip(self.rewards, self.status, strict=True)
        )


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k samples is correct: 1 - C(n - c, k) / C(n, k)
    (arXiv:2107.03374 eq. 1)."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def pass_ks(num_samples: int) -> list[int]:
    """The values of k that are reported: 1, 2, 4, ... and the number of samples."""
    return [*(1 << i for i in range(num_samples.bit_length()) if 1 << i < num_samples), num_samples]


def score_table(scores: Iterable[PromptScore]) -> dict[str, float]:
    """`reward`, `pass@k`, `completion_tokens` (mean), `truncated` (fraction of completions), `failed` (completions
    without a reward; they are not correct, and `reward` is the mean of the others) and `prompts`; over all prompts,
    each with the same weight, and again for each data source as `<data source>/<name>`. Without any reward there is no
    `reward`."""
    scores = list(scores)
    table = _table(scores)
    for source in sorted({score.data_source for score in scores}):
        own = _table([score for score in scores if score.data_source == source])
        table |= {f"{source}/{name}": value for name, value in own.items()}
    return table


def eval_metrics(result: dict[str, Any]) -> dict[str, float]:
    """The result of an evaluation as metrics named `eval/...`."""
    return {f"eval/{name}": float(value) for name, value in result.items()}


def _table(scores: Sequence[PromptScore]) -> dict[str, float]:
    num_samples = len(scores[0].rewards)
    completions = num_samples * len(scores)
    status = [status for score in scores for status in score.status]
    pairs = [pair for score in scores for pair in zip(score.rewards, score.status, strict=True)]
    rewards = [reward for reward, status in pairs if status != "failed"]
    passes = {
        f"pass@{k}": float(np.mean([pass_at_k(num_samples, score.num_correct, k) for score in scores]))
        for k in pass_ks(num_samples)
    }
    return {
        **({"reward": float(np.mean(rewards))} if rewards else {}),
        **passes,
        "completion_tokens": sum(score.tokens for score in scores) / completions,
        "truncated": status.count("truncated") / completions,
        "failed": float(status.count("failed")),
        "prompts": float(len(scores)),
    }
