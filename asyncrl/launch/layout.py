"""Console output of `asyncrl plan --model PATH --gpus 8xH100-80`, and the file that it writes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import yaml
from rich.console import Console

from asyncrl.config.config import Config
from asyncrl.config.load import load_config, read_config
from asyncrl.config.sections import WeightsConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.memory import (
    GIB,
    TRAINED_FRACTION,
    Models,
    Need,
    Shape,
    cache_bytes,
    engine_host_parts,
    generator_need,
    host_parts,
    item_bytes,
    learner_need,
    longest_tokens,
    with_changes,
)
from asyncrl.replay.journal import FRAME_BYTES
from asyncrl.util.model_files import replayed_routers
from asyncrl.util.text import did_you_mean

DEFAULT_TOKENS = 8192
SHOWN = 6
"""Number of options that do not fit in the output."""
LOWERED_BY = {
    "activations": "learner.gradient_checkpointing=true, a smaller learner.tokens_per_microbatch or a larger "
    "learner.sequence_parallel",
    "output layer": "a smaller learner.tokens_per_microbatch",
    "weights to send": "weights.staging=buckets, weights.transport=gloo",
    "staged weights": "weights.transport=gloo",
    "gathered weights": "learner.zero_stage=2",
    "gradients": "more launch.learners, or learner.zero_stage from 2 on",
    "weights": "learner.zero_stage=3, more launch.learners",
    "reference": "learner.zero_stage=3, more launch.learners",
    "float32 copy": "more launch.learners, learner.offload=optimizer",
    "optimizer states": "more launch.learners, learner.offload=optimizer",
    "critic": "critic.ranks, more launch.learners",
    "key": "a smaller generator.engine_options.max_model_len",
    "a step": "a smaller generator.engine_options.max_num_batched_tokens",
    "logits": "a smaller generator.max_running_groups",
}
"""Settings that lower a use of memory, by the first words of its name."""


def show_layout(
    console: Console, path: str, gpus: str, *, base: str | None, out: Path | None, tokens: int | None
) -> None:
    """Prints the best layout that fits, what does not fit, and the config, or writes it to `out`. Raises ConfigError
    with the nearest miss if nothing fits."""
    count, card, gpu = parse_cards(gpus)
    config = _base_config(path, base, tokens)
    models = Models.read(config, reward_model=config.rewards == "reward_model")
    if models is None:
        raise ConfigError(f"--model {path}: config.json lacks the model's sizes")
    others = config.critic.ranks + (models.reward_model is not None)
    if count - others < 2:
        raise ConfigError(f"--gpus {gpus}: critic ranks and reward model take {others}, and at least 2 must be left")
    found = search(config, models, count - others, gpu)
    size = f"{models.policy.parameters / 1e9:.3g}e9 parameters in {config.model.dtype}"
    _print(console, f"{path}: {size}, {gpus} of {gpu.memory_bytes / GIB:.1f} GiB. Computed, not measured.")
    if found.layout is None:
        raise ConfigError(_refusal(found, gpus))
    for line in _describe(found.layout):
        _print(console, line)
    if found.refused:
        _print(console, "\ndoes not fit, nearest first:")
        for tried in found.refused[:SHOWN]:
            _print(console, f"  {_why(tried)}")
    _write(
        console,
        found.layout.config,
        out,
        base,
        f"# {card}: {gpus}. Computed by asyncrl plan --model {path} --gpus {gpus}\n",
    )


def _base_config(path: str, base: str | None, tokens: int | None) -> Config:
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"--model {path}: is no folder with a config.json")
    settings: dict[str, Any] = {"model.path": path}
    if base is None:
        settings |= {"data.train": [], "model.dtype": "bfloat16"}
        tokens = tokens or DEFAULT_TOKENS
    config = load_config(base, settings)
    return config if tokens is None else with_lengths(config, tokens)


def _describe(layout: Layout) -> Iterator[str]:
    launch = layout.config.launch
    for title, tried in (
        (f"each card of {layout.learner.what}", layout.learner),
        (f"each card of {launch.generators} x {layout.generator.what}", layout.generator),
    ):
        yield f"\n{title}: {_sizes(tried)}"
        for name, num_bytes in sorted(tried.need.parts.items(), key=lambda part: -part[1]):
            if num_bytes >= 0.05 * GIB:
                yield f"  {num_bytes / GIB:6.1f}  {name}"
    yield f"  room for {layout.sequences} sequences of the greatest length"
    in_host = launch.learners * sum(host_parts(layout.config, layout.shape, launch.learners).values())
    if in_host:
        yield f"\nhost memory of all learner ranks: {in_host / GIB:.0f} GiB (learner.offload)"
    in_host = sum(engine_host_parts(layout.config, layout.shape).values())
    if in_host:
        yield f"\nhost memory of each generator: {in_host / GIB:.0f} GiB of base weights (learner.lora.load: merged)"
    yield from _queue(layout.config)
    yield (
        f"\ngenerators {layout.generated_per_s:,.0f} tokens/s, learner {layout.trained_per_s:,.0f} tokens/s (roofline, "
        "not measured)"
    )


def _queue(config: Config) -> Iterator[str]:
    model, replay = config.model, config.replay
    routers = replayed_routers(config.algorithm.routing_replay, model.path, trust_remote_code=model.trust_remote_code)
    routing = 0 if routers is None else routers.token_bytes
    trajectories = (replay.max_staleness + 1) * replay.groups_per_step * config.generator.group_size
    held = trajectories * longest_tokens(config) * (FRAME_BYTES + routing)
    yield (
        f"\nreplay queue: at most {held / GIB:.1f} GiB of groups, with trajectories of the greatest length; "
        f"{replay.max_bytes / GIB:.1f} GiB are kept (replay.max_bytes)"
    )
    if routers is not None:
        yield (
            f"\nrouting: {routing} bytes a token in messages, queue and journal, in addition to {FRAME_BYTES} "
            "(algorithm.routing_replay)"
        )


def _sizes(tried: Tried) -> str:
    return f"{tried.need.num_bytes / GIB:.1f} of {tried.limit_bytes / GIB:.1f} GiB"


def _why(tried: Tried) -> str:
    name, num_bytes = max(tried.need.parts.items(), key=lambda part: part[1])
    ways = next((way for begin, way in LOWERED_BY.items() if name.startswith(begin)), "")
    if tried.what.startswith("a generator") and name == "weights":
        ways = "more generator.tensor_parallel"
    if "ZeRO 3" in tried.kind:
        ways = ways.replace("learner.zero_stage=3, ", "")
    return f"{tried.what}: {_sizes(tried)}, of which {num_bytes / GIB:.1f} {name}" + (
        f"; lower: {ways}" if ways else ""
    )


def _refusal(found: Found, gpus: str) -> str:
    lines = [f"--gpus {gpus}: no layout fits by arithmetic. The nearest:"]
    engines = [tried for tried in found.refused if tried.what.startswith("a generator")]
    others = [tried for tried in found.refused if tried not in engines]
    lines += [f"  {_why(tried)}" for tried in (*engines, *others[:1])]
    return "\n".join(lines)


def _write(console: Console, config: Config, out: Path | None, base: str | None, comment: str) -> None:
    read_config(config.to_yaml())  # raises ConfigError for a combination that a launch would refuse
    values = config.model_dump(mode="json", exclude_unset=True)
    if not values["data"].get("train"):
        values["data"].pop("train", None)
    text = comment + yaml.safe_dump(json.loads(json.dumps(values)), sort_keys=False)
    missing = "" if "train" in values["data"] else " data.train=FILE"
    if out is None:
        _print(console, f"\n{text}")
        return
    out.write_text(text)
    _print(console, f"\nasyncrl launch --config {out}{missing}")


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


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
    and every engine has separate cards; `cards` excludes critic ranks and reward model.

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
    """Returns the sort key: no offload first, then small engines, then speed, then simplicity."""
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
    """Returns the other values of `weights.staging` that are allowed and differ in size."""
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


RECOMPUTED_FLOPS = 2
"""FLOPs a token and weight of the second forward pass with checkpointing."""
MEAN_LENGTH = 0.5
"""Mean length of a completion, of the longest."""


def generated_per_s(config: Config, shape: Shape, gpu: Gpu, generation: Generation, fitting_sequences: int) -> float:
    """Returns the tokens that all engines generate per second and that are trained later. An engine decodes at once
    what fits its cache, what it may take, and what admission allows, of whose batches one is being trained."""
    model, job = _model(shape), _job(config)
    of_engine = generation.groups * config.generator.group_size
    batch = config.replay.groups_per_step * config.generator.group_size
    admitted = max(1, config.replay.max_staleness) * batch / generation.engines
    sequences = min(of_engine, fitting_sequences, admitted)
    parallel = generation.tensor_parallel
    return generation.engines * parallel * generation_rate(model, gpu, job, tp=parallel, sequences=sequences)


def trained_per_s(config: Config, shape: Shape, gpu: Gpu, training: Training) -> float:
    """Returns the tokens that all learner ranks train per second. With ZeRO stage 2 ranks exchange the gradients of
    each micro-batch, and with stage 3 they gather the weights twice. Ranks that share sequences exchange queries, keys,
    values and outputs of their part in each pass; nothing overlaps."""
    model = _model(shape)
    flops = gpu.train_flops if training.checkpointing else gpu.train_flops - RECOMPUTED_FLOPS
    mfu = gpu.moe_mfu if model.is_moe else gpu.dense_mfu
    compute_s = training.tokens * flops * shape.active / (gpu.flops * mfu)
    gathered = 2 * item_bytes(config.model.dtype) if training.stage == 3 else 0
    exchanged = gathered + (4 if training.stage >= 2 else 0)
    exchange_s = exchanged * shape.trained / gpu.reduce_bytes_per_s if training.ranks > 1 else 0.0
    if training.parallel > 1:
        passes = 3 if training.checkpointing else 2
        sent = passes * shape.layers * 2 * (shape.query + shape.key_value) * item_bytes(config.model.dtype)
        exchange_s += sent * training.tokens / training.parallel / gpu.reduce_bytes_per_s
    return training.ranks / training.parallel * training.tokens / (compute_s / training.parallel + exchange_s)


def _job(config: Config) -> Job:
    prompt = config.data.max_prompt_tokens or 0
    answer = MEAN_LENGTH * (longest_tokens(config) - prompt)
    return Job(answer_tokens=max(answer, 1), prompt_tokens=prompt)


def _model(shape: Shape) -> ModelShape:
    return ModelShape(
        parameters=shape.parameters, active=shape.active, layers=shape.layers,
        hidden=shape.hidden, kv_heads=shape.key_value_heads, head_size=shape.key_value // shape.key_value_heads,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, and what models reach on it. Defaults are of an H100 SXM."""

    memory_bytes: float = 80e9
    memory_bytes_per_s: float = 3.35e12
    flops: float = 989e12
    """Dense bfloat16 operations per second."""
    engine_bandwidth: float = 0.7
    """Fraction of the bandwidth that decoding reaches; assumed, as all below without a source."""
    engine_flops: float = 0.5
    """Fraction of the operations per second that decoding reaches."""
    step_s: float = 4e-3
    """Fixed time of an engine step."""
    host_sequence_s: float = 20e-6
    """Time that a step's sequence takes of the engine's Python thread, which works while the GPU does: a third of the
    48 to 68 us measured on a core of a small virtual machine."""
    reduce_s: float = 10e-6
    """Fixed time of an all-reduce."""
    reduce_bytes_per_s: float = 200e9
    """Rate of an all-reduce within a host."""
    dense_mfu: float = 0.35
    """Model FLOPs utilization of the learner; 0.38 to 0.43 in Llama 3 (arXiv:2407.21783)."""
    moe_mfu: float = 0.2
    train_flops: float = 10
    """Operations of a trained token and active weight: forward, backward, recomputed, scored once."""


@dataclass(frozen=True, slots=True)
class Job:
    """The job: lengths and goodput."""

    answer_tokens: float
    """Mean length of a completion."""
    prompt_tokens: float
    context: float = 0.6
    """Tokens before a token of a completion, on average, in mean lengths; 0.5 with equal lengths."""
    goodput: float = 0.7
    """Fraction of the generated tokens that is trained; the others have no signal."""

    @property
    def mean_context(self) -> float:
        """Tokens before a token that is decoded, on average."""
        return self.prompt_tokens + self.context * self.answer_tokens


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that its speed depends on."""

    parameters: float
    active: float
    """Parameters that a token uses."""
    layers: int
    hidden: int
    kv_heads: int
    head_size: int = 128

    @property
    def bytes(self) -> float:
        """Bytes of the weights in bfloat16."""
        return 2 * self.parameters

    @property
    def is_moe(self) -> bool:
        """True if a token uses a part of the weights only."""
        return self.active < self.parameters

    def cache_bytes(self, tp: int) -> float:
        """Bytes of keys and values of a token in bfloat16, on all GPUs of an engine: with more GPUs than key-value
        heads each GPU has a copy of one head."""
        return 2 * 2 * self.layers * max(self.kv_heads, tp) * self.head_size


def generation_rate(model: ModelShape, gpu: Gpu, job: Job, *, tp: int, sequences: float) -> float:
    """Returns the tokens of one GPU of an engine, per second, that are trained later."""
    return sequences / (decode_s(model, gpu, job, tp=tp, sequences=sequences) * tp) * job.goodput


def decode_s(model: ModelShape, gpu: Gpu, job: Job, *, tp: int, sequences: float) -> float:
    """Returns the seconds of an engine step, in which each sequence gets a token: weights and caches are read,
    multiplied, and summed over the engine's GPUs twice in each layer. With many sequences of a small model the
    engine's Python thread takes longer."""
    running = max(sequences, 1.0)
    read_bytes = model.bytes + running * model.cache_bytes(tp) * job.mean_context
    read_s = read_bytes / (tp * gpu.memory_bytes_per_s * gpu.engine_bandwidth)
    multiply_s = 2 * model.active * running / (tp * gpu.flops * gpu.engine_flops)
    shared_bytes = 2 * (tp - 1) / tp * running * model.hidden * 2
    reduce_s = gpu.reduce_s + shared_bytes / gpu.reduce_bytes_per_s if tp > 1 else 0.0
    gpu_s = read_s + multiply_s + gpu.step_s + 2 * model.layers * reduce_s
    return max(gpu_s, gpu.host_sequence_s * running)


MIB = 1 << 20


def _card(memory_mib: int, memory_bytes_per_s: float, flops: float, reduce_bytes_per_s: float) -> Gpu:
    return Gpu(
        memory_bytes=memory_mib * MIB,
        memory_bytes_per_s=memory_bytes_per_s,
        flops=flops,
        reduce_bytes_per_s=reduce_bytes_per_s,
    )


CARDS = {
    "A100-40": _card(40_960, 1.555e12, 312e12, 130e9),
    "A100-80": _card(81_920, 2.039e12, 312e12, 130e9),
    "H100-80": _card(81_559, 3.35e12, 989e12, 200e9),
    "H200-141": _card(143_771, 4.8e12, 989e12, 200e9),
    "B200-180": _card(182_630, 7.7e12, 2250e12, 400e9),
    "L40S-48": _card(46_068, 0.864e12, 362e12, 14e9),
    "RTX4090-24": _card(24_564, 1.008e12, 165e12, 10e9),
}
"""Cards by name."""
EXAMPLE = "8xH100-80, or 4xMINE:48G for a card that is not in the table"
UNITS = {"": 1, "M": 1 << 20, "G": 1 << 30}
MAX_CARDS = 1024


def parse_cards(text: str) -> tuple[int, str, Gpu]:
    """Returns number, name and data of the cards in NxNAME or NxNAME:BYTES. The latter has the memory that is given,
    and all else of an H100 unless the name is in the table. Raises ConfigError."""
    found = re.fullmatch(r"(\d+)x([^:]+)(?::(\d+)([MG]?))?", text.strip())
    if found is None:
        raise ConfigError(f"--gpus {text}: expected {EXAMPLE}")
    count, name = int(found[1]), found[2]
    if not 2 <= count <= MAX_CARDS:
        raise ConfigError(
            f"--gpus {text}: must be from 2 to {MAX_CARDS} cards, one for a generator and one for a learner"
        )
    if found[3] is not None:
        given = CARDS.get(name, Gpu())
        memory_bytes = int(found[3]) * UNITS[found[4]]
        if memory_bytes < UNITS["G"]:
            raise ConfigError(f"--gpus {text}: a card of {memory_bytes:,} bytes; at least 1G")
        return count, name, _card(memory_bytes // MIB, given.memory_bytes_per_s, given.flops, given.reduce_bytes_per_s)
    if name not in CARDS:
        raise ConfigError(
            f"--gpus {text}: no card {name}{did_you_mean(name, CARDS)} Known are {', '.join(sorted(CARDS))}; "
            f"{name}:BYTES gives the memory of another one"
        )
    return count, name, CARDS[name]
