"""The settings of a run: their fields, how they are read, and the errors of settings that cannot work."""

from asyncrl.config.base import AUTO, ENVIRONMENT, MappingValue, Options, Rewards, RewardSpec
from asyncrl.config.config import Config
from asyncrl.config.loading import (
    config_keys,
    find_config,
    load_config,
    option_fields,
    option_keys,
    parse_override,
    read_config,
    settings_of_model,
)
from asyncrl.config.sections import MAX_GENERATORS, too_many_generators
from asyncrl.config.training import AlgorithmConfig, CriticConfig, LearnerConfig
from asyncrl.util.hints import check_options, did_you_mean, did_you_mean_or_list, unknown_name

__all__ = [
    "AUTO",
    "ENVIRONMENT",
    "MAX_GENERATORS",
    "AlgorithmConfig",
    "Config",
    "CriticConfig",
    "LearnerConfig",
    "MappingValue",
    "Options",
    "RewardSpec",
    "Rewards",
    "check_options",
    "config_keys",
    "did_you_mean",
    "did_you_mean_or_list",
    "find_config",
    "load_config",
    "option_fields",
    "option_keys",
    "parse_override",
    "read_config",
    "settings_of_model",
    "too_many_generators",
    "unknown_name",
]
