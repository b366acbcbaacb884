"""Searches the layout of a run on given cards: which fit, and which of them would train the most tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from asyncrl.config.config import Config
from asyncrl.launch.layout.cells import (
    OFFLOADS,
    Generation,
    Training,
    config_of,
    engine_sizes,
    microbatches,
    shared_by,
    stagings,
    trainings,
)
from asyncrl.launch.layout.speed import generated_per_s, trained_per_s
from asyncrl.launch.memory import (
    TRAINED_FRACTION,
    Models,
    Need,
    Shape,
    cache_bytes,
    generator_need,
    learner_need,
    longest_tokens,
    with_changes,
)
from asyncrl.plan.hardware import Gpu

LEAST_SEQUENCES = 32
"""Sequences of the greatest length that the cache of an engine must have room for."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One side of a layout, and what it needs of a card."""

    what: str
    kind: str
    """The same for what differs in numbers only."""
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
    shape: Shape
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
    """The nearest of each kind that does not fit: the nearest first."""


def search(base: Config, models: Models, cards: int, gpu: Gpu) -> Found:
    """Returns the layout with the most tokens per second of those that fit, and what did not fit. Every learner rank
    and every engine has cards of its own; `cards` are those without critic ranks and reward model.

    If nothing fits without offload, other values of `weights.staging` are tried, then sequences that ranks share; the
    first of those with the least offload is chosen. If weights cannot be sent from GPU to GPU then, they are sent
    through host memory.
    """
    refused: list[Tried] = []
    layout: Layout | None = None
    for way in (base, with_changes(base, {"weights.transport": "gloo"})) if _by_nccl(base) else (base,):
        for config, parallel in _ways(way, models.policy):
            found = _search(config, models, cards, gpu, parallel)
            refused += found.refused
            if found.layout is not None and found.layout.config.learner.offload == "none":
                return Found(found.layout, _nearest(refused))
            if layout is None or (found.layout is not None and _offload(found.layout) < _offload(layout)):
                layout = found.layout
        if layout is not None:
            break
    return Found(layout, _nearest(refused))


def _offload(layout: Layout) -> int:
    return OFFLOADS.index(layout.config.learner.offload)


def _ways(base: Config, shape: Shape) -> Iterator[tuple[Config, int]]:
    """Yields configs with values of `weights.staging`, and numbers of ranks that share sequences."""
    others = stagings(base) if _by_nccl(base) else []
    for parallel in (base.learner.sequence_parallel, *shared_by(base, shape)):
        yield base, parallel
        for staging in others:
            yield with_changes(base, {"weights.staging": staging}), parallel


def _nearest(refused: list[Tried]) -> list[Tried]:
    """Returns the nearest of each kind: the nearest first."""
    refused.sort(key=lambda tried: tried.missing_bytes)
    nearest = {tried.kind: tried for tried in reversed(refused)}
    return sorted(nearest.values(), key=lambda tried: tried.missing_bytes)


def _search(base: Config, models: Models, cards: int, gpu: Gpu, sequence_parallel: int) -> Found:
    found: list[tuple[tuple[float, ...], Layout]] = []
    sizes = engine_sizes(base, models.policy, cards - 1)
    generators = {parallel: _generator(base, models, gpu, parallel) for parallel in sizes}
    refused = [generator for generator, _ in generators.values() if generator.missing_bytes]
    if sequence_parallel > 1 and len(refused) == len(generators):
        return Found(None, [])
    learners = _learners(base, models, cards - 1, gpu, sequence_parallel)
    refused += [learner for _, learner in learners if learner.missing_bytes]
    for parallel, (generator, sequences) in generators.items():
        if generator.missing_bytes:
            continue
        groups = max(1, min(base.generator.max_running_groups, sequences // base.generator.group_size))
        for training, learner in learners:
            engines = (cards - training.ranks) // parallel
            if engines and not learner.missing_bytes:
                generation = Generation(engines, parallel, groups)
                config = config_of(base, training, generation)
                rates = (
                    generated_per_s(config, models.policy, gpu, generation, sequences),
                    trained_per_s(config, models.policy, gpu, training),
                )
                layout = Layout(config, models.policy, learner, generator, sequences, *rates)
                found.append((_preference(layout, training, generation), layout))
    return Found(max(found, key=lambda pair: pair[0])[1] if found else None, refused)


def _preference(layout: Layout, training: Training, generation: Generation) -> tuple[float, ...]:
    """Returns the sort key: no offload first, then small engines, then speed, then what is simplest."""
    rate = float(f"{layout.tokens_per_s:.3g}")
    simple = (-training.stage, not training.checkpointing, training.tokens)
    return -OFFLOADS.index(training.offload), -generation.tensor_parallel, rate, *simple


def _by_nccl(config: Config) -> bool:
    return config.weights.transport not in ("gloo", "files")


def _learners(base: Config, models: Models, max_ranks: int, gpu: Gpu, parallel: int) -> list[tuple[Training, Tried]]:
    """Returns the learner's sides with what they need. If none fits with a micro-batch, larger ones are left out."""
    found: list[tuple[Training, Tried]] = []
    for checkpointing in (False, True):
        for tokens in microbatches(base):
            sides = trainings(base, max_ranks, tokens, checkpointing=checkpointing, parallel=parallel)
            tried = [(training, _learner(base, models, gpu, training)) for training in sides]
            found += tried
            if all(learner.missing_bytes for _, learner in tried):  # also if there are too few ranks
                break
    return found


def _learner(base: Config, models: Models, gpu: Gpu, training: Training) -> Tried:
    config = with_changes(base, training.changes(base))
    limit = round(TRAINED_FRACTION * gpu.memory_bytes)
    ranks = "1 learner rank" if training.ranks == 1 else f"{training.ranks} learner ranks"
    what = f"{ranks}, {training.kind}, {training.tokens} tokens"
    return Tried(what, training.kind, learner_need(config, models, 0, by_nccl=_by_nccl(base)), limit)


def _generator(base: Config, models: Models, gpu: Gpu, parallel: int) -> tuple[Tried, int]:
    """Returns the need of an engine's first card with room for the least number of sequences, and the number for which
    it has room."""
    longest, limit = longest_tokens(base), round(base.generator.gpu_memory_utilization * gpu.memory_bytes)
    least = math.ceil(LEAST_SEQUENCES / base.generator.group_size)
    cache_name = f"key-value cache of {LEAST_SEQUENCES} sequences of {longest} tokens"
    needs: list[Need] = []
    of_sequence = 0
    for groups in sorted({base.generator.max_running_groups, least}, reverse=True):
        keys = {"generator.max_running_groups": groups, "generator.tensor_parallel": parallel}
        config = with_changes(base, keys)
        need = generator_need(config, models, 0, 0, by_nccl=_by_nccl(base))
        of_sequence = cache_bytes(config, models.policy, longest)
        parts = {name: num_bytes for name, num_bytes in need.parts.items() if not name.startswith("key")}
        needs.append(replace(need, parts=parts | {cache_name: LEAST_SEQUENCES * of_sequence}))
    need = next((need for need in needs if need.num_bytes <= limit), needs[-1])
    free = limit - need.num_bytes + LEAST_SEQUENCES * of_sequence
    what = f"a generator on {parallel} card{'s' if parallel > 1 else ''}"
    return Tried(what, what, need, limit), max(0, free // of_sequence)
