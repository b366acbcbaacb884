"""The reward that environments give."""

from __future__ import annotations

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError


def environment(completions: list[object], environment_rewards: list[dict[str, float]]) -> list[dict[str, float]]:
    """The reward of the episode, as its environment gives it, with its parts."""
    return environment_rewards


def check_environment_reward(config: Config) -> None:
    """Raises ConfigError if there is no environment."""
    if config.environment.name is None:
        raise ConfigError(
            f"rewards = {config.rewards!r}: environment is the reward that an environment gives, and there is none; "
            "set environment.name, or name another reward"
        )
