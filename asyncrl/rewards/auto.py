"""`rewards: auto`: that of the environment or, without one, the reward of each data source, as verl chooses it by the
same names."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from asyncrl.config.config import Config
from asyncrl.config.sections import ENVIRONMENT, Rewards
from asyncrl.errors import ConfigError

UNKNOWN = "exact"
"""The reward of a data source that matches no pattern in BY_SOURCE."""

BY_SOURCE = {
    "gsm8k": ("openai/gsm8k", "gsm8k"),
    "math": (
        "lighteval/MATH*",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
        "math",
        "math_dapo*",
        "aime*",
        "numina_*",
        "hiyouga/geometry3k",
    ),
    "code": ("codecontests", "apps", "codeforces", "taco"),
    "choice": ("Rowan/hellaswag", "hellaswag", "allenai/ai2_arc", "cais/mmlu", "TIGER-Lab/MMLU-Pro"),
    "exact": ("arithmetic",),
}
"""Reward -> patterns of the data sources that it is for."""


def known_reward(data_source: str) -> str | None:
    """Returns the built-in reward for a data source; None if it matches no pattern in BY_SOURCE."""
    for reward, patterns in BY_SOURCE.items():
        if any(fnmatchcase(data_source, pattern) for pattern in patterns):
            return reward
    return None


def choose_rewards(config: Config, sources: Mapping[str, int]) -> Rewards:
    """Returns the rewards that `auto` stands for, with `sources` as the number of rows of each data source. Raises
    ConfigError for data without ground truths, unless an environment gives the reward."""
    if config.environment.name is not None:
        return ENVIRONMENT
    if config.data.columns.ground_truth is None:
        raise ConfigError(
            "rewards = 'auto': chooses among rewards that compare with a ground truth, and "
            "data.columns.ground_truth is null; name a reward, such as rewards=reward_model or rewards=file.py:function"
        )
    chosen: dict[str, str] = {source: known_reward(source) or UNKNOWN for source in sorted(sources)}
    rewards = set(chosen.values())
    return rewards.pop() if len(rewards) == 1 else dict(chosen)


def describe_choice(sources: Mapping[str, int]) -> list[str]:
    """Returns one line for the known data sources and one for the others; no line for neither."""
    known = {source: reward for source in sorted(sources) if (reward := known_reward(source))}
    others = [f"{source!r} ({sources[source]:,} rows)" for source in sorted(sources.keys() - known.keys())]
    lines = []
    if known:
        chosen = [f"{reward} for {source!r} ({sources[source]:,} rows)" for source, reward in known.items()]
        lines.append(f"rewards: {', '.join(chosen)}, by data source")
    if others:
        lines.append(
            f"warning: rewards: {UNKNOWN} (1 if the completion equals the ground truth, else 0) for the data source "
            f"{', '.join(others)}, for which none is known; name one with rewards=NAME (see `asyncrl list`) or "
            "rewards=file.py:function"
        )
    return lines
