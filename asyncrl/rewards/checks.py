"""What can be known to be wrong with a run's rewards before anything starts."""

from __future__ import annotations

import importlib

from asyncrl.config import Config
from asyncrl.rewards.table import RewardTable, reward_names

CHECKS: dict[str, str] = {
    "format": "asyncrl.rewards.text:check_format",
    "choice": "asyncrl.rewards.text:check_choice",
    "overlong": "asyncrl.rewards.length:check_overlong",
    "code": "asyncrl.rewards.code:check_code",
    "reward_model": "asyncrl.rewards.reward_model:check_reward_model",
}
"""Where built-in rewards look at the config themselves: functions that take it and raise ConfigError."""


def check_rewards(config: Config) -> None:
    """Loads every function the config names with its options, and has built-in ones look for what they need.

    Raises ConfigError. That every data source has a reward is checked by `table.check_sources`, with the data.
    """
    RewardTable(config.rewards, config.reward_options)
    for name in reward_names(config.rewards):
        if name in CHECKS:
            module, _, function = CHECKS[name].partition(":")
            getattr(importlib.import_module(module), function)(config)
