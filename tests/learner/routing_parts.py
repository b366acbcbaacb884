"""A small mixture of experts, groups that the engine samples from it with their experts, and the learner's errors on
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from worlds import make_config

from asyncrl.config.config import Config
from asyncrl.generator.engine import Completion
from asyncrl.generator.groups import GroupInProgress, make_group
from asyncrl.generator.transformers_backend.engine import TransformersEngine
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.model.policy import Policy
from asyncrl.rewards.pool import Scored
from asyncrl.types import Group, Lease, Prompt

FAMILIES = ["mixtral", "qwen3_moe"]
LAYERS, CHOSEN = 2, 2
PROMPTS = [[3, 9, 27, 81, 55], [4, 16, 64, 17, 68, 80, 33]]


def config_of(folder: Path, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "algorithm": {"routing_replay": "engine"},
        "generator": {
            "engine": "transformers",
            "max_running_groups": 2,
            "kv_cache_bytes": 1 << 22,
            "engine_options": {"max_model_len": 64},
        },
        "learner": {"tokens_per_microbatch": 64},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return make_config(folder, **values)


def run_all(
    engine: TransformersEngine, swaps: dict[int, list[tuple[str, Tensor]]] | None = None
) -> dict[str, Completion]:
    """Completes all requests. Before the steps of `swaps` the engine gets other weights."""
    done: dict[str, Completion] = {}
    step = 0
    while engine.num_running:
        if swaps and step in swaps:
            engine.swap(engine.version + 1, swaps[step])
        done |= {one.key: one for one in engine.step()}
        step += 1
    return done


def groups_of(config: Config, engine: TransformersEngine) -> list[Group]:
    """Samples a group for each of PROMPTS, as a generator makes it."""
    size = config.generator.group_size
    leases = [
        GroupInProgress(
            Lease(ticket, 0, Prompt(ticket, np.array(tokens, np.int32), "", "test")), size, engine.version, 0.0
        )
        for ticket, tokens in enumerate(PROMPTS)
    ]
    for running in leases:
        for index in range(size):
            engine.add(f"{running.name}.{index}", running.lease.prompt.tokens)
    done = run_all(engine)
    groups: list[Group] = []
    for running in leases:
        running.completions = {index: [done[f"{running.name}.{index}"]] for index in range(size)}
        rewards = [float(index % 2) for index in range(size)]
        scored = Scored(running.key, rewards, [{} for _ in rewards], ["" for _ in rewards])
        groups.append(make_group(running, scored, generator=0))
    return groups


def errors_of(policy: Policy, micros: list[MicroBatch]) -> Tensor:
    """Returns how far the log-probs are from those of the engine, in nats."""
    return torch.cat([(policy.logprobs(micro) - micro.behavior_logprobs).abs() for micro in micros])


def live(config: Config) -> Config:
    """Returns the config of a learner that routes tokens itself."""
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"routing_replay": "off"})})


@torch.no_grad()
def move_routers(policy: Policy) -> None:
    """Adds noise to the weights of the routers, so that other experts win for some tokens."""
    noise = torch.Generator().manual_seed(5)
    for name, parameter in policy.model.named_parameters():
        if name.endswith("gate.weight"):
            shift = torch.randn(parameter.shape, generator=noise)
            parameter.add_(0.3 * parameter.std() * shift.to(parameter.device))
