"""Off-policy metrics by staleness against a loop over the tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.training import AlgorithmConfig
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.metrics import StepMetrics
from asyncrl.learner.update import TokenLosses
from asyncrl.types import STALENESS_BUCKETS

TOKENS = st.lists(
    st.tuples(st.integers(0, 40), st.floats(-3, 3), st.sampled_from([-1.0, 0.0, 2.0]), st.booleans(), st.booleans()),
    min_size=1,
    max_size=60,
)
"""(staleness, log ratio, advantage, clipped, masked) of each token."""
Token = tuple[int, float, float, bool, bool]

ALONE = Ranks(0, 1, torch.device("cpu"))

NAMES = ["0", "1", "2", *["3-4"] * 2, *["5-8"] * 4, *["9-16"] * 8]
"""Bucket of each staleness up to 16; older tokens are in "17+"."""


def bucket_of(staleness: int) -> str:
    return NAMES[staleness] if staleness < len(NAMES) else "17+"


def tally(tokens: Sequence[Token], made: StepMetrics | None = None) -> StepMetrics:
    made = StepMetrics(1000, AlgorithmConfig(), torch.device("cpu")) if made is None else made
    columns = zip(*tokens, strict=True)
    staleness, ratios, advantages, cut, masked = (torch.tensor(column) for column in columns)
    zeros = torch.zeros(len(tokens))
    micro: Any = SimpleNamespace(behavior_logprobs=zeros, versions=1000 - staleness, seq=torch.arange(len(tokens)))
    gradient = torch.where(cut, 0.0, -advantages)
    losses = TokenLosses(zeros.sum(), zeros.sum(), zeros.sum(), gradient, gradient, masked)
    made.add(micro, losses, ratios, zeros, advantages)
    return made


def by_staleness(made: StepMetrics, ranks: Ranks) -> dict[str, float]:
    return {name: value for name, value in made.reduce(ranks, updates=1).items() if name.startswith("staleness/")}


@pytest.mark.parametrize("staleness", [*range(19), 1000])
def test_a_token_is_in_the_bucket_of_its_staleness(staleness: int) -> None:
    metrics = by_staleness(tally([(staleness, 0.5, 1.0, False, False)]), ALONE)
    assert {name.split("/")[1] for name in metrics} == {bucket_of(staleness)}
    assert bucket_of(staleness) in STALENESS_BUCKETS


@given(TOKENS, st.integers(0, 60))
def test_metrics_by_staleness(tokens: list[Token], split: int) -> None:
    """Of two micro-batches."""
    made = tally(tokens[:split]) if tokens[:split] else None
    made = tally(tokens[split:], made) if tokens[split:] else made
    assert made is not None
    metrics = by_staleness(made, ALONE)
    for bucket in STALENESS_BUCKETS:
        own = [token for token in tokens if bucket_of(token[0]) == bucket]
        found = {
            name.rpartition("/")[2]: value for name, value in metrics.items() if name.startswith(f"staleness/{bucket}/")
        }
        if not own:
            assert not found
            continue
        ratios = [math.exp(torch.tensor(ratio).item()) for _, ratio, *_ in own]
        expected = {
            "tokens_fraction": len(own) / len(tokens),
            "ratio_mean": sum(ratios) / len(ratios),
            "ratio_max": max(ratios),
            "kl": sum(r - 1 - math.log(r) for r in ratios) / len(ratios),
            "ess": sum(ratios) ** 2 / (len(ratios) * sum(r * r for r in ratios)),
        }
        for sign, name in ((1, "positive"), (-1, "negative")):
            signed = [token for token in own if token[2] * sign > 0]
            if signed:
                expected[f"clip_{name}"] = sum(cut and not masked for *_, cut, masked in signed) / len(signed)
                expected[f"mask_{name}"] = sum(cut and masked for *_, cut, masked in signed) / len(signed)
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
