"""Settings that must not change between saving and restoring the queue's state."""

from __future__ import annotations

from asyncrl.config import Config
from asyncrl.errors import ConfigError


def rules_of(config: Config, num_eval_prompts: int) -> dict[str, int]:
    """The values of these settings in a run, by config key."""
    return {
        "replay.groups_per_step": config.replay.groups_per_step,
        "replay.max_staleness": config.replay.staleness_limit,
        "generator.group_size": config.generator.group_size,
        "eval.samples": config.eval.samples,
        "number of evaluation prompts": num_eval_prompts,
    }


def check_rules(before: dict[str, int], now: dict[str, int]) -> None:
    """Raises ConfigError if a setting differs from its value when the run started."""
    for key, value in now.items():
        if value != before[key]:
            raise ConfigError(
                f"{key} = {value}: the run was started with {before[key]}; resume it with that, or start a new run"
            )
