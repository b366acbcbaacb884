"""The order of rows: shuffled in each epoch, from one pool or from several with weights, resumable anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.types import PoolPosition


class Pool:
    """The `size` rows from `start`, epoch after epoch; each epoch has every row once."""

    def __init__(self, start: int, size: int, *, seed: int, number: int, shuffle: bool) -> None:
        self.start = start
        self.size = size
        self.epoch = 0
        self.taken = 0
        """Number of rows taken in this epoch."""
        self._seed = seed
        self._number = number
        self._shuffle = shuffle
        self._order = self._make_order()

    def take(self) -> int:
        """The next row number."""
        if self.taken == self.size:
            self.seek(self.epoch + 1, 0)
        self.taken += 1
        return self.start + int(self._order[self.taken - 1])

    def seek(self, epoch: int, taken: int) -> None:
        """Moves to the position after `taken` rows of an epoch."""
        self.epoch, self.taken = epoch, taken
        self._order = self._make_order()

    def _make_order(self) -> np.ndarray:
        order = np.arange(self.size)
        if self._shuffle:
            np.random.default_rng((self._seed, self.epoch, self._number)).shuffle(order)
        return order


class RowSampler:
    """An endless, resumable iterator of row numbers, in an order that the seed determines.

    Without weights all rows are one pool. With weights every file is a pool with its own epochs, and each row is drawn
    from file i with probability weights[i] / sum(weights).
    """

    def __init__(
        self, sizes: Sequence[int], *, seed: int, shuffle: bool = True, weights: Sequence[float] | None = None
    ) -> None:
        self._seed = seed
        self._shares = np.cumsum([1.0] if weights is None else weights)
        self._shares /= self._shares[-1]
        self.drawn = 0
        """Number of rows drawn so far."""
        self.pools: list[Pool] = []
        start = 0
        for number, size in enumerate([sum(sizes)] if weights is None else sizes):
            self.pools.append(Pool(start, size, seed=seed, number=number, shuffle=shuffle))
            start += size

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        pool = self.pools[0]
        if len(self.pools) > 1:
            # Seeded by the number of the draw, so that the state is only the position.
            draw = np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=(self.drawn,))).random()
            pool = self.pools[int(np.searchsorted(self._shares, draw, side="right"))]
        self.drawn += 1
        return pool.take()

    def pool_of(self, row: int) -> int:
        """The index of the pool that contains the row."""
        return next(i for i, pool in enumerate(self.pools) if row < pool.start + pool.size)

    @property
    def positions(self) -> list[PoolPosition]:
        """The position in each pool."""
        return [PoolPosition(pool.size, pool.epoch, pool.taken) for pool in self.pools]

    def seek(self, drawn: int, positions: Sequence[PoolPosition]) -> None:
        """Moves to the position after `drawn` rows. Raises ConfigError when the dataset is not that of the position."""
        before, now = [position.rows for position in positions], [pool.size for pool in self.pools]
        if before != now:
            raise ConfigError(
                f"data.train: the files had {before} rows when the run was saved and have {now} now; resume with the "
                "same files and data.weights, or start a new run"
            )
        self.drawn = drawn
        for pool, position in zip(self.pools, positions, strict=True):
            pool.seek(position.epoch, position.taken)
