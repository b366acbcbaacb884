"""The order of rows: shuffled in each epoch, from one pool or several with weights, or by the user's sampler."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from asyncrl.config.config import Config
from asyncrl.data.custom import RawRows, Sampler, called, make_part, part_name
from asyncrl.errors import ConfigError
from asyncrl.types import PoolPosition, PromptPosition

MAX_STATE_BYTES = 1 << 20
"""Maximum size of a sampler's state, which is in every checkpoint and in every segment of the journal."""
CHECKED_ROWS = 4
"""Rows that are drawn before and after a sampler is resumed for the check."""
_END: Any = object()


class Order(Protocol):
    """An endless, resumable iterator of row numbers."""

    def __next__(self) -> int: ...
    @property
    def position(self) -> PromptPosition:
        """The position after the last row; nothing about skipped rows."""
        ...

    def seek(self, position: PromptPosition) -> None:
        """Moves to a position. Raises ConfigError when it is of another dataset or sampler."""
        ...


def make_order(config: Config, rows: RawRows) -> Order:
    """The order of the training rows, at its start."""
    if config.data.custom.sampler is not None:
        return OwnOrder(config, rows)
    return RowSampler(rows.sizes, seed=config.seed, shuffle=config.data.shuffle, weights=config.data.weights)


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
        pool = 0
        if len(self.pools) > 1:
            # Seeded by the number of the draw, so that the state is only the position.
            draw = np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=(self.drawn,))).random()
            pool = int(np.searchsorted(self._shares, draw, side="right"))
        self.drawn += 1
        return self.pools[pool].take()

    @property
    def position(self) -> PromptPosition:
        """The position after the last row."""
        return PromptPosition(self.drawn, [PoolPosition(pool.size, pool.epoch, pool.taken) for pool in self.pools])

    def seek(self, position: PromptPosition) -> None:
        """Moves to a position. Raises ConfigError when it is of another dataset, or of a user's sampler."""
        check_same_rows([pool.rows for pool in position.pools], [pool.size for pool in self.pools])
        if position.sampler:
            raise ConfigError(
                "data.custom.sampler: the run was started with a sampler; resume it with that one, or start a new run"
            )
        self.drawn = position.drawn
        for pool, place in zip(self.pools, position.pools, strict=True):
            pool.seek(place.epoch, place.taken)


class OwnOrder:
    """An endless, resumable iterator of row numbers in the order of `data.custom.sampler`.

    Raises ConfigError when the sampler raises, yields something else than the number of a row, ends without any, or
    has a state that cannot be stored.
    """

    def __init__(self, config: Config, rows: RawRows) -> None:
        self._what = part_name(config, "sampler")
        self._size = len(rows)
        self._sampler: Sampler = make_part(config, "sampler", rows, seed=config.seed)
        needed = ("__iter__", "state_dict", "load_state_dict")
        if missing := [name for name in needed if not callable(getattr(self._sampler, name, None))]:
            raise ConfigError(f"{self._what}: has no {', '.join(missing)}; without them a run cannot be resumed")
        if callable(getattr(self._sampler, "update", None)):
            raise ConfigError(
                f"{self._what}: has update(), with which verl's AbstractCurriculumSampler learns from batches; here "
                "rows are drawn ahead of training, and no batch reaches the sampler: remove it, or order without it"
            )
        self.drawn = 0
        self._iterator = self._call(iter, self._sampler)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        for _ in range(2):  # the iterator in use, and the next epoch's
            row = self._call(next, self._iterator, _END)
            if row is not _END:
                self.drawn += 1
                return self._checked(row)
            self._iterator = self._call(iter, self._sampler)
        raise ConfigError(f"{self._what}: yields no row in an epoch; it must yield the numbers of rows")

    @property
    def position(self) -> PromptPosition:
        """The position after the last row."""
        state = self._call(self._sampler.state_dict)
        try:
            packed = msgspec.msgpack.encode(state, enc_hook=_refuse)
        except (TypeError, OverflowError, ValueError) as error:
            raise ConfigError(
                f"{self._what}: state_dict() cannot be stored: {error}; it may have numbers of 64 bits, strings, "
                "bytes, lists and dicts"
            ) from None
        if len(packed) > MAX_STATE_BYTES:
            raise ConfigError(
                f"{self._what}: state_dict() has {len(packed):,} bytes, at most {MAX_STATE_BYTES:,} are allowed; keep "
                "what the rows or the seed determine out of it"
            )
        return PromptPosition(self.drawn, [PoolPosition(self._size, 0, 0)], sampler=packed)

    def seek(self, position: PromptPosition) -> None:
        """Moves to a position. Raises ConfigError when it is of another sampler or dataset."""
        check_same_rows([pool.rows for pool in position.pools], [self._size])
        if not position.sampler:
            raise ConfigError(
                f"{self._what}: the run was started without a sampler; resume it without, or start a new run"
            )
        self.drawn = position.drawn
        self._call(self._sampler.load_state_dict, msgspec.msgpack.decode(position.sampler))
        self._iterator = self._call(iter, self._sampler)

    def _checked(self, row: Any) -> int:
        try:
            number = operator.index(row)
        except TypeError:
            number = -1
        if isinstance(row, bool) or not 0 <= number < self._size:
            raise ConfigError(f"{self._what}: yields {row!r}; it must yield numbers of rows, 0 to {self._size - 1}")
        return number

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return called(self._what, ConfigError, function, *args)


def check_sampler(config: Config, rows: RawRows) -> None:
    """Raises ConfigError unless the sampler can be used, and continues with the same rows after it is resumed."""
    order, resumed = OwnOrder(config, rows), OwnOrder(config, rows)
    for _ in range(CHECKED_ROWS):
        next(order)
    resumed.seek(order.position)
    expected, found = ([next(one) for _ in range(CHECKED_ROWS)] for one in (order, resumed))
    if expected != found:
        raise ConfigError(
            f"{part_name(config, 'sampler')}: does not resume: after {CHECKED_ROWS} rows it yields {expected}, but "
            f"after load_state_dict(state_dict()) of another one {found}; is all that it draws by in its state?"
        )


def check_same_rows(before: list[int], now: list[int]) -> None:
    """Raises ConfigError when the numbers of rows have changed since a position was saved."""
    if before != now:
        raise ConfigError(
            f"data.train: the files had {before} rows when the run was saved and have {now} now; resume with the same "
            "files, data.weights and data.custom, or start a new run"
        )


def _refuse(value: Any) -> Any:
    raise TypeError(f"it has a {type(value).__name__}")
