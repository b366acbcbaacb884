"""The replay queue's metrics of episodes with several turns."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import accumulate

from msgspec import field

from asyncrl.replay.metrics.stats import GeneratorState
from asyncrl.types import EPISODE_ENDS, EpisodeEnd
from asyncrl.util.durable import Durable
from asyncrl.util.processes import GENERATOR_ACTIVITIES, fractions
from asyncrl.wire.messages import GroupHeader

EPISODE_FAILURES: tuple[EpisodeEnd, ...] = ("environment", "timeout", "overlong", "host")
"""The ends of a failed episode."""
QUANTILES = {"p50": 0.5, "p95": 0.95}


class Quantiles(Durable):
    """Quantiles of weighted values, which do not depend on the order of the values."""

    values: list[float] = field(default_factory=list[float])
    weights: list[float] = field(default_factory=list[float])

    def add(self, values: Iterable[float], weight: float = 1.0) -> None:
        """Adds values, each with this weight."""
        before = len(self.values)
        self.values.extend(values)
        self.weights.extend([weight] * (len(self.values) - before))

    def table(self, name: str) -> dict[str, float]:
        """`NAME/p50` and `NAME/p95`: the smallest value up to which at least this part of the weight lies; empty
        without values."""
        if not self.values:
            return {}
        pairs = sorted(zip(self.values, self.weights, strict=True))
        below = list(accumulate(weight for _, weight in pairs))
        found: dict[str, float] = {}
        for quantile, part in QUANTILES.items():
            place = next((at for at, weight in enumerate(below) if weight >= part * below[-1]), len(pairs) - 1)
            found[f"{name}/{quantile}"] = pairs[place][0]
        return found


def episode_values(header: GroupHeader) -> dict[str, list[float]]:
    """A value of each episode of a group with rewards, by the metric that is their mean."""
    turns = header.sums_of_members([len(one.turn_rewards) for one in header.episodes])
    branches = header.sums_of_members([1] * len(header.episodes))
    observed = header.sums_of_members([one.observation_tokens for one in header.episodes])
    episodes = header.of_members(header.episodes)
    ends = {f"environment/ended_{end}": [float(one.ended == end) for one in episodes] for end in EPISODE_ENDS}
    return {
        "environment/turns": [float(count) for count in turns],
        "environment/branches": [float(count) for count in branches],
        "environment/observation_tokens": [float(tokens) for tokens in observed],
        "environment/episode_s": [one.environment_s for one in episodes],
        "environment/reset_s": [one.reset_s for one in episodes],
        "environment/tries": [float(one.tries) for one in episodes],
        **ends,
    }


def episode_failures(header: GroupHeader) -> dict[str, list[float]]:
    """`environment/failed/END` of each episode, 1 if it failed by this end; empty without episodes."""
    if not header.episodes:
        return {}
    episodes = header.of_members(header.episodes)
    return {f"environment/failed/{end}": [float(one.ended == end) for one in episodes] for end in EPISODE_FAILURES}


def episode_states(generators: Collection[GeneratorState]) -> dict[str, float]:
    """Numbers of episodes in the generators that are up, and the fraction of the time of all generators in which
    all their episodes waited."""
    seconds = {name: sum(g.seconds[name] for g in generators) for name in GENERATOR_ACTIVITIES}
    up = [g for g in generators if g.last_heartbeat_s is not None]
    return {
        "generator/environments_fraction": fractions(seconds)["environments"],
        "environment/live_episodes": float(sum(g.live_episodes for g in up)),
        "environment/waiting_episodes": float(sum(g.waiting_episodes for g in up)),
    }
