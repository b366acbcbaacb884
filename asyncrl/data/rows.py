"""The rows of a split as its files, or the user's dataset, have them."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from asyncrl.config.config import Config
from asyncrl.data.custom import OwnRows, RawRows
from asyncrl.data.files import JsonRows, read_table
from asyncrl.errors import DataError

Split = Literal["train", "eval"]


def dataset_files(config: Config, split: Split) -> list[str]:
    """The files of a split."""
    return config.data.train_files if split == "train" else config.data.eval_files


def raw_rows(config: Config, split: Split) -> RawRows:
    """The rows of a split: those of `data.custom.dataset` if there is one, otherwise those of the files."""
    files = dataset_files(config, split)
    return FileRows(files) if config.data.custom.dataset is None else OwnRows(config, files)


class FileRows:
    """The rows of several files."""

    def __init__(self, files: list[str]) -> None:
        self._files = files
        self._tables = [read_table(file) for file in files]
        self.sizes = [table.num_rows for table in self._tables]
        self._starts = [sum(self.sizes[:number]) for number in range(len(self.sizes))]

    def values(self, row: int) -> dict[str, Any]:
        """The columns of the row. Raises DataError for a value that Python has no type for."""
        number, local = self._find(row)
        table = self._tables[number]
        if isinstance(table, JsonRows):
            return table.row(local)
        try:
            return table.slice(local, 1).to_pylist(maps_as_pydicts="lossy")[0]
        except (pa.ArrowException, ValueError, OverflowError) as error:  # such as a timestamp after the year 9999
            raise DataError(f"{self.where(row)}: cannot be read: {error}") from None

    def where(self, row: int) -> str:
        """The file, and the row's number in it."""
        number, local = self._find(row)
        return f"{self._files[number]}, row {local}"

    def source(self, row: int) -> str:
        """The file's name, without its ending."""
        return Path(self._files[self._find(row)[0]]).stem

    def _find(self, row: int) -> tuple[int, int]:
        # The last file that starts at or before the row: an empty file starts where the next one does.
        number = bisect_right(self._starts, row) - 1
        return number, row - self._starts[number]
