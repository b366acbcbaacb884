"""Off-policy metrics by staleness: which tokens are still worth training on."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncrl.algorithms.corrections import ess_from_moments, mismatch_kl, safe_exp
from asyncrl.lags import LAG_BOUNDS, LAG_BUCKETS

SUMS = (
    "tokens", "ratio", "squares", "kl", "positive", "negative", "clip_positive", "clip_negative", "mask_positive",
    "mask_negative",
)  # fmt: skip


def empty_sums() -> Tensor:
    return torch.zeros(len(SUMS), len(LAG_BUCKETS), dtype=torch.float64)


@dataclass(slots=True)
class LagTally:
    """Sums over the action tokens of each bucket of `LAG_BUCKETS`, on the CPU."""

    sums: Tensor = field(default_factory=empty_sums)
    """[len(SUMS), len(LAG_BUCKETS)] float64."""
    largest: Tensor = field(default_factory=lambda: torch.zeros(len(LAG_BUCKETS), dtype=torch.float64))
    """[len(LAG_BUCKETS)]: the largest ratio."""

    @torch.no_grad()
    def add(self, lags: Tensor, log_ratios: Tensor, advantages: Tensor, *, clipped: Tensor, masked: Tensor) -> None:
        """Counts tokens [N]: log ratios of current and behavior policy in nats, and which of those with an advantage
        got no gradient, by clipping or by a mask of the correction."""
        if not len(lags):
            return
        ratios = safe_exp(log_ratios.double())
        positive, negative = advantages > 0, advantages < 0
        bucket = torch.bucketize(lags, torch.tensor(LAG_BOUNDS, device=lags.device))
        columns = (
            torch.ones_like(ratios), ratios, ratios.square(), mismatch_kl(log_ratios), positive, negative,
            clipped & positive, clipped & negative, masked & positive, masked & negative,
        )  # fmt: skip
        table = torch.stack([column.double() for column in columns])
        self.sums += torch.zeros_like(self.sums, device=table.device).index_add(1, bucket, table).cpu()
        largest = torch.zeros(len(LAG_BUCKETS), dtype=torch.float64, device=ratios.device)
        largest.scatter_reduce_(0, bucket, ratios, reduce="amax")
        self.largest = torch.maximum(self.largest, largest.cpu())

    def join(self, other: LagTally) -> None:
        """Adds what another one has counted."""
        self.sums += other.sums
        self.largest = torch.maximum(self.largest, other.largest)


def lag_metrics(sums: Tensor, largest: Tensor) -> dict[str, float]:
    """Metrics `lag/BUCKET/NAME` of the buckets that have tokens, from sums and largest ratios as of `LagTally`; a mean
    over nothing is left out."""
    rows = dict(zip(SUMS, sums, strict=True))
    total = rows["tokens"].sum()
    sizes = ess_from_moments(torch.stack([rows["ratio"], rows["squares"], rows["tokens"]]))
    metrics: dict[str, float] = {}
    for index, bucket in enumerate(LAG_BUCKETS):
        s = {name: float(row[index]) for name, row in rows.items()}
        if not s["tokens"]:
            continue
        found = {
            "tokens_fraction": s["tokens"] / float(total),
            "ratio_mean": s["ratio"] / s["tokens"],
            "ratio_max": float(largest[index]),
            "kl": s["kl"] / s["tokens"],
            "ess": float(sizes[index]),
        }
        for sign in ("positive", "negative"):
            if s[sign]:
                found |= {f"{what}_{sign}": s[f"{what}_{sign}"] / s[sign] for what in ("clip", "mask")}
        metrics |= {f"lag/{bucket}/{name}": value for name, value in found.items()}
    return metrics
