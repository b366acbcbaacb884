"""Metrics of a step, summed over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from asyncrl.algorithms.corrections import (
    Level,
    ess_from_moments,
    importance_weights,
    mismatch_kl,
    safe_exp,
    weight_moments,
)
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.distributed import Ranks
from asyncrl.types import STALENESS_BOUNDS, STALENESS_BUCKETS

if TYPE_CHECKING:
    from asyncrl.learner.step import TokenLosses

SUMS = (
    "tokens", "ratio", "squares", "kl", "positive", "negative", "clip_positive", "clip_negative", "mask_positive",
    "mask_negative",
)  # fmt: skip


def empty_sums() -> Tensor:
    return torch.zeros(len(SUMS), len(STALENESS_BUCKETS), dtype=torch.float64)


@dataclass(slots=True)
class StalenessMetrics:
    """Sums over the action tokens of each bucket of `STALENESS_BUCKETS`, on the device of the tokens: reading them back
    would wait for a GPU in each micro-batch."""

    sums: Tensor = field(default_factory=empty_sums)
    """[len(SUMS), len(STALENESS_BUCKETS)] float64."""
    largest: Tensor = field(default_factory=lambda: torch.zeros(len(STALENESS_BUCKETS), dtype=torch.float64))
    """[len(STALENESS_BUCKETS)]: the largest ratio."""

    @torch.no_grad()
    def add(
        self, staleness: Tensor, log_ratios: Tensor, advantages: Tensor, *, clipped: Tensor, masked: Tensor
    ) -> None:
        """Counts tokens [N]: log ratios of current and behavior policy in nats, and which of those with an advantage
        got no gradient, by clipping or by a mask of the correction."""
        if not len(staleness):
            return
        ratios = safe_exp(log_ratios.double())
        positive, negative = advantages > 0, advantages < 0
        bucket = torch.bucketize(staleness, torch.tensor(STALENESS_BOUNDS, device=staleness.device))
        columns = (
            torch.ones_like(ratios), ratios, ratios.square(), mismatch_kl(log_ratios), positive, negative,
            clipped & positive, clipped & negative, masked & positive, masked & negative,
        )  # fmt: skip
        table = torch.stack([column.double() for column in columns])
        self.sums = self.sums.to(table.device).index_add(1, bucket, table)
        largest = torch.zeros(len(STALENESS_BUCKETS), dtype=torch.float64, device=ratios.device)
        largest.scatter_reduce_(0, bucket, ratios, reduce="amax")
        self.largest = torch.maximum(self.largest.to(ratios.device), largest)

    def join(self, other: StalenessMetrics) -> None:
        """Adds what another one has counted."""
        device = other.sums.device
        self.sums = self.sums.to(device) + other.sums
        self.largest = torch.maximum(self.largest.to(device), other.largest)


def staleness_metrics(sums: Tensor, largest: Tensor) -> dict[str, float]:
    """Metrics `staleness/BUCKET/NAME` of the buckets that have tokens, from the sums and largest ratios of
    `StalenessMetrics`; a mean over nothing is left out."""
    rows = dict(zip(SUMS, sums, strict=True))
    total = rows["tokens"].sum()
    sizes = ess_from_moments(torch.stack([rows["ratio"], rows["squares"], rows["tokens"]]))
    metrics: dict[str, float] = {}
    for index, bucket in enumerate(STALENESS_BUCKETS):
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
        metrics |= {f"staleness/{bucket}/{name}": value for name, value in found.items()}
    return metrics


CAPPED = 1e-4
"""Weights this much (relative) below the unbounded importance weight count as capped."""


@dataclass(slots=True)
class StepMetrics:
    """Sums over the action tokens seen so far. Ratios are of the current against the behavior policy."""

    version: int
    level: Level
    cap: float | None
    """Upper bound of the importance weights."""
    device: torch.device
    with_kl: bool = False
    """True if the loss has a divergence from a reference policy."""
    sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    staleness: StalenessMetrics = field(default_factory=StalenessMetrics)

    def add(
        self, micro: MicroBatch, losses: TokenLosses, logprobs: Tensor, entropies: Tensor, advantages: Tensor
    ) -> None:
        """Counts a micro-batch: its losses, and log-probs, entropies and advantages [N].

        The policy gradient of every loss here is -(weight) * advantage, so the effective weight of a token, after
        caps, masks and clipping, is read from it.
        """
        log_ratios = logprobs - micro.behavior_logprobs
        uncapped = importance_weights(log_ratios, micro.seq, level=self.level, high=None)
        staleness = self.version - micro.versions
        fresh = staleness == 0
        kl = mismatch_kl(log_ratios)
        signal = advantages != 0
        weights = torch.where(signal, -losses.policy_gradient / advantages, 0.0)
        cut = signal & (weights == 0)
        total, squares, count = weight_moments(log_ratios, micro.seq, level=self.level)
        capped_total, capped_squares, _ = weight_moments(log_ratios, micro.seq, level=self.level, high=self.cap)
        for name, value in {
            "loss": losses.loss,
            "policy_loss": losses.policy_loss,
            "kl_loss": losses.kl_loss,
            "entropy": entropies.sum(),
            "tokens": torch.tensor(len(logprobs)),
            "kl": kl.sum(),
            "fresh": fresh.sum(),
            "fresh_kl": torch.where(fresh, kl, 0.0).sum(),
            "signal": signal.sum(),
            "weight": weights.sum(),
            "cut": cut.sum(),
            "capped": (signal & (weights < uncapped * (1 - CAPPED))).sum(),
            "ess_total": total,
            "ess_squares": squares,
            "ess_count": count,
            "ess_capped_total": capped_total,
            "ess_capped_squares": capped_squares,
        }.items():
            value = value.double().to(self.device)
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.staleness.add(staleness, log_ratios, advantages, clipped=cut & ~losses.masked, masked=cut & losses.masked)

    def join(self, other: StepMetrics) -> None:
        """Adds what another one has counted."""
        for name, value in other.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.staleness.join(other.staleness)

    def reduce(self, ranks: Ranks, *, updates: int) -> dict[str, float]:
        """Metrics of the step over all ranks, which all call this; a mean over nothing is left out.

        Means are over the `updates` that were counted; there are no metrics when there was none.

        Of the tokens with an advantage, clip_fraction is the share that clipping or a mask left without
        gradient, capped_fraction the share that got less than its unbounded importance weight.
        """
        if not self.sums:
            return {}
        table = ranks.gather(torch.stack(list(self.sums.values())))
        s = dict(zip(self.sums, table.sum(dim=0).tolist(), strict=True))
        parts = ("loss", "policy_loss", *(["kl_loss"] if self.with_kl else []))
        metrics = {f"learner/{name}": s[name] / updates for name in parts}
        for name, total, count in (
            ("learner/entropy", s["entropy"], s["tokens"]),
            ("learner/clip_fraction", s["cut"], s["signal"]),
            ("correction/weight_mean", s["weight"], s["signal"]),
            ("correction/capped_fraction", s["capped"], s["signal"]),
            ("correction/ess", s["ess_total"] ** 2, s["ess_count"] * s["ess_squares"]),
            ("correction/ess_capped", s["ess_capped_total"] ** 2, s["ess_count"] * s["ess_capped_squares"]),
            ("correction/behavior_kl", s["kl"], s["tokens"]),
            ("correction/mismatch_kl", s["fresh_kl"], s["fresh"]),
        ):
            if count:
                metrics[name] = total / count
        return metrics | staleness_metrics(
            ranks.gather(self.staleness.sums).sum(dim=0), ranks.gather(self.staleness.largest).max(dim=0).values
        )
