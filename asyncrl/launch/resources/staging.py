"""Chooses the memory for versions of the weights on their way: what `weights.staging: auto` stands for."""

from __future__ import annotations

from asyncrl.config import Config
from asyncrl.launch.resources.engine_memory import staging_parts
from asyncrl.launch.resources.fit import Models, make_cards, sends_by_nccl, with_changes
from asyncrl.launch.resources.memory import GIB
from asyncrl.launch.resources.placement import Placement

KEY = "weights.staging"


def choose_staging(config: Config, placement: Placement, *, reward_model: bool) -> tuple[Config, str]:
    """Returns the config with the staging that auto stands for, and one line about the choice; it is empty if there is
    none.

    With the transport ipc that is buckets. Without GPUs, and where the memory of the GPUs or the sizes of the model are
    unknown, it is whole; also if by arithmetic complete versions fit on the GPUs with everything else. Otherwise,
    buckets with NCCL if the engine can load them while the learner has its weights, else host.
    """
    if config.weights.staging != "auto":
        return config, ""
    if config.hands_over:
        return with_changes(config, {KEY: "buckets"}), ""
    whole = with_changes(config, {KEY: "whole"})
    known = all(gpu.memory_bytes is not None for gpu in placement.gpus)
    models = Models.read(config, reward_model=reward_model) if placement.gpus and known else None
    if models is None:
        return whole, ""
    by_nccl = sends_by_nccl(config, placement)
    name = "whole"
    if not by_nccl:
        name = "host"
    elif any(card.missing_bytes for card in make_cards(whole, placement, models)):
        is_reloaded = config.generator.engine == "vllm" and models.policy.active != models.policy.parameters
        needs_all = is_reloaded or config.learner.lora.rank or config.launch.colocated
        name = "host" if needs_all else "buckets"
    chosen = with_changes(config, {KEY: name})
    needed = staging_parts(chosen, models.policy, on_gpu=by_nccl)["staged weights"]
    return chosen, f"weights    staging {name}: {needed / GIB:.1f} GiB on the first GPU of each generator"
