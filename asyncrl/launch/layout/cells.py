"""The layouts that the search tries, and the config of each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, get_args

from asyncrl.config.config import Config
from asyncrl.config.load import read_config
from asyncrl.config.sections import WeightsConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.memory import Shape, longest_tokens, with_changes

TENSOR_PARALLEL = (1, 2, 4, 8)
"""Cards of an engine; they are on one host."""
STAGES = (1, 2, 3)
SEQUENCE_PARALLEL = (2, 4, 8)
"""Ranks that share sequences, tried where nothing else fits without offload."""
OFFLOADS = ("none", "optimizer", "all")
MAX_MICROBATCH_TOKENS = 32768
"""Larger micro-batches need more memory and are hardly faster."""
MICROBATCHES = 4
"""Sizes of micro-batches that are tried, each twice the one before."""


@dataclass(frozen=True, slots=True)
class Training:
    """The learner's side of a layout."""

    ranks: int
    stage: int
    checkpointing: bool
    tokens: int
    """Tokens of a micro-batch."""
    offload: str
    parallel: int = 1
    """Ranks that share each sequence."""

    def changes(self, base: Config) -> dict[str, Any]:
        """Returns the config keys of this side. The groups of a step are the next multiple of the ranks, of which those
        that share sequences count once."""
        shards = self.ranks // self.parallel
        groups = math.ceil(base.replay.groups_per_step / shards) * shards
        return {
            "launch.learners": self.ranks,
            "replay.groups_per_step": groups,
            "learner.zero_stage": self.stage,
            "learner.gradient_checkpointing": self.checkpointing,
            "learner.tokens_per_microbatch": self.tokens,
            **({} if self.offload == base.learner.offload else {"learner.offload": self.offload}),
            **({} if self.parallel == base.learner.sequence_parallel else {"learner.sequence_parallel": self.parallel}),
        }

    @property
    def kind(self) -> str:
        """The kind of layout: all settings but the numbers of ranks and tokens."""
        kept = "checkpointed" if self.checkpointing else "plain"
        moved = "" if self.offload == "none" else f", offload {self.offload}"
        shared = "" if self.parallel == 1 else f", sequences shared by {self.parallel}"
        return f"ZeRO {self.stage}, {kept}{moved}{shared}"


@dataclass(frozen=True, slots=True)
class Generation:
    """The generators' side of a layout."""

    engines: int
    tensor_parallel: int
    """Cards of an engine."""
    groups: int
    """Groups that an engine works on at once."""

    def changes(self, base: Config) -> dict[str, Any]:
        """Returns the config keys of this side."""
        changes = {"launch.generators": self.engines, "generator.max_running_groups": self.groups}
        if self.tensor_parallel != base.generator.tensor_parallel:
            changes["generator.tensor_parallel"] = self.tensor_parallel
        return changes


def microbatches(base: Config) -> list[int]:
    """Returns the sizes of micro-batches to try, in tokens, in ascending order."""
    longest = longest_tokens(base)
    return sorted({max(longest, MAX_MICROBATCH_TOKENS >> shift) for shift in range(MICROBATCHES)})


def trainings(base: Config, max_ranks: int, tokens: int, *, checkpointing: bool, parallel: int = 1) -> list[Training]:
    """Returns the learner's sides with at most `max_ranks` ranks, of which `parallel` share each sequence, and
    micro-batches of `tokens` tokens."""
    found: list[Training] = []
    for ranks in range(parallel, max_ranks + 1, parallel):
        ways = [(stage, "none") for stage in (STAGES if ranks > 1 else STAGES[:1])]
        if base.learner.optimizer == "adamw":
            ways += [(2, "optimizer"), (3, "optimizer"), (3, "all")]
        found += [Training(ranks, stage, checkpointing, tokens, offload, parallel) for stage, offload in ways]
    return found


def shared_by(base: Config, shape: Shape) -> list[int]:
    """Returns the numbers of ranks by which sequences can be shared."""
    if base.critic.ranks or base.algorithm.routing_replay != "off":
        return []
    return [parallel for parallel in SEQUENCE_PARALLEL if shape.divides_among(parallel)]


def stagings(base: Config) -> list[str]:
    """Returns the other values of `weights.staging` that are allowed and have a size of their own."""
    values = get_args(WeightsConfig.model_fields["staging"].annotation)
    return [value for value in values if value not in (base.weights.staging, "auto") and _allows(base, value)]


def _allows(base: Config, staging: str) -> bool:
    try:
        read_config(with_changes(base, {"weights.staging": staging}).to_yaml())
    except ConfigError:
        return False
    return True


def engine_sizes(base: Config, shape: Shape, cards: int) -> list[int]:
    """Returns the numbers of cards that an engine can have, of at most `cards`: its attention heads are divided."""
    if base.generator.engine != "vllm" or base.deterministic:
        return [1]
    return [parallel for parallel in TENSOR_PARALLEL if parallel <= cards and shape.heads % parallel == 0]


def config_of(base: Config, training: Training, generation: Generation) -> Config:
    """Returns the base config with the keys of a layout."""
    return with_changes(base, {**training.changes(base), **generation.changes(base)})


def with_lengths(base: Config, tokens: int) -> Config:
    """Returns the config for trajectories of at most `tokens` tokens, an eighth of them for prompts unless the config
    says otherwise."""
    prompt = base.data.max_prompt_tokens or tokens // 8
    prompt = min(prompt, tokens // 2)
    return with_changes(
        base,
        {
            "data.max_prompt_tokens": prompt,
            "generator.max_new_tokens": tokens - prompt,
            "generator.engine_options.max_model_len": tokens,
        },
    )
