"""Metrics of a step, over the batches of all ranks: rewards and lengths, losses and ratios, operations and times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from asyncrl.algorithms.corrections import (
    ess_from_moments,
    importance_weights,
    mismatch_kl,
    safe_exp,
    weight_moments,
)
from asyncrl.config.training import AlgorithmConfig
from asyncrl.errors import observing
from asyncrl.learner.batch import Batch, MicroBatch
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.update import TokenLosses
from asyncrl.types import STALENESS_BOUNDS, STALENESS_BUCKETS
from asyncrl.util.processes import LEARNER_PHASES, peak_memory_bytes

log = structlog.get_logger()


def batch_metrics(batch: Batch, advantages: Tensor, ranks: Ranks) -> dict[str, float]:
    """Mean, standard deviation, minimum and maximum of each quantity: of the trajectories, and of the action tokens'
    advantages [N]. A collective: all ranks call it."""
    columns = {
        "reward": batch.rewards,
        "prompt_tokens": batch.prompt_tokens,
        "completion_tokens": batch.lengths,
        "advantage": advantages,
    }
    tables = ranks.gather(torch.stack([_moments(values.double()) for values in columns.values()]))
    metrics: dict[str, float] = {}
    for number, name in enumerate(columns):
        count, total, squares = tables[:, number, :3].sum(dim=0).tolist()
        if not count:
            continue
        mean = total / count
        metrics |= {
            f"batch/{name}_mean": mean,
            f"batch/{name}_std": max(squares / count - mean**2, 0.0) ** 0.5,
            f"batch/{name}_min": float(tables[:, number, 3].min()),
            f"batch/{name}_max": float(tables[:, number, 4].max()),
        }
    return metrics


def _moments(values: Tensor) -> Tensor:
    """[count, sum, sum of squares, minimum, maximum] of the finite values, float64."""
    values = values[values.isfinite()]
    if not len(values):
        return torch.tensor([0.0, 0.0, 0.0, torch.inf, -torch.inf], dtype=torch.float64)
    count = torch.tensor(float(len(values)), dtype=torch.float64)
    return torch.stack([count, values.sum(), values.square().sum(), values.min(), values.max()])


PEAKS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A30", 165e12),
    ("A40", 149.7e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L20", 119.5e12),
    ("L4", 121e12),
    ("RTX 6000 Ada", 364e12),
    ("RTX A6000", 154.8e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
)
"""Words of a device's name, and its peak in FLOP/s for dense matrices in bfloat16, from the vendor's data sheets. The
first row whose words are all in the name counts."""
OTHER_DEVICES = frozenset({"MIG", "Laptop"})
"""Words of names of devices with another peak than the rest of the name suggests."""


def peak_flops(device_name: str) -> float | None:
    """Returns the peak of a device with this name (`torch.cuda.get_device_name`) in FLOP/s; None if it is unknown."""
    words = set(device_name.replace("-", " ").split())
    if words & OTHER_DEVICES:
        return None
    return next((peak for name, peak in PEAKS if words.issuperset(name.split())), None)


def device_peak(device: torch.device) -> float | None:
    """Returns the peak of a GPU in FLOP/s; None if it is unknown, and for a CPU."""
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """The sizes of a model that determine its operations."""

    layers: int
    """Weights by which a token is multiplied in the layers; of a mixture of experts, its experts' weights."""
    head: int
    """Weights of the output layer."""
    attention: int
    """Layers * heads * head size."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelFlops:
        """Returns the sizes of a causal language model."""
        config: Any = model.config.get_text_config()
        experts = next(
            (n for name in ("num_experts", "num_local_experts", "n_routed_experts") if (n := getattr(config, name, 0))),
            0,
        )
        chosen = (getattr(config, "num_experts_per_tok", 0) or 0) / experts if experts else 1.0
        modules: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
        embedding, head = (module.weight for module in modules)
        layers = 0.0
        for name, parameter in model.named_parameters():
            shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
            if len(shape) > 1 and parameter is not embedding and parameter is not head:
                layers += math.prod(shape) * (chosen if ".experts." in name else 1.0)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            layers=round(layers),
            head=math.prod(getattr(head, "ds_shape", head.shape)),
            attention=config.num_hidden_layers * config.num_attention_heads * size,
        )

    def forward(self, micro: MicroBatch) -> int:
        """Returns the operations of one forward pass of a packed row."""
        computed = micro.layout.computed
        attended = int(micro.position_ids[computed].sum()) + len(computed)
        return 2 * self.layers * len(computed) + 2 * self.head * len(micro.targets) + 4 * self.attention * attended

    def step(self, batch: Batch, *, passes: int) -> float:
        """Returns the operations of this rank's batch in `passes` forward passes; an update counts as
        three, or as two with adapters."""
        return float(passes * sum(self.forward(micro) for micro in batch.micro_batches))


def utilization(metrics: Mapping[str, float], *, ranks: int, peak: float | None) -> dict[str, float]:
    """Returns `learner/mfu`: the operations of the step, as a fraction of the ranks' peak in its seconds. Empty
    without a peak."""
    possible = (peak or 0.0) * ranks * metrics["learner/step_s"]
    return {"learner/mfu": metrics["learner/flops"] / possible} if possible else {}


class PhaseTimer:
    """Sums the seconds of each phase. On a GPU it records events between the kernels, and nothing waits for them before
    the end of the step."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._ended: list[tuple[str, Callable[[], float]]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time in the block for a phase of LEARNER_PHASES."""
        if self._ranks.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()

            def elapsed_s() -> float:
                end.synchronize()
                return begin.elapsed_time(end) / 1000

            self._ended.append((name, elapsed_s))
        else:
            begin_s = time.perf_counter()
            yield
            seconds = time.perf_counter() - begin_s
            self._ended.append((name, lambda: seconds))

    def metrics(self) -> dict[str, float]:
        """This rank's seconds of each phase since the last call as `learner/NAME_s`, and the peak of memory in bytes,
        the highest of all ranks. A collective: all ranks call it."""
        sums: dict[str, float] = {}
        for name, elapsed_s in self._ended:
            sums[name] = sums.get(name, 0.0) + elapsed_s()
        self._ended.clear()
        seconds = {f"learner/{name}_s": sums[name] for name in LEARNER_PHASES if name in sums}
        peak = self._ranks.max(torch.tensor([peak_memory_bytes()]))
        return seconds | {"learner/peak_memory_bytes": float(peak)}


class StepProfiler:
    """Writes `step-NNNNNN.rank-R.json.gz` in a folder for each step that is profiled. Shapes, stacks and memory are not
    recorded, so that a trace stays small."""

    def __init__(self, steps: Collection[int], folder: Path, rank: int) -> None:
        self._steps = frozenset(steps)
        self._folder = folder
        self._rank = rank

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profiles the block if the step is one of those to profile. The step takes longer then."""
        if step not in self._steps:
            yield
            return
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        profiled = profile(activities=activities)
        with observing("profile"):
            profiled.start()
        try:
            yield
        finally:
            with observing("profile"):
                profiled.stop()
                self._folder.mkdir(exist_ok=True)
                path = self._folder / f"step-{step:06d}.rank-{self._rank}.json.gz"
                profiled.export_chrome_trace(str(path))
                log.info("trace written", path=str(path), bytes=path.stat().st_size)


SUMS = (
    "loss", "policy_loss", "kl_loss", "entropy", "tokens", "kl", "fresh", "fresh_kl", "signal", "weight", "cut",
    "capped", "ess_total", "ess_squares", "ess_count", "ess_capped_total", "ess_capped_squares",
)  # fmt: skip
BUCKET_SUMS = (
    "tokens", "ratio", "squares", "kl", "positive", "negative", "clip_positive", "clip_negative", "mask_positive",
    "mask_negative",
)  # fmt: skip
CAPPED = 1e-4
"""Weights this much (relative) below the unbounded importance weight count as capped."""


class StepMetrics:
    """Sums over the action tokens of a step or an update, in total and by staleness. Ratios are of the current against
    the behavior policy. The sums stay on the device: reading them back would wait for a GPU in each micro-batch."""

    def __init__(self, version: int, settings: AlgorithmConfig, device: torch.device) -> None:
        self.version, self.settings = version, settings
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.sums = zeros(len(SUMS))
        self.bucket_sums = zeros(len(BUCKET_SUMS), len(STALENESS_BUCKETS))
        self.largest_ratios = zeros(len(STALENESS_BUCKETS))

    @torch.no_grad()
    def add(
        self, micro: MicroBatch, losses: TokenLosses, logprobs: Tensor, entropies: Tensor, advantages: Tensor
    ) -> None:
        """Counts a micro-batch: its losses, and log-probs, entropies and advantages [N].

        The policy gradient of every loss here is -(weight) * advantage, so the effective weight of a token, after
        caps, masks and clipping, is read from it.
        """
        log_ratios, correction = logprobs - micro.behavior_logprobs, self.settings.correction
        level = correction.level
        uncapped = importance_weights(log_ratios, micro.seq, level=level, high=None)
        staleness = self.version - micro.versions
        fresh, kl, signal = staleness == 0, mismatch_kl(log_ratios), advantages != 0
        weights = torch.where(signal, -losses.policy_gradient / advantages, 0.0)
        cut = signal & (weights == 0)
        moments = weight_moments(log_ratios, micro.seq, level=level)
        capped_total, capped_squares, _ = weight_moments(
            log_ratios, micro.seq, level=correction.level, high=correction.high
        )
        capped = signal & (weights < uncapped * (1 - CAPPED))
        count = torch.full_like(capped_total, len(logprobs))
        columns = (
            losses.loss, losses.policy_loss, losses.kl_loss, entropies.sum(), count, kl.sum(), fresh.sum(),
            torch.where(fresh, kl, 0.0).sum(), signal.sum(), weights.sum(), cut.sum(), capped.sum(), *moments,
            capped_total, capped_squares,
        )  # fmt: skip
        self.sums += torch.stack([column.double() for column in columns])
        ratios = safe_exp(log_ratios.double())
        positive, negative = advantages > 0, advantages < 0
        clipped, masked = cut & ~losses.masked, cut & losses.masked
        columns = (
            torch.ones_like(ratios), ratios, ratios.square(), kl, positive, negative, clipped & positive,
            clipped & negative, masked & positive, masked & negative,
        )  # fmt: skip
        bucket = torch.bucketize(staleness, torch.tensor(STALENESS_BOUNDS, device=staleness.device))
        self.bucket_sums.index_add_(1, bucket, torch.stack([column.double() for column in columns]))
        self.largest_ratios.scatter_reduce_(0, bucket, ratios, reduce="amax")

    def join(self, other: StepMetrics) -> None:
        """Adds the sums of an update."""
        self.sums += other.sums
        self.bucket_sums += other.bucket_sums
        self.largest_ratios = torch.maximum(self.largest_ratios, other.largest_ratios)

    def reduce(self, ranks: Ranks, *, updates: int) -> dict[str, float]:
        """Metrics of the step over all ranks, which all call this; a mean over nothing is left out.

        Means are over the `updates` that were counted; there are no metrics when there was none.

        Of the tokens with an advantage, clip_fraction is the share that clipping or a mask left without
        gradient, capped_fraction the share that got less than its unbounded importance weight.
        """
        if not updates:
            return {}
        s: dict[str, float] = dict(zip(SUMS, ranks.gather(self.sums).sum(dim=0).tolist(), strict=True))
        parts = ("loss", "policy_loss", *(["kl_loss"] if self.settings.kl_loss_coef else []))
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
        return metrics | _by_staleness(
            ranks.gather(self.bucket_sums).sum(dim=0), ranks.gather(self.largest_ratios).max(dim=0).values
        )


def _by_staleness(sums: Tensor, largest_ratios: Tensor) -> dict[str, float]:
    """Metrics `staleness/BUCKET/NAME` of the buckets that have tokens; a mean over nothing is left out."""
    rows: dict[str, Tensor] = dict(zip(BUCKET_SUMS, sums, strict=True))
    total = float(rows["tokens"].sum())
    sizes = ess_from_moments(torch.stack([rows["ratio"], rows["squares"], rows["tokens"]]))
    metrics: dict[str, float] = {}
    for index, bucket in enumerate(STALENESS_BUCKETS):
        s = {name: float(row[index]) for name, row in rows.items()}
        if not s["tokens"]:
            continue
        values = {
            "tokens_fraction": s["tokens"] / total,
            "ratio_mean": s["ratio"] / s["tokens"],
            "ratio_max": float(largest_ratios[index]),
            "kl": s["kl"] / s["tokens"],
            "ess": float(sizes[index]),
        }
        for sign in ("positive", "negative"):
            if s[sign]:
                values |= {f"{cause}_{sign}": s[f"{cause}_{sign}"] / s[sign] for cause in ("clip", "mask")}
        metrics |= {f"staleness/{bucket}/{name}": value for name, value in values.items()}
    return metrics
