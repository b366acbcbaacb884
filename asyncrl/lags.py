"""Staleness in buckets, by which off-policy metrics are told."""

from __future__ import annotations

from collections.abc import Sequence

LAG_BOUNDS = (0, 1, 2, 4, 8, 16)
"""Highest staleness of each bucket but the last."""
LAG_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9-16", "17+")
"""Names of the buckets, as in the metrics `lag/NAME/...`."""
LAG_METRICS = {
    "tokens_fraction": "share of the tokens",
    "ratio_mean": "importance ratio, mean",
    "ratio_max": "importance ratio, max",
    "kl": "KL (k3, nats)",
    "ess": "effective sample size",
    "clip_positive": "clipped, advantage > 0",
    "clip_negative": "clipped, advantage < 0",
    "mask_positive": "masked, advantage > 0",
    "mask_negative": "masked, advantage < 0",
}
"""Metrics of each bucket, and what they are."""


def mean_lag(histogram: Sequence[int]) -> float:
    """Of tokens by staleness; 0 when there are none."""
    return sum(lag * tokens for lag, tokens in enumerate(histogram)) / max(sum(histogram), 1)
