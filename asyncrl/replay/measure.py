"""What the replay queue measures of a run: reward, staleness, idle time and rates, from what passes through it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncrl.config import Config
from asyncrl.replay.ledger import Ledger, State
from asyncrl.replay.messages import GroupMeta
from asyncrl.replay.wire import Array

RATE_WINDOW_S = 10.0


@dataclass(slots=True)
class GeneratorState:
    """The last that a generator said of itself."""

    heard_s: float = 0.0
    version: int = 0
    tokens: int = 0
    idle_s: float = 0.0
    busy_s: float = 0.0
    rewards_failed: int = 0
    stalls: int = 0
    stall_ms_sum: float = 0.0
    stall_ms_max: float = 0.0

    def hear(self, version: int, stats: dict[str, Any]) -> None:
        self.heard_s, self.version = time.monotonic(), version
        for name in ("tokens", "idle_s", "busy_s", "rewards_failed"):
            setattr(self, name, stats[name])
        for stall_ms in stats["stall_ms"]:
            self.stalls += 1
            self.stall_ms_sum += stall_ms
            self.stall_ms_max = max(self.stall_ms_max, stall_ms)

    @property
    def idle(self) -> float:
        total = self.idle_s + self.busy_s
        return self.idle_s / total if total else 0.0


@dataclass(slots=True)
class ScoredSince:
    """Means over the trajectories that were scored since the last step: rewards, their parts, lengths."""

    sums: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Sum and count by metric."""

    def add(self, meta: GroupMeta, action_mask: Array) -> None:
        ends = np.cumsum(meta["lengths"])
        tokens = np.add.reduceat(action_mask.astype(np.int64), np.concatenate([[0], ends[:-1]]))
        self._count("reward/mean", meta["rewards"])
        self._count(f"reward/{meta['data_source']}", meta["rewards"])
        for name in {name for parts in meta["parts"] for name in parts}:
            self._count(f"reward_part/{name}", [parts[name] for parts in meta["parts"] if name in parts])
        self._count("completion/tokens", tokens.tolist())
        if meta["greedy_reward"] is not None:
            self._count("reward/greedy", [meta["greedy_reward"]])
        self._count("completion/truncated_fraction", [float(status == "truncated") for status in meta["status"]])

    def take(self) -> dict[str, float]:
        """The means, once; nothing is left of them here."""
        sums, self.sums = self.sums, {}
        return {name: total / count for name, (total, count) in sums.items()}

    def _count(self, name: str, values: Sequence[float]) -> None:
        total = self.sums.setdefault(name, [0.0, 0.0])
        total[0] += sum(values)
        total[1] += len(values)


@dataclass(slots=True)
class RunMeasure:
    """Sums over the run. Rewards count every group that was scored, trained or without signal; staleness is in
    learner steps and counts action tokens when they are trained."""

    config: Config
    origin_s: float = field(default_factory=time.monotonic)
    first_lease_s: float | None = None
    last_step_s: float | None = None
    generators: dict[int, GeneratorState] = field(default_factory=dict[int, GeneratorState])
    step_rewards: list[float] = field(default_factory=list[float])
    scored_since: ScoredSince = field(default_factory=ScoredSince)
    greedy_tokens: int = 0
    """Tokens of the greedy completions of scored groups; they are in no box of the ledger."""
    histogram: list[int] = field(default_factory=list[int])
    learner_wait_s: float = 0.0
    learners: set[int] = field(default_factory=set[int])
    """Ranks that have asked for a batch."""
    recent: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    last_metrics: dict[str, float] = field(default_factory=dict[str, float])

    def heard(self, generator: int, version: int, stats: dict[str, Any]) -> None:
        if self.first_lease_s is None:
            self.first_lease_s = time.monotonic()
        self.generators.setdefault(generator, GeneratorState()).hear(version, stats)

    def scored(self, meta: GroupMeta, arrays: Sequence[Array]) -> None:
        """Counts a group that has its rewards."""
        self.scored_since.add(meta, arrays[1])
        self.greedy_tokens += meta["greedy_tokens"]

    def committed(
        self, step: int, groups: Sequence[Sequence[Array]], metrics: dict[str, float], ledger: Ledger
    ) -> dict[str, float]:
        """Metrics of the step; `groups` are the frames of the trained groups."""
        now_s = time.monotonic()
        counts = self._count_staleness(step - 1, groups)
        tokens = int(counts.sum())
        since_s = self.last_step_s or self.first_lease_s or self.origin_s
        waited_s = metrics.get("learner/wait_s", 0.0) + metrics.get("learner/sync_s", 0.0)
        self.learner_wait_s += min(waited_s, now_s - since_s)
        self.last_step_s = now_s
        self.recent = [item for item in self.recent if now_s - item[0] < RATE_WINDOW_S] + [(now_s, tokens)]
        scored = self.scored_since.take()
        if "reward/mean" in scored:
            self.step_rewards.append(scored["reward/mean"])
        elif self.step_rewards:
            self.step_rewards.append(self.step_rewards[-1])
        lags = np.arange(len(counts))
        own = scored | {
            "reward/mean": self.step_rewards[-1] if self.step_rewards else 0.0,
            "staleness/mean": float((counts * lags).sum() / max(tokens, 1)),
            "staleness/max": float(lags[counts > 0].max(initial=0)),
            "time/elapsed_s": now_s - (self.first_lease_s or self.origin_s),
            "throughput/trained_tokens_per_s": self.tokens_per_s(ledger),
            "generator/idle_fraction": self.generator_idle,
            "generator/busy_s": sum(g.busy_s for g in self.generators.values()),
            "generator/tokens": float(sum(g.tokens for g in self.generators.values())),
        }
        self.last_metrics = metrics | own
        return own

    @property
    def generator_idle(self) -> float:
        """Fraction of the generators' time, up to when they last said so, in which they had nothing to generate."""
        total = sum(g.idle_s + g.busy_s for g in self.generators.values())
        return sum(g.idle_s for g in self.generators.values()) / total if total else 0.0

    @property
    def learner_idle(self) -> float:
        """Fraction of the wall time, up to the last step, in which learner rank 0 waited for data or weights."""
        return min(1.0, self.learner_wait_s / self.training_s) if self.training_s else 0.0

    @property
    def training_s(self) -> float:
        """Seconds from the first lease to the last step."""
        if self.first_lease_s is None or self.last_step_s is None:
            return 0.0
        return self.last_step_s - self.first_lease_s

    def tokens_per_s(self, ledger: Ledger) -> float:
        return ledger.trained.tokens / self.training_s if self.training_s else 0.0

    def status(self, ledger: Ledger) -> dict[str, Any]:
        now_s = time.monotonic()
        recent = [item for item in self.recent if now_s - item[0] < RATE_WINDOW_S]
        span_s = min(RATE_WINDOW_S, now_s - (self.first_lease_s or now_s)) or 1.0
        return {
            "step": ledger.steps,
            "reward": self.step_rewards[-1] if self.step_rewards else None,
            "staleness_mean": self.last_metrics.get("staleness/mean", 0.0),
            "staleness_max": len(self.histogram) - 1 if self.histogram else 0,
            "tokens_per_s": sum(tokens for _, tokens in recent) / span_s,
            "generator_idle": self.generator_idle,
            "learner_idle": self.learner_idle,
            "generators": {
                str(index): {
                    "version": g.version,
                    "tokens": g.tokens,
                    "idle": g.idle,
                    "silent_s": now_s - g.heard_s,
                }
                for index, g in sorted(self.generators.items())
            },
            "heard": [f"generator-{g}" for g in self.generators] + [f"learner-{rank}" for rank in self.learners],
            "leased": ledger.count(State.LEASED),
            "finished": ledger.count(State.FINISHED),
            "trained": ledger.trained.groups,
            "refunded": {reason: amount.groups for reason, amount in ledger.refunded.items()},
            "metrics": self.last_metrics,
        }

    def summary(self, ledger: Ledger) -> dict[str, Any]:
        tenth = max(1, len(self.step_rewards) // 10)
        total = sum(self.histogram)
        stalls = sum(g.stalls for g in self.generators.values())
        stall_ms = sum(g.stall_ms_sum for g in self.generators.values())
        return {
            "steps": ledger.steps,
            "policy_version": ledger.steps,
            "reward_first": _mean(self.step_rewards[:tenth]),
            "reward_last": _mean(self.step_rewards[-tenth:]),
            "tokens_generated": ledger.generated.tokens,
            "greedy_tokens": self.greedy_tokens,
            "tokens_trained": ledger.trained.tokens,
            "tokens_per_s": self.tokens_per_s(ledger),
            "staleness": {
                "limit": self.config.replay.max_staleness,
                "max": len(self.histogram) - 1 if self.histogram else 0,
                "mean": sum(lag * n for lag, n in enumerate(self.histogram)) / total if total else 0.0,
                "histogram": self.histogram,
            },
            "idle": {"generator": self.generator_idle, "learner": self.learner_idle},
            "weight_sync": {
                "count": int(self.last_metrics.get("weights/syncs", 0)),
                "stall_ms_mean": stall_ms / stalls if stalls else 0.0,
                "stall_ms_max": max((g.stall_ms_max for g in self.generators.values()), default=0.0),
            },
            "rewards_failed": sum(g.rewards_failed for g in self.generators.values()),
            "ledger": ledger.summary(),
        }

    def _count_staleness(self, version: int, groups: Sequence[Sequence[Array]]) -> np.ndarray:
        """Action tokens by staleness at `version`, [max staleness of the batch + 1]; also added to the histogram."""
        lags = np.concatenate([version - versions[mask] for _, mask, _, versions in groups])
        counts = np.bincount(lags)
        self.histogram.extend([0] * (len(counts) - len(self.histogram)))
        for lag, count in enumerate(counts.tolist()):
            self.histogram[lag] += count
        return counts


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
