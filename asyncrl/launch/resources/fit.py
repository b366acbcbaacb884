"""Checks that the roles of a run fit the memory of their GPUs, and computes the memory fraction of each engine.

The needs are computed (`memory`), not measured, before any process starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import structlog
from pydantic import ValidationError

from asyncrl.config import Config, LearnerConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.resources.colocate import ASLEEP_BYTES
from asyncrl.launch.resources.engine_memory import (
    STAGING_BUCKET_BYTES,
    engine_parts,
    reward_model_parts,
    staging_parts,
)
from asyncrl.launch.resources.hosts import RoleResources
from asyncrl.launch.resources.memory import GIB, Parts, critic_parts, learner_parts, longest_tokens
from asyncrl.launch.resources.placement import Placement
from asyncrl.launch.resources.shape import Shape
from asyncrl.rewards.reward_model import model_options

log = structlog.get_logger()

TRAINED_FRACTION = 0.95
"""Usable fraction of a GPU without an engine; with an engine it is `generator.gpu_memory_utilization`."""
REWARD_MODEL = {"dtype": "float32", "tokens_per_batch": 16384, "device": "auto"}
"""Options of the reward model that determine its memory, with their defaults."""
PIECE = "piece of the weights"
"""The part of a learner rank that versions pass through, if they come from its card memory."""


@dataclass(frozen=True)
class Models:
    """Shapes of the models of a run; None if the run has no such model."""

    policy: Shape
    reference: Shape | None = None
    critic: Shape | None = None
    reward_model: Shape | None = None

    @classmethod
    def read(cls, config: Config, *, reward_model: bool) -> Models | None:
        """Reads the shapes from the model folders of the config; None if a `config.json` lacks the sizes."""
        from asyncrl.learner.algorithm import make_algorithm  # imports torch

        algorithm, path = config.algorithm, config.model.path
        paths = {"policy": path}
        if algorithm.kl_reward_coef or algorithm.kl_loss_coef:
            paths["reference"] = algorithm.reference or path
        if make_algorithm(config).needs_critic:
            paths["critic"] = config.critic.path or path
        if reward_model:
            paths["reward_model"] = str(model_options(config)["path"])
        trust = config.model.trust_remote_code
        shapes = {
            role: Shape.read(
                folder,
                trust_remote_code=trust,
                values=role in ("critic", "reward_model"),
                lora=config.learner.lora if role == "policy" else None,
            )
            for role, folder in paths.items()
        }
        for role, shape in shapes.items():
            if shape is None:
                log.warning("memory is not checked: config.json lacks the model's sizes", model=paths[role])
                return None
        return cls(**{role: shape for role, shape in shapes.items() if shape is not None})


@dataclass(frozen=True)
class Need:
    """The GPU memory that one role process needs."""

    name: str
    parts: Parts

    @property
    def num_bytes(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        largest = sorted(self.parts.items(), key=lambda part: -part[1])
        parts = ", ".join(f"{name} {num_bytes / GIB:.1f}" for name, num_bytes in largest if num_bytes >= 0.05 * GIB)
        return f"{self.name} {self.num_bytes / GIB:.1f} GiB ({parts})"


@dataclass(frozen=True)
class Card:
    """A GPU and the needs of the roles placed on it."""

    name: str
    memory_bytes: int
    needs: list[Need]
    limit_bytes: int
    """Upper bound of the sum of the needs."""
    in_turn: bool = False
    """True if the learner rank and the generator use it in turn (`launch.colocate`). Unless it `hands_over`, the next
    version comes through host memory, so that this needs no more than the generator."""
    hands_over: bool = False
    """True if the next version comes from the learner's memory on it."""

    @property
    def needed_bytes(self) -> int:
        """The most that is needed at a time."""
        if not self.in_turn:
            return self._beside()
        return max(*map(self._beside, ("learner-", "generator-")), self.hand_over_bytes)

    @property
    def hand_over_bytes(self) -> int:
        """The memory that is needed while the engine loads the learner's weights: those of both, and the pieces."""
        if not self.hands_over:
            return 0
        moving = sum(need.parts.get(part, 0) for need in self.needs for part in ("weights", PIECE, "staged weights"))
        return self._beside("learner-", "generator-") + moving

    @property
    def generating_bytes(self) -> int:
        """The memory that is needed while engines generate."""
        return self._beside("learner-") if self.in_turn else self._beside()

    def _beside(self, *sleeping: str) -> int:
        """The sum of the needs while the roles with these names sleep."""
        return sum(
            min(ASLEEP_BYTES, need.num_bytes) if need.name.startswith(sleeping) else need.num_bytes
            for need in self.needs
        )

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the needs exceed the limit; 0 if they fit."""
        return max(0, self.needed_bytes - self.limit_bytes)

    def __str__(self) -> str:
        return (
            f"GPU {self.name} ({self.memory_bytes / GIB:.1f} GiB, of which {self.limit_bytes / GIB:.1f} may be used): "
            + "; ".join(map(str, self.needs))
            + (f"; in turn {self.needed_bytes / GIB:.1f} GiB" if self.in_turn else "")
        )


def fit_memory(config: Config, placement: Placement, *, reward_model: bool) -> Placement:
    """Returns the placement with `gpu_memory_utilization` set for each engine.

    Raises ConfigError with the sums, and the settings that would help, if a GPU is too small. If the memory of the GPUs
    or the sizes of a model are unknown, engines on one GPU divide `generator.gpu_memory_utilization` equally.
    """
    if not placement.gpus:
        return placement
    one_host = len({resources.host for resources in (*placement.learners, *placement.generators)}) == 1
    known = one_host and all(gpu.memory_bytes is not None for gpu in placement.gpus)
    models = Models.read(config, reward_model=reward_model) if known else None
    if models is None:
        return _divided(config, placement)
    cards = make_cards(config, placement, models)
    if short := [card for card in cards if card.missing_bytes]:
        raise ConfigError(_refusal(config, placement, models, short))
    for card in cards:
        log.info("computed memory needs", gpu=str(card))
    return _with_fractions(config, placement, models, cards)


def make_cards(config: Config, placement: Placement, models: Models) -> list[Card]:
    """Returns every GPU of the placement that has roles, with their needs."""
    by_gpu: dict[str, list[Need]] = {gpu.name: [] for gpu in placement.gpus}
    for gpu, need in _needs(config, placement, models):
        by_gpu[gpu].append(need)
    engines = {gpu for resources in placement.generators for gpu in resources.gpus}
    cards: list[Card] = []
    for gpu in placement.gpus:
        memory_bytes = gpu.memory_bytes or 0
        fraction = config.generator.gpu_memory_utilization if gpu.name in engines else TRAINED_FRACTION
        limit_bytes, in_turn = round(fraction * memory_bytes), config.launch.colocated and gpu.name in engines
        cards.append(Card(gpu.name, memory_bytes, by_gpu[gpu.name], limit_bytes, in_turn, config.hands_over))
    return [card for card in cards if card.needs]


def _needs(config: Config, placement: Placement, models: Models) -> Iterator[tuple[str, Need]]:
    by_nccl = sends_by_nccl(config, placement)
    for rank, resources in enumerate(placement.learners):
        yield resources.gpus[0], learner_need(config, models, rank, by_nccl=by_nccl)
    for rank, resources in enumerate(placement.critics):
        yield resources.gpus[0], Need(f"critic-{rank}", critic_parts(config, models.critic or models.policy))
    for index, resources in enumerate(placement.generators):
        for number, gpu in enumerate(resources.gpus):
            yield gpu, generator_need(config, models, index, number, by_nccl=by_nccl)
    options: dict[str, Any] = REWARD_MODEL | model_options(config)
    if placement.reward_model is not None and models.reward_model is not None and options["device"] != "cpu":
        tokens, dtype = int(options["tokens_per_batch"]), str(options["dtype"])
        parts = reward_model_parts(models.reward_model, dtype=dtype, tokens=tokens)
        yield placement.reward_model.gpus[0], Need("reward_model", parts)


def learner_need(config: Config, models: Models, rank: int, *, by_nccl: bool) -> Need:
    """Returns the need of a learner rank; with `by_nccl` weights are sent from GPU to GPU."""
    inside = models.critic if not config.critic.ranks else None
    copies = by_nccl and config.weights.staging != "buckets"
    parts = learner_parts(config, models.policy, reference=models.reference, critic=inside, sends=copies)
    if config.hands_over:
        parts[PIECE] = STAGING_BUCKET_BYTES
    return Need(f"learner-{rank}", parts)


def generator_need(config: Config, models: Models, index: int, gpu: int, *, by_nccl: bool) -> Need:
    """Returns the need of one of a generator's GPUs, by its number, with the smallest key-value cache that its engine
    can start with. The first GPU has the staged weights."""
    parts = engine_parts(config, models.policy)
    if gpu == 0:
        parts |= staging_parts(config, models.policy, on_gpu=by_nccl or config.hands_over)
    return Need(f"generator-{index}", parts)


def sends_by_nccl(config: Config, placement: Placement) -> bool:
    """True if weights are sent from GPU to GPU."""
    return placement.sends_between_gpus and config.weights.transport not in ("gloo", "files")


def _with_fractions(config: Config, placement: Placement, models: Models, cards: list[Card]) -> Placement:
    """Divides the memory that the other roles of a GPU leave among its engines, minus their staged weights."""
    staged = sum(staging_parts(config, models.policy, on_gpu=sends_by_nccl(config, placement)).values())
    least = sum(engine_parts(config, models.policy).values())
    fractions: dict[str, float] = {}
    for card in cards:
        engines = [need for need in card.needs if need.name.startswith("generator-")]
        if not engines:
            continue
        others = card.generating_bytes - sum(need.num_bytes for need in engines)
        engine_bytes = (card.limit_bytes - others) // len(engines) - staged
        if config.generator.kv_cache_bytes is not None:
            engine_bytes = min(engine_bytes, least)  # the engine uses no more, and requires that this much is free
        fractions[card.name] = engine_bytes / card.memory_bytes
    return _set_fractions(placement, lambda resources: min(fractions[gpu] for gpu in resources.gpus))


def _divided(config: Config, placement: Placement) -> Placement:
    counts = Counter(gpu for resources in placement.generators for gpu in resources.devices)
    most = config.generator.gpu_memory_utilization
    return _set_fractions(placement, lambda resources: most / max(counts[gpu] for gpu in resources.devices))


def _set_fractions(placement: Placement, fraction: Callable[[RoleResources], float]) -> Placement:
    generators = tuple(
        replace(resources, gpu_memory_utilization=fraction(resources)) for resources in placement.generators
    )
    return replace(placement, generators=generators)


def _refusal(config: Config, placement: Placement, models: Models, short: list[Card]) -> str:
    lines = "\n  ".join(map(str, short))
    changes = find_changes(config, placement, models)
    advice = (
        f"with {' '.join(changes)} it would fit"
        if changes
        else "no setting of these keys is enough: use more ranks (launch.learners, critic.ranks) or a smaller model"
    )
    return f"by arithmetic the run does not fit its GPUs:\n  {lines}\n{advice}"


def find_changes(config: Config, placement: Placement, models: Models) -> list[str]:
    """Returns a small set of overrides with which the same placement fits, found greedily; empty if none suffice."""
    tried: list[tuple[str, Any]] = []
    for change in _candidates(config, placement):
        tried.append(change)
        if _fits(config, placement, models, tried):
            break
    else:
        return []
    for change in tried[-2::-1]:
        fewer = [other for other in tried if other is not change]
        if _fits(config, placement, models, fewer):
            tried = fewer
    last = dict(tried)
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in last.items()]


def _candidates(config: Config, placement: Placement) -> Iterator[tuple[str, Any]]:
    """Yields settings that need less memory, in ascending order of their cost in speed."""
    if config.model.dtype != "bfloat16":
        yield "model.dtype", "bfloat16"
    longest = longest_tokens(config)
    if config.data.max_prompt_tokens is not None and (config.generator.max_model_tokens or longest + 1) > longest:
        yield "generator.engine_options.max_model_len", longest
    tokens = config.learner.tokens_per_microbatch
    while tokens // 2 >= max(longest, 4096):
        tokens //= 2
        yield "learner.tokens_per_microbatch", tokens
    if not config.learner.gradient_checkpointing:
        yield "learner.gradient_checkpointing", True
    for stage in range(config.learner.zero_stage + 1, 4 if config.launch.learners > 1 else 0):
        yield "learner.zero_stage", stage
    if sends_by_nccl(config, placement):
        yield "weights.transport", "gloo"
    if config.hands_over:
        yield "weights.transport", "auto"
    if config.learner.optimizer == "adamw" and config.learner.offload == "none":
        if config.learner.zero_stage == 0:
            yield "learner.zero_stage", 1
        yield "learner.offload", "optimizer"


def _fits(config: Config, placement: Placement, models: Models, changes: list[tuple[str, Any]]) -> bool:
    config = with_changes(config, dict(changes))
    try:
        LearnerConfig.model_validate(config.learner.model_dump())
    except ValidationError:
        return False
    return not any(card.missing_bytes for card in make_cards(config, placement, models))


def with_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """Returns the config with these values of dotted keys, which are not checked."""
    for key, value in changes.items():
        section, name, *option = key.split(".")
        settings = getattr(config, section)
        value = {**getattr(settings, name), option[0]: value} if option else value
        config = config.model_copy(update={section: settings.model_copy(update={name: value})})
    return config
