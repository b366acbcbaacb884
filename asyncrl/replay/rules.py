"""Settings that a state of the queue only holds with."""

from __future__ import annotations

from asyncrl.config import Config
from asyncrl.errors import ConfigError


def rules_of(config: Config, num_eval_prompts: int) -> dict[str, int]:
    """Those of a run, by their keys."""
    return {
        "replay.groups_per_step": config.replay.groups_per_step,
        "replay.max_staleness": config.replay.max_staleness,
        "generator.group_size": config.generator.group_size,
        "eval.samples": config.eval.samples,
        "number of evaluation prompts": num_eval_prompts,
    }


def check_rules(before: dict[str, int], now: dict[str, int]) -> None:
    """Raises ConfigError unless a run that had the rules `before` can go on with those of `now`.

    The state also holds with a larger staleness limit; with a smaller one, groups that were admitted would be too old.
    `asyncrl launch --resume` lets none of them change.
    """
    for key, value in now.items():
        if value < before[key] or (value > before[key] and key != "replay.max_staleness"):
            rule = "at least " if key == "replay.max_staleness" else ""
            raise ConfigError(
                f"{key} = {value}: the run was begun with {before[key]}; resume it with {rule}that, or begin another"
            )
