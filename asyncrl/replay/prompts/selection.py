"""The choice of rows that are generated: those whose latest groups had no training signal are skipped at times.

A row is kept with probability max((1 - strength)^streak, floor), where the streak is the number of its latest groups in
a row whose rewards were all equal. Every choice is a function of the journal's records: the draw is a hash of the seed
and its number, and what it depends on changes at commits only, by the groups since the last one in the order of
tickets.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import structlog
from msgspec import field

from asyncrl.config.config import Config
from asyncrl.replay.prompts.pass_rates import MAX_BYTE, PassRates, RowOutcome, RowRecord
from asyncrl.types import RowPlace
from asyncrl.util.durable import Durable, restore
from asyncrl.wire.messages import GroupHeader

log = structlog.get_logger()

MAX_INTERVALS = 4
"""A row, and a lease, has at most this many times 1 / floor skips in a row; the next one is kept."""
WINDOW_GROUPS = 256
"""Groups over which mean weights are taken, once there are that many."""


class RowChoice(Durable):
    """How the row of a lease was chosen, and what was known of it."""

    probability: float = 1.0
    """With which it was kept."""
    pool: int = 0
    epoch: int | None = None
    """As in `RowPlace`."""
    weight: float = 1.0
    """Weight of the group in the means of all scored groups, so that they are those of all rows; 1 on average."""
    mean: float = 0.0
    """Mean over the rows of the pool of their own mean rewards."""
    expected: float = 0.0
    """The row's own mean reward; an unseen row has `mean`."""


class MeanWeight(Durable):
    """Decayed mean of 1 / probability over groups, by which weights are divided, so that they are 1 on average."""

    value: float = 1.0
    groups: int = 0

    def add(self, choice: RowChoice) -> None:
        """Counts a group."""
        self.groups = min(self.groups + 1, WINDOW_GROUPS)
        self.value += (1.0 / choice.probability - self.value) / self.groups


class RowMeans(Durable):
    """The mean rewards of the seen rows of a pool."""

    rows: int = 0
    reward: float = 0.0
    """Sum of them."""

    @property
    def mean(self) -> float:
        """Mean over the rows; 0 without any."""
        return self.reward / max(self.rows, 1)


class PoolSums(Durable):
    """The seen rows of a pool, and the mean weights of its groups."""

    rows: RowMeans = field(default_factory=RowMeans)
    epoch: int | None = None
    """Epoch of the latest lease."""
    at_epoch: RowMeans = field(default_factory=RowMeans)
    """`rows` by the groups of the epochs before: what is known of the rows that are still to come in this one."""
    scored: MeanWeight = field(default_factory=MeanWeight)
    """Of all groups that have rewards."""
    trained: MeanWeight = field(default_factory=MeanWeight)
    """Of those that are trained."""

    def begin(self, epoch: int) -> None:
        """Begins the epoch, unless it has begun."""
        if epoch != self.epoch:
            self.epoch, self.at_epoch = epoch, RowMeans(self.rows.rows, self.rows.reward)

    def add(self, choice: RowChoice, change: float, *, is_new: bool, trained: bool) -> None:
        """Counts a group that changes the mean reward of its row."""
        for means in (self.rows, self.at_epoch) if choice.epoch != self.epoch else (self.rows,):
            means.rows += is_new
            means.reward += change
        self.scored.add(choice)
        if trained:
            self.trained.add(choice)


class ChosenOutcome(Durable):
    """A finished group that no commit has counted yet."""

    of_row: RowOutcome
    choice: RowChoice
    trained: bool
    """False if it is refunded or dropped."""


class SelectionSums(Durable, kw_only=True):
    """What a restart must keep of a selection."""

    draws: int = 0
    skipped: int = 0
    """Times that a row was skipped."""
    pools: dict[int, PoolSums] = field(default_factory=dict[int, PoolSums])
    outcomes: list[ChosenOutcome] = field(default_factory=list[ChosenOutcome])
    """Since the last commit."""


class SelectionRecord(SelectionSums, kw_only=True):
    """The durable form of a `RowSelection`."""

    rows: RowRecord


class RowSelection(SelectionSums, kw_only=True):
    """Chooses rows by their history. Without `data.selection` it keeps every row, and still has the history."""

    config: Config
    rows: PassRates
    _probability: float = 1.0
    """With which the row that was kept last was kept."""
    _skips: int = 0
    """Rows skipped for the lease in progress."""

    def keeps(self, row: int) -> bool:
        """True if the next row of the stream is generated."""
        rule = self.config.data.selection_rule
        probability = 1.0
        if rule is not None and (streak := int(self.rows.streaks[row])):
            limit = min(math.ceil(MAX_INTERVALS / rule.floor), MAX_BYTE)
            if max(int(self.rows.skips[row]), self._skips) < limit:
                probability = max((1.0 - rule.strength) ** streak, rule.floor)
        if probability < 1.0 and self._draw() >= probability:
            self.rows.skips[row] += 1
            self._skips += 1
            self.skipped += 1
            return False
        self.rows.skips[row] = 0
        self._probability = probability
        return True

    def choice(self, row: int, place: RowPlace) -> RowChoice:
        """Ends a lease: how its row, which is the last one that was kept, was chosen."""
        self._skips = 0
        pool, probability = self.pools.setdefault(place.pool, PoolSums()), self._probability
        mean = expected = pool.rows.mean
        if place.epoch is not None:
            pool.begin(place.epoch)
            mean = expected = pool.at_epoch.mean
            if self.rows.groups[row]:
                expected = float(self.rows.rewards[row])
        return RowChoice(probability, *place, 1.0 / probability / pool.scored.value, mean, expected)

    def finished(self, header: GroupHeader, choice: RowChoice, *, trained: bool) -> None:
        """Notes a group that has rewards enough to be trained."""
        self.outcomes.append(ChosenOutcome(RowOutcome.of(header), choice, trained))

    def committed(self) -> None:
        """Counts the groups since the last commit, in the order of their tickets."""
        for outcome in sorted(self.outcomes, key=lambda one: one.of_row.ticket):
            choice, is_new = outcome.choice, not self.rows.groups[outcome.of_row.row]
            change = self.rows.add(outcome.of_row)
            pool = self.pools.setdefault(choice.pool, PoolSums())
            pool.add(choice, change, is_new=is_new, trained=outcome.trained)
        self.outcomes = []

    def weight_in_loss(self, choice: RowChoice) -> float:
        """Weight of a group's losses: 1, or with `unbiased` that by which expected gradients are those without
        selection, up to a factor that all of them have."""
        rule = self.config.data.selection_rule
        if rule is None or not rule.unbiased:
            return 1.0
        return 1.0 / choice.probability / self.pools[choice.pool].trained.value

    def metrics(self, *, left_out: int) -> dict[str, float]:
        """The metrics of a step; `left_out` as in `PassRates.counts`."""
        counts = self.rows.counts(left_out=left_out) | {"skipped": self.skipped}
        return {f"prompts/{name}": float(count) for name, count in counts.items()}

    def summary(self, *, left_out: int) -> dict[str, Any]:
        """Rows by kind, also by data source, for the run's summary; `left_out` as in `PassRates.counts`."""
        counts = self.rows.counts(left_out=left_out) | {"skipped": self.skipped}
        return {**counts, "by_source": self.rows.counts_by_source()}

    def load(self, stored: SelectionRecord) -> None:
        """Restores the record."""
        self.rows.load(stored.rows)
        sums = SelectionSums(**{name: getattr(stored, name) for name in SelectionSums.__struct_fields__})
        restore(self, sums)

    def _draw(self) -> float:
        """A number from 0 to 1, which seed and number of the draw determine."""
        text = f"{self.config.seed} {self.draws}".encode()
        self.draws += 1
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) / 2**64


def warn_if_useless(config: Config, num_rows: int) -> None:
    """Logs a warning if rows are chosen by their history and training has too few groups to see a row twice."""
    groups = config.steps * config.replay.groups_per_step
    if config.data.selection_rule is not None and config.data.custom.sampler is None and groups <= num_rows:
        log.warning("data.selection does nothing: no row is seen again", groups_to_train=groups, rows=num_rows)
