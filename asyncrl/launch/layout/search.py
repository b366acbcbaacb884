"""Searches the layout of a run on given cards: which fit, and which of them would train the most tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from asyncrl.config import Config
from asyncrl.launch.layout.cells import OFFLOADS, Generation, Training, config_of, trainings
from asyncrl.launch.layout.speed import generated_per_s, trained_per_s
from asyncrl.launch.resources.engine_memory import cache_bytes
from asyncrl.launch.resources.fit import TRAINED_FRACTION, Models, Need, generator_need, learner_need, with_changes
from asyncrl.launch.resources.memory import longest_tokens
from asyncrl.plan.hardware import Gpu

LEAST_SEQUENCES = 32
"""Sequences of the greatest length that the cache of an engine must have room for."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One side of a layout, and what it needs of a card."""

    what: str
    need: Need
    limit_bytes: int

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the need exceeds the limit; 0 if it fits."""
        return max(0, self.need.num_bytes - self.limit_bytes)


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout that fits."""

    config: Config
    learner: Tried
    generator: Tried
    sequences: int
    """Sequences of the greatest length that the cache of an engine has room for."""
    generated_per_s: float
    trained_per_s: float

    @property
    def tokens_per_s(self) -> float:
        """The rate of the slower side."""
        return min(self.generated_per_s, self.trained_per_s)


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search."""

    layout: Layout | None
    """None if nothing fits."""
    refused: list[Tried]
    """What does not fit: the nearest first."""


def search(base: Config, models: Models, cards: int, gpu: Gpu) -> Found:
    """Returns the layout with the most tokens per second of those that fit, and what did not fit. Every learner rank
    and every engine has cards of its own; `cards` are those without critic ranks and reward model."""
    by_nccl = base.weights.transport not in ("gloo", "chain", "files")
    generator, sequences = _generator(base, models, gpu, by_nccl=by_nccl)
    refused = [generator] if generator.missing_bytes else []
    groups = max(1, min(base.generator.max_running_groups, sequences // base.generator.group_size))
    layouts: list[tuple[Layout, Training]] = []
    for training in trainings(base, cards - 1):
        learner = _learner(base, models, gpu, training, by_nccl=by_nccl)
        if learner.missing_bytes:
            refused.append(learner)
        elif not generator.missing_bytes:
            generation = Generation(cards - training.ranks, groups)
            config = config_of(base, training, generation)
            rates = (
                generated_per_s(config, models.policy, gpu, generation, sequences),
                trained_per_s(config, models.policy, gpu, training),
            )
            layouts.append((Layout(config, learner, generator, sequences, *rates), training))
    refused.sort(key=lambda tried: tried.missing_bytes)
    return Found(max(layouts, key=_preference)[0] if layouts else None, refused)


def _preference(found: tuple[Layout, Training]) -> tuple[float, ...]:
    """Returns the sort key: no offload first, then speed, then what is simplest."""
    layout, training = found
    rate = float(f"{layout.tokens_per_s:.3g}")
    return -OFFLOADS.index(training.offload), rate, -training.stage, not training.checkpointing, training.tokens


def _learner(base: Config, models: Models, gpu: Gpu, training: Training, *, by_nccl: bool) -> Tried:
    config = with_changes(base, training.changes(base))
    limit = round(TRAINED_FRACTION * gpu.memory_bytes)
    return Tried(str(training), learner_need(config, models, 0, by_nccl=by_nccl), limit)


def _generator(base: Config, models: Models, gpu: Gpu, *, by_nccl: bool) -> tuple[Tried, int]:
    """Returns the need of a generator with room for the least number of sequences, and the number for which it has
    room."""
    longest, limit = longest_tokens(base), round(base.generator.gpu_memory_utilization * gpu.memory_bytes)
    least = math.ceil(LEAST_SEQUENCES / base.generator.group_size)
    need = generator_need(base, models, 0, by_nccl=by_nccl)
    fixed = {name: num_bytes for name, num_bytes in need.parts.items() if not name.startswith(("key", "logits"))}
    of_sequence = cache_bytes(base, models.policy, longest)
    cache = {f"key-value cache of {LEAST_SEQUENCES} sequences of {longest} tokens": LEAST_SEQUENCES * of_sequence}
    logits = {name: num_bytes for name, num_bytes in need.parts.items() if name.startswith("logits")}
    with_cache = replace(need, parts=fixed | logits | cache)
    if with_cache.num_bytes > limit:
        fewer = generator_need(with_changes(base, {"generator.max_running_groups": least}), models, 0, by_nccl=by_nccl)
        logits = {name: num_bytes for name, num_bytes in fewer.parts.items() if name.startswith("logits")}
        with_cache = replace(need, parts=fixed | logits | cache)
    free = limit - with_cache.num_bytes + LEAST_SEQUENCES * of_sequence
    return Tried("a generator", with_cache, limit), max(0, free // of_sequence)
