"""Console output of `asyncrl plan --model PATH --gpus 8xH100-80`, and the file that it writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from asyncrl.config import Config, load_config, read_config
from asyncrl.errors import ConfigError
from asyncrl.launch.layout.cells import with_lengths
from asyncrl.launch.layout.search import Found, Layout, Tried, search
from asyncrl.launch.resources.engine_memory import engine_host_parts
from asyncrl.launch.resources.fit import Models
from asyncrl.launch.resources.memory import GIB, host_parts, longest_tokens
from asyncrl.plan.cards import parse_cards
from asyncrl.replay.journal import FRAME_BYTES
from asyncrl.util.routing import replayed_routers

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
