"""Off-policy metrics by staleness against a loop over the tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learner.metrics import StalenessMetrics, staleness_metrics
from asyncrl.types import STALENESS_BUCKETS

TOKENS = st.lists(
    st.tuples(st.integers(0, 40), st.floats(-3, 3), st.sampled_from([-1.0, 0.0, 2.0]), st.booleans(), st.booleans()),
    min_size=1,
    max_size=60,
)
"""(staleness, log ratio, advantage, clipped, masked) of each token."""
Token = tuple[int, float, float, bool, bool]


NAMES = ["0", "1", "2", *["3-4"] * 2, *["5-8"] * 4, *["9-16"] * 8]
"""Bucket of each staleness up to 16; older tokens are in "17+"."""


def bucket_of(staleness: int) -> str:
    return NAMES[staleness] if staleness < len(NAMES) else "17+"


def tally(tokens: Sequence[Token]) -> StalenessMetrics:
    made = StalenessMetrics()
    staleness, ratios, advantages, cut, masked = (torch.tensor(column) for column in zip(*tokens, strict=True))
    made.add(staleness, ratios, advantages, clipped=cut & ~masked, masked=cut & masked)
    return made


@pytest.mark.parametrize("staleness", [*range(19), 1000])
def test_a_token_is_in_the_bucket_of_its_staleness(staleness: int) -> None:
    made = tally([(staleness, 0.5, 1.0, False, False)])
    assert {name.split("/")[1] for name in staleness_metrics(made.sums, made.largest)} == {bucket_of(staleness)}
    assert bucket_of(staleness) in STALENESS_BUCKETS


@given(TOKENS)
def test_metrics_by_staleness(tokens: list[Token]) -> None:
    made = tally(tokens)
    metrics = staleness_metrics(made.sums, made.largest)
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


@given(TOKENS, st.integers(0, 60))
def test_parts_add_up(tokens: list[Token], cut: int) -> None:
    whole, parts = tally(tokens), StalenessMetrics()
    for part in (tokens[:cut], tokens[cut:]):
        if part:
            own = tally(part)
            parts.sums += own.sums
            parts.largest = torch.maximum(parts.largest, own.largest)
    assert staleness_metrics(parts.sums, parts.largest) == pytest.approx(staleness_metrics(whole.sums, whole.largest))


def test_batches_without_tokens_have_no_metrics() -> None:
    empty = torch.zeros(0)
    made = StalenessMetrics()
    made.add(empty.long(), empty, empty, clipped=empty.bool(), masked=empty.bool())
    assert staleness_metrics(made.sums, made.largest) == {}
