"""Rewards for the length of a completion."""

from __future__ import annotations

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError


def overlong(
    completion_ids: list[list[int]], max_new_tokens: int, completions: list[object], *, buffer_tokens: int | None = None
) -> list[float]:
    """DAPO's soft overlong penalty, between 0 and -1 (arXiv:2503.14476 eq. 13).

    min(0, -(n - (max_new_tokens - buffer_tokens)) / buffer_tokens) for n tokens, and never below -1. The default
    buffer is a fifth of max_new_tokens, the paper's proportion.
    """
    buffer = buffer_tokens or default_buffer(max_new_tokens)
    free = max_new_tokens - buffer
    return [-min(1.0, max(0, len(tokens) - free) / buffer) for tokens in completion_ids]


def truncated(statuses: list[str], completions: list[object]) -> list[float]:
    """-1 for a completion cut at the token limit, else 0."""
    return [-float(status == "truncated") for status in statuses]


def default_buffer(max_new_tokens: int) -> int:
    """The buffer in tokens when none is set."""
    return max(1, max_new_tokens // 5)


def check_overlong(config: Config) -> None:
    """Raises ConfigError when the buffer is not between 1 and the token limit, and with an environment, since
    completions of several turns have no token limit."""
    if config.environment.name is not None:
        raise ConfigError(
            "rewards: overlong with environment.name: generator.max_new_tokens is the limit of a turn, not of the "
            "episode that overlong would compare with it; use truncated, or a function of your own"
        )
    buffer, limit = config.reward_options.get("overlong", {}).get("buffer_tokens"), config.generator.max_new_tokens
    if isinstance(buffer, int) and not 1 <= buffer <= limit:
        raise ConfigError(
            f"reward_options.overlong.buffer_tokens = {buffer}: must be from 1 to generator.max_new_tokens = {limit}"
        )
