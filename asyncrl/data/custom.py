"""The user's own dataset, sampler and filter: `data.custom`."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np

from asyncrl.config.config import Config
from asyncrl.errors import AsyncrlError, ConfigError, DataError
from asyncrl.util.text import check_options, describe
from asyncrl.util.user_code import resolve_function


class Dataset(Protocol):
    """Makes rows of `data.train` and `data.eval` (verl's `data.custom_cls`): `data.custom.dataset`.

    A class or function. It is called with the files of one of these keys, as the config has them, and its options, and
    returns rows by number. With this in `mine.py`, `data.custom={dataset: mine.py:Lines}` reads tab-separated lines:

        class Lines:
            def __init__(self, files, *, limit=1000):
                self.lines = [line for file in files for line in open(file)][:limit]

            def __len__(self):
                return len(self.lines)

            def __getitem__(self, row):
                question, answer = self.lines[row].rstrip().split("\\t")
                return {"prompt": question, "reward_model": {"ground_truth": answer}}

    A row is a dict with the columns of a file; `data.columns` applies. A row number always means the same row: a
    restart reads rows again, and each worker of the pipeline makes its dataset.
    """

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        """The row, counted from 0."""
        ...


class Sampler(Protocol):
    """Yields the numbers of training rows in the order of training (verl's `data.sampler`): `data.custom.sampler`.

    It is made with the rows (`len(rows)`, `rows[number]`), its options, and `seed` if it has such a keyword-only
    argument. With this in `mine.py`, `data.custom={sampler: mine.py:ShortestFirst}` trains short prompts first:

        class ShortestFirst:
            def __init__(self, rows):
                self.order = sorted(range(len(rows)), key=lambda row: len(rows[row]["prompt"]))
                self.taken = 0

            def __iter__(self):
                while self.taken < len(self.order):
                    self.taken += 1
                    yield self.order[self.taken - 1]
                self.taken = 0

            def state_dict(self):
                return {"taken": self.taken}

            def load_state_dict(self, state):
                self.taken = state["taken"]

    When the iterator ends, the next epoch is a new one. `state_dict` is called after each row, and has the state after
    that row in numbers, strings, bytes, lists and dicts: a new sampler that has loaded it yields the rows
    that follow. Rows are drawn ahead of training, so no rewards reach a sampler.
    """

    def __iter__(self) -> Iterator[int]:
        """The rows of an epoch, from the present state on."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state after the last row that was yielded."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state."""
        ...


class Filter(Protocol):
    """True for each training row that is used (verl filters in its dataset class): `data.custom.filter`.

    It is called with the row as the file or the dataset has it, and its options. With this in `mine.py`,
    `data.custom={filter: mine.py:hard, options: {filter: {above: 2}}}` leaves out the easy rows:

        def hard(row, *, above=3):
            return row["extra_info"]["level"] > above

    It decides by the row alone, and always in the same way: a row may be read again, by another process.
    """

    def __call__(self, row: dict[str, Any]) -> bool:
        """True if the row is used."""
        ...


SEAMS: dict[str, Any] = {"dataset": Dataset, "sampler": Sampler, "filter": Filter}
"""The interface of each part of `data.custom`, by its name."""


class RawRows(ABC):
    """Rows as files or a dataset have them, by number over all files: a sequence, as which a sampler sees them."""

    sizes: list[int]
    """Rows of each file."""

    @abstractmethod
    def values(self, row: int) -> dict[str, Any]:
        """The row. Raises DataError if it cannot be read."""

    @abstractmethod
    def where(self, row: int) -> str:
        """The place of the row, for messages."""

    @abstractmethod
    def source(self, row: int) -> str:
        """The data source of rows that name none."""

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return self.values(row)


def part_name(config: Config, part: Literal["dataset", "sampler", "filter"]) -> str:
    """The key and value of a part, for messages."""
    return f"data.custom.{part} = {getattr(config.data.custom, part)!r}"


class OwnRows(RawRows):
    """The rows of `data.custom.dataset` for these files. Raises ConfigError if it cannot be made, or has no rows by
    number."""

    def __init__(self, config: Config, files: list[str]) -> None:
        self._name = str(config.data.custom.dataset)
        self._what = part_name(config, "dataset")
        self._rows: Dataset = make_part(config, "dataset", files)
        if missing := [name for name in ("__len__", "__getitem__") if not hasattr(type(self._rows), name)]:
            raise ConfigError(
                f"{self._what}: makes a {type(self._rows).__name__} without {' and '.join(missing)}; it must make rows "
                "by number, as a class with both or a function that returns a list does"
            )
        self.sizes = [called(self._what, ConfigError, len, self._rows)]

    def values(self, row: int) -> dict[str, Any]:
        where = self.where(row)
        values = called(where, DataError, self._rows.__getitem__, row)
        if not isinstance(values, Mapping):
            raise DataError(
                f"{where}: is of type {type(values).__name__}; it must be a dict with the columns of a file"
            )
        return dict(values)

    def where(self, row: int) -> str:
        return f"{self._name}, row {row}"

    def source(self, row: int) -> str:
        """The name of the dataset's class or function."""
        return self._name.rpartition(":")[2]


def load_filter(config: Config) -> Callable[[dict[str, Any], str], bool]:
    """The filter, called with a row and its place. It raises DataError, which names the place, when the user's function
    raises or returns something else than a truth value."""
    what = part_name(config, "filter")
    keep = _part(config, "filter")
    keep = partial(keep, **config.data.custom.options.get("filter", {}))

    def keeps(row: dict[str, Any], where: str) -> bool:
        kept = called(f"{where}: {what}", DataError, keep, row)
        if not isinstance(kept, bool | np.bool_):
            raise DataError(f"{where}: {what}: returns {kept!r}; it must return True or False")
        return bool(kept)

    return keeps


def _part(config: Config, part: Literal["dataset", "sampler", "filter"]) -> Callable[..., Any]:
    """The function or class of a part; its options are checked."""
    name, options = str(getattr(config.data.custom, part)), config.data.custom.options.get(part, {})
    found = resolve_function(f"data.custom.{part}", name, {})
    check_options(f"data.custom.options.{part}", name, found, options, hidden=("seed",))
    return found


def make_part(config: Config, part: Literal["dataset", "sampler"], argument: Any, **given: Any) -> Any:
    """Calls the part with its argument, the options, and the values that it has parameters for, and
    returns the result."""
    what, function = part_name(config, part), _part(config, part)
    taken = {name: value for name, value in given.items() if name in inspect.signature(function).parameters}
    return called(what, ConfigError, function, argument, **taken, **config.data.custom.options.get(part, {}))


def called(what: str, kind: type[AsyncrlError], function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls the user's function and returns its result. Raises an error of this kind, which begins with `what`, if it
    raises."""
    try:
        return function(*args, **options)
    except AsyncrlError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise kind(f"{what}: raised {describe(error)}") from error
