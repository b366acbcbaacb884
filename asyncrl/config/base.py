"""The bases of a config's sections and of its mapping-valued keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

Options = dict[str, bool | int | float | str | None]
"""Keyword-only arguments for a function named in the config."""

RewardSpec = str | dict[str, float]
"""The reward of a row: one function, or several with their weights."""
Rewards = RewardSpec | dict[str, RewardSpec]
AUTO = "auto"
"""The value of `rewards` that a run replaces by its own choice."""
ENVIRONMENT = "environment"
"""The name in `rewards` of the reward that the environment gives."""


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class Section(_Settings):
    """A group of keys; unknown ones are refused."""


class MappingValue(_Settings):
    """The value of one key: a mapping with known names. Missing names have their defaults, unknown ones are refused."""


class Entry(_Settings):
    """An entry of a mapping whose names the user chooses; unknown fields are refused."""
