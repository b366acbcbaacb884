"""`asyncrl plan --model PATH --gpus 8xH100-80`: the fastest layout that fits, estimated from the model's sizes and the
GPU's rates; its config, and what does not fit.

search         every layout of a grid: what each side needs of a GPU (`asyncrl.launch.memory`), and its tokens/s
show_layout    prints the result, or writes the config
parse_cards    the GPUs by their names, with their rates
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from asyncrl.config.config import Config
from asyncrl.config.load import load_config, read_config
from asyncrl.errors import ConfigError
from asyncrl.launch.memory import (
    GIB,
    TRAINED_FRACTION,
    Models,
    Need,
    Shape,
    cache_bytes,
    generator_need,
    host_parts,
    item_bytes,
    learner_need,
    longest_tokens,
    takes_buckets,
    with_changes,
)
from asyncrl.util.text import did_you_mean
from asyncrl.weights.transports import transport_on_gpus

DEFAULT_TOKENS = 8192
LOWERED_BY = {
    "activations": "learner.gradient_checkpointing=true, a smaller learner.tokens_per_microbatch or a larger "
    "learner.sequence_parallel",
    "output layer": "a smaller learner.tokens_per_microbatch",
    "weights to send": "weights.staging=buckets, weights.transport=gloo",
    "staged weights": "weights.staging=buckets, weights.transport=gloo",
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
    layout, refused = search(config, models, count - others, gpu)
    size = f"{models.policy.parameters / 1e9:.3g}e9 parameters in {config.model.dtype}"
    _print(console, f"{path}: {size}, {gpus} of {gpu.memory_bytes / GIB:.1f} GiB. Computed, not measured.")
    if layout is None:
        raise ConfigError(_refusal(refused, gpus))
    for line in _describe(layout):
        _print(console, line)
    _write(console, layout.config, out, f"# {card}: {gpus}. Computed by asyncrl plan --model {path} --gpus {gpus}\n")


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
    for title, side in (
        (f"each card of {layout.learner.what}", layout.learner),
        (f"each card of {launch.generators} x {layout.generator.what}", layout.generator),
    ):
        yield f"\n{title}: {_sizes(side)}"
        for name, num_bytes in sorted(side.need.parts.items(), key=lambda part: -part[1]):
            if num_bytes >= 0.05 * GIB:
                yield f"  {num_bytes / GIB:6.1f}  {name}"
    yield f"  room for {layout.generator.sequences} sequences of the greatest length"
    in_host = launch.learners * sum(host_parts(layout.config, layout.shape, launch.learners).values())
    if in_host:
        yield f"\nhost memory of all learner ranks: {in_host / GIB:.0f} GiB (learner.offload)"
    yield (
        f"\ngenerators {layout.generated_per_s:,.0f} tokens/s, learner {layout.trained_per_s:,.0f} tokens/s (roofline, "
        "not measured)"
    )


def _sizes(side: Side) -> str:
    return f"{side.need.num_bytes / GIB:.1f} of {side.limit_bytes / GIB:.1f} GiB"


def _why(side: Side) -> str:
    name, num_bytes = max(side.need.parts.items(), key=lambda part: part[1])
    ways = next((way for begin, way in LOWERED_BY.items() if name.startswith(begin)), "")
    if side.is_generator and name == "weights":
        ways = "more generator.tensor_parallel"
    if "ZeRO 3" in side.kind:
        ways = ways.replace("learner.zero_stage=3, ", "")
    return f"{side.what}: {_sizes(side)}, of which {num_bytes / GIB:.1f} {name}" + (f"; lower: {ways}" if ways else "")


def _refusal(refused: list[Side], gpus: str) -> str:
    engines = [side for side in refused if side.is_generator]
    learners = [side for side in refused if not side.is_generator]
    lines = [f"  {_why(side)}" for side in (*engines, *learners[:1])]
    return "\n".join([f"--gpus {gpus}: no layout is estimated to fit. The nearest:", *lines])


def _write(console: Console, config: Config, out: Path | None, comment: str) -> None:
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
TENSOR_PARALLEL = (1, 2, 4, 8)
"""Cards of an engine; they are on one host."""
STAGES = (1, 2, 3)
OFFLOADS = ("none", "optimizer", "all")
MAX_MICROBATCH_TOKENS = 32768
"""Larger micro-batches need more memory and are hardly faster."""
MICROBATCHES = 4
"""Sizes of micro-batches that are tried, each twice the one before."""


@dataclass(frozen=True, slots=True)
class Side:
    """The learner ranks or an engine of a layout, and what each needs of a card."""

    what: str
    kind: str
    """The same for sides that differ in numbers only."""
    cards: int
    """Cards of all ranks, or of an engine."""
    changes: dict[str, Any]
    """Config keys of the side."""
    need: Need
    limit_bytes: int
    sequences: int = 0
    """Sequences of the greatest length that the cache of an engine has room for."""

    @property
    def is_generator(self) -> bool:
        return self.what.startswith("a generator")

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the need exceeds the limit; 0 if it fits."""
        return max(0, self.need.num_bytes - self.limit_bytes)


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout that fits."""

    config: Config
    shape: Shape
    learner: Side
    generator: Side
    generated_per_s: float
    trained_per_s: float

    @property
    def tokens_per_s(self) -> float:
        """The rate of the slower side."""
        return min(self.generated_per_s, self.trained_per_s)

    @property
    def preference(self) -> tuple[float, ...]:
        """The sort key: no offload first, then small engines, then speed, then simplicity."""
        learner, rate = self.config.learner, float(f"{self.tokens_per_s:.3g}")
        simple = (-learner.zero_stage, not learner.gradient_checkpointing, learner.tokens_per_microbatch)
        return -OFFLOADS.index(learner.offload), -self.config.generator.tensor_parallel, rate, *simple


def search(base: Config, models: Models, cards: int, gpu: GpuModel) -> tuple[Layout | None, list[Side]]:
    """Returns the preferred layout of those that fit, None if nothing fits; and the nearest of each kind that does not
    fit, the nearest first. Every learner rank and every engine has separate cards; `cards` excludes critic ranks and
    reward model. With `weights.staging: auto` buckets are tried when whole versions fit with offload only."""
    best, refused = _search(base, models, cards, gpu)
    buckets = with_changes(base, {"weights.staging": "buckets"})
    is_free = (
        base.weights.staging == "auto" and transport_on_gpus(base).on_device and takes_buckets(base, models.policy)
    )
    if is_free and (best is None or best.config.learner.offload != "none"):
        other, refused_too = _search(buckets, models, cards, gpu)
        best = max(filter(None, (best, other)), key=lambda layout: layout.preference, default=None)
        refused += refused_too
    refused.sort(key=lambda side: -side.missing_bytes)
    nearest = {side.kind: side for side in refused}
    return best, sorted(nearest.values(), key=lambda side: side.missing_bytes)


def _search(base: Config, models: Models, cards: int, gpu: GpuModel) -> tuple[Layout | None, list[Side]]:
    engines = [_engine(base, models, gpu, parallel) for parallel in engine_sizes(base, models.policy, cards - 1)]
    learners = list(_learners(base, models, cards - 1, gpu))
    layouts: list[Layout] = []
    for engine, learner in product(engines, learners):
        num_engines = (cards - learner.cards) // engine.cards
        if num_engines and not engine.missing_bytes and not learner.missing_bytes:
            groups = max(1, min(base.generator.max_running_groups, engine.sequences // base.generator.group_size))
            sizes = {"launch.generators": num_engines, "generator.max_running_groups": groups}
            config = with_changes(base, {**learner.changes, **sizes, **engine.changes})
            generated = generated_per_s(config, models.policy, gpu, engine.sequences)
            trained = trained_per_s(config, models.policy, gpu)
            layouts.append(Layout(config, models.policy, learner, engine, generated, trained))
    refused = [side for side in (*engines, *learners) if side.missing_bytes]
    return max(layouts, key=lambda layout: layout.preference, default=None), refused


def _learners(base: Config, models: Models, max_ranks: int, gpu: GpuModel) -> Iterator[Side]:
    """Yields the learner's sides. If none fits with a micro-batch, or ranks are too few, larger ones are left out."""
    for checkpointing in (False, True):
        for tokens in microbatches(base):
            sides = [
                _learner(base, models, gpu, ranks, stage, offload, checkpointing=checkpointing, tokens=tokens)
                for ranks in range(base.learner.sequence_parallel, max_ranks + 1, base.learner.sequence_parallel)
                for stage, offload in _memory_savings(ranks)
            ]
            yield from sides
            if all(side.missing_bytes for side in sides):
                break


def _memory_savings(ranks: int) -> list[tuple[int, str]]:
    """ZeRO stages, and kinds of offload."""
    savings = [(stage, "none") for stage in (STAGES if ranks > 1 else STAGES[:1])]
    return [*savings, (2, "optimizer"), (3, "optimizer"), (3, "all")]


def _learner(
    base: Config,
    models: Models,
    gpu: GpuModel,
    ranks: int,
    stage: int,
    offload: str,
    *,
    checkpointing: bool,
    tokens: int,
) -> Side:
    parallel = base.learner.sequence_parallel
    shards = ranks // parallel  # ranks that share sequences have the same groups
    changes = {
        "launch.learners": ranks,
        "replay.groups_per_step": math.ceil(base.replay.groups_per_step / shards) * shards,
        "learner.zero_stage": stage,
        "learner.gradient_checkpointing": checkpointing,
        "learner.tokens_per_microbatch": tokens,
        **({} if offload == base.learner.offload else {"learner.offload": offload}),
    }
    kind = f"ZeRO {stage}, {'checkpointed' if checkpointing else 'plain'}"
    kind += "" if offload == "none" else f", offload {offload}"
    kind += "" if parallel == 1 else f", sequences shared by {parallel}"
    num_ranks = "1 learner rank" if ranks == 1 else f"{ranks} learner ranks"
    need = learner_need(with_changes(base, changes), models, 0, from_gpu=transport_on_gpus(base).on_device)
    limit_bytes = round(TRAINED_FRACTION * gpu.memory_bytes)
    return Side(f"{num_ranks}, {kind}, {tokens} tokens", kind, ranks, changes, need, limit_bytes)


def _engine(base: Config, models: Models, gpu: GpuModel, parallel: int) -> Side:
    """Returns an engine with the need of its first card, which has room for the least number of sequences."""
    longest, limit_bytes = longest_tokens(base), round(base.generator.gpu_memory_utilization * gpu.memory_bytes)
    least_groups = math.ceil(LEAST_SEQUENCES / base.generator.group_size)
    needs: list[Need] = []
    sequence_bytes = 0
    for groups in sorted({base.generator.max_running_groups, least_groups}, reverse=True):
        keys = {"generator.max_running_groups": groups, "generator.tensor_parallel": parallel}
        config = with_changes(base, keys)
        need = generator_need(config, models, 0, 0, from_gpu=transport_on_gpus(base).on_device)
        sequence_bytes = cache_bytes(config, models.policy, longest)
        parts = {name: num_bytes for name, num_bytes in need.parts.items() if not name.startswith("key")}
        cache = f"key-value cache of {LEAST_SEQUENCES} sequences of {longest} tokens"
        needs.append(replace(need, parts=parts | {cache: LEAST_SEQUENCES * sequence_bytes}))
    need = next((need for need in needs if need.num_bytes <= limit_bytes), needs[-1])
    free_bytes = limit_bytes - need.num_bytes + LEAST_SEQUENCES * sequence_bytes
    what = f"a generator on {parallel} card{'s' if parallel > 1 else ''}"
    changes = {} if parallel == base.generator.tensor_parallel else {"generator.tensor_parallel": parallel}
    return Side(what, what, parallel, changes, need, limit_bytes, max(0, free_bytes // sequence_bytes))


def microbatches(base: Config) -> list[int]:
    """Returns the sizes of micro-batches to try, in tokens, in ascending order."""
    longest = longest_tokens(base)
    return sorted({max(longest, MAX_MICROBATCH_TOKENS >> shift) for shift in range(MICROBATCHES)})


def engine_sizes(base: Config, shape: Shape, cards: int) -> list[int]:
    """Returns the numbers of cards that an engine can have, of at most `cards`: its attention heads are divided."""
    if base.generator.engine != "vllm" or base.deterministic:
        return [1]
    return [parallel for parallel in TENSOR_PARALLEL if parallel <= cards and shape.heads % parallel == 0]


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


@dataclass(frozen=True, slots=True)
class GpuModel:
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


RECOMPUTED_FLOPS = 2
"""FLOPs a token and weight of the second forward pass with checkpointing."""
MEAN_LENGTH = 0.5
"""Mean length of a completion, of the longest."""
MEAN_CONTEXT = 0.6
"""Tokens before a token of a completion, on average, in mean lengths; 0.5 with equal lengths."""
GOODPUT = 0.7
"""Fraction of the generated tokens that is trained; the others have no signal."""


def generated_per_s(config: Config, shape: Shape, gpu: GpuModel, fitting_sequences: int) -> float:
    """Returns the tokens that all engines generate per second and that are trained later. An engine decodes at once
    what fits its cache, what it may take, and what admission allows, of whose batches one is being trained."""
    engines, size = config.launch.generators, config.generator.group_size
    admitted = max(1, config.replay.max_staleness) * config.replay.groups_per_step * size / engines
    sequences = min(config.generator.max_running_groups * size, fitting_sequences, admitted)
    prompt = config.data.max_prompt_tokens or 0
    context = prompt + MEAN_CONTEXT * max(1.0, MEAN_LENGTH * (longest_tokens(config) - prompt))
    step_s = decode_s(shape, gpu, tp=config.generator.tensor_parallel, sequences=sequences, context_tokens=context)
    return engines * sequences / step_s * GOODPUT


def decode_s(shape: Shape, gpu: GpuModel, *, tp: int, sequences: float, context_tokens: float) -> float:
    """Returns the seconds of a step of an engine on `tp` GPUs, in which each sequence gets a token: weights and caches
    in bfloat16 are read, multiplied, and summed over the GPUs twice in each layer. With many sequences of a small
    model the engine's Python thread takes longer."""
    running, head_size = max(sequences, 1.0), shape.key_value // shape.key_value_heads
    # With more GPUs than key-value heads each GPU has a copy of one head.
    cache_bytes_per_token = 2 * 2 * shape.layers * max(shape.key_value_heads, tp) * head_size
    read_bytes = 2 * shape.parameters + running * cache_bytes_per_token * context_tokens
    read_s = read_bytes / (tp * gpu.memory_bytes_per_s * gpu.engine_bandwidth)
    multiply_s = 2 * shape.active * running / (tp * gpu.flops * gpu.engine_flops)
    shared_bytes = 2 * (tp - 1) / tp * running * shape.hidden * 2
    reduce_s = gpu.reduce_s + shared_bytes / gpu.reduce_bytes_per_s if tp > 1 else 0.0
    gpu_s = read_s + multiply_s + gpu.step_s + 2 * shape.layers * reduce_s
    return max(gpu_s, gpu.host_sequence_s * running)


def trained_per_s(config: Config, shape: Shape, gpu: GpuModel) -> float:
    """Returns the tokens that all learner ranks train per second. With ZeRO stage 2 ranks exchange the gradients of
    each micro-batch, and with stage 3 they gather the weights twice. Ranks that share sequences exchange queries, keys,
    values and outputs of their part in each pass; nothing overlaps."""
    learner, ranks = config.learner, config.launch.learners
    tokens, parallel, item = learner.tokens_per_microbatch, learner.sequence_parallel, item_bytes(config.model.dtype)
    flops = gpu.train_flops if learner.gradient_checkpointing else gpu.train_flops - RECOMPUTED_FLOPS
    mfu = gpu.moe_mfu if shape.active < shape.parameters else gpu.dense_mfu
    compute_s = tokens * flops * shape.active / (gpu.flops * mfu)
    exchanged = (2 * item if learner.zero_stage == 3 else 0) + (4 if learner.zero_stage >= 2 else 0)
    exchange_s = exchanged * shape.trained / gpu.reduce_bytes_per_s if ranks > 1 else 0.0
    if parallel > 1:
        passes = 3 if learner.gradient_checkpointing else 2
        sent_bytes = passes * shape.layers * 2 * (shape.query + shape.key_value) * item
        exchange_s += sent_bytes * tokens / parallel / gpu.reduce_bytes_per_s
    return ranks / parallel * tokens / (compute_s / parallel + exchange_s)


MIB = 1 << 20


def _card(memory_mib: int, memory_bytes_per_s: float, flops: float, reduce_bytes_per_s: float) -> GpuModel:
    return GpuModel(
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


def parse_cards(text: str) -> tuple[int, str, GpuModel]:
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
        given = CARDS.get(name, GpuModel())
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
