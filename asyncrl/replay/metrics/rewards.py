"""The means of rewards and lengths since the last step, and a warning when many rewards fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import structlog
from msgspec import field

from asyncrl.replay.metrics.episodes import Quantiles, episode_failures, episode_values
from asyncrl.replay.metrics.stats import ExactMean
from asyncrl.util.durable import Durable
from asyncrl.wire.messages import GroupHeader

log = structlog.get_logger()

LATEST_GROUPS, MAX_FAILED = 100, 0.05
"""Warn when more than this part of the rewards of the latest groups failed."""
EXAMPLES = 3


class RewardsSinceStep(Durable):
    """Means over the members that have a reward, of groups since the last step: rewards, their parts, lengths. They do
    not depend on the order in which groups arrive."""

    means: dict[str, ExactMean] = field(default_factory=dict[str, ExactMean])
    wait_s: Quantiles = field(default_factory=Quantiles)
    """The episodes' `wait_s`."""

    def add(self, header: GroupHeader, completion: Sequence[int]) -> None:
        """Counts the members of a group that have a reward, and the lengths of all; `completion` has the action tokens
        of each trajectory."""
        rewards, all_parts = header.of_scored(header.rewards), header.of_scored(header.parts)
        self._count("reward/mean", rewards)
        self._count(f"reward/{header.data_source}", rewards)
        for name in {name for parts in all_parts for name in parts}:
            self._count(f"reward_part/{name}", [parts[name] for parts in all_parts if name in parts])
        self._count("completion/tokens", [float(tokens) for tokens in header.sums_of_members(completion)])
        if header.greedy_reward is not None:
            self._count("reward/greedy", [header.greedy_reward])
        if header.episodes:
            self._add_episodes(header)
        truncated = [float(status == "truncated") for status in header.of_scored(header.status)]
        self._count("completion/truncated_fraction", truncated)

    def _add_episodes(self, header: GroupHeader) -> None:
        for name, values in episode_values(header).items():
            self._count(name, header.of_scored(values))
        self.wait_s.add([one.wait_s for one in header.of_scored(header.episodes)])

    def count_group(self, header: GroupHeader, *, signal: bool) -> None:
        """Counts any group: whether it has a training signal, and its members without a reward."""
        self._count("reward/signal_fraction", [float(signal)])
        self._count("reward/failed_fraction", [float(bool(error)) for error in header.of_members(header.errors)])
        for name, values in episode_failures(header).items():
            self._count(name, values)

    def table(self) -> dict[str, float]:
        """The means, by name."""
        means = {name: self.means[name].mean for name in sorted(self.means)}
        return means | self.wait_s.table("environment/wait_s")

    def _count(self, name: str, values: Sequence[float]) -> None:
        self.means.setdefault(name, ExactMean()).add(values)


class FailedRewards:
    """Logs failed rewards. Warns of groups that are refunded for them, and with examples each time that the fraction of
    failed ones passes MAX_FAILED."""

    def __init__(self) -> None:
        self._errors: deque[list[str]] = deque(maxlen=LATEST_GROUPS)
        """Error texts of the members of each of the latest groups; empty for a member with a reward."""
        self._are_many = False

    def add(self, header: GroupHeader, *, refunded: bool) -> None:
        """Counts a group; `refunded` is true if it has too few rewards."""
        self._errors.append([*header.of_members(header.errors)])
        errors = [error for error in self._errors[-1] if error]
        if refunded or errors:
            write, event = (log.warning, "group failed") if refunded else (log.info, "rewards failed")
            write(event, ticket=header.ticket, row=header.row, count=len(errors), error=(errors or [""])[0])
        failed = [error for group in self._errors for error in group if error]
        rewards, were_many = sum(map(len, self._errors)), self._are_many
        self._are_many = len(failed) >= EXAMPLES and len(failed) > MAX_FAILED * rewards
        if self._are_many and not were_many:
            examples = list(dict.fromkeys(reversed(failed)))[:EXAMPLES]
            log.warning("many rewards fail", failed=len(failed), rewards=rewards, examples=examples)
