"""The way to an episode, for its program."""

from __future__ import annotations

from typing import NamedTuple

MODEL = "policy"
"""The name of the model."""


class Access(NamedTuple):
    """Base URL and key of an episode."""

    base_url: str
    api_key: str
