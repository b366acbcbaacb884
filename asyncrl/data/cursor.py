"""The endless stream of prompts: in the order of the sampler, tokenized ahead of time, resumable at the next prompt."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import structlog
from msgspec import structs

from asyncrl.config.config import Config
from asyncrl.data.custom import part_name
from asyncrl.data.prompts import LeftOut, Outcome, TrainingRows, too_long
from asyncrl.data.sampler import Order
from asyncrl.errors import ConfigError
from asyncrl.types import Prompt, PromptPosition

if TYPE_CHECKING:
    from asyncrl.data.pipeline import Pipeline

log = structlog.get_logger()


class PromptCursor:
    """An endless iterator of prompts. Rows with more than `limit_tokens` prompt tokens are counted and skipped, or cut,
    and those that `data.custom.filter` leaves out are counted.

    A `Pipeline` makes prompts ahead from `start` or the first `next` on. `position` counts the prompts that were
    returned, regardless of those that are made ahead. `seek` to a former `position` continues exactly after the prompt
    that was the last then. Before the start the pipeline will begin there; later, rows of another position are read one
    by one, until a `seek` returns to the pipeline's own.

    With `data.weights` each file contributes its share. Raises ConfigError when no row can be used, or no
    row of a file that has a weight, and ConfigError or DataError when it is the turn of a row that cannot be read.
    """

    def __init__(self, config: Config, *, limit_tokens: int) -> None:
        self.limit_tokens = limit_tokens
        self._config = config
        self._rows = TrainingRows(config, limit_tokens=limit_tokens)
        table = self._rows.load()
        self._skipped = np.zeros(len(table), dtype=bool)
        """True for each row that was skipped because of its length."""
        self._filtered = np.zeros(len(table), dtype=bool)
        """True for each row that the filter left out."""
        self._order: Order | None = self._rows.order()
        """The order in which rows are read one by one; None while they come from the pipeline."""
        self._position = self._order.position
        self._pipeline: Pipeline | None = None

    @property
    def skipped_rows(self) -> int:
        """Distinct rows skipped so far because of their length."""
        return int(np.count_nonzero(self._skipped))

    @property
    def filtered_rows(self) -> int:
        """Distinct rows that the filter has left out so far."""
        return int(np.count_nonzero(self._filtered))

    def __iter__(self) -> Iterator[Prompt]:
        return self

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return len(self._skipped)

    def __next__(self) -> Prompt:
        left_out = 0
        while True:
            outcome = self._take()
            if isinstance(outcome, Prompt):
                return outcome
            if not isinstance(outcome, LeftOut):
                raise outcome
            self._leave_out(outcome)
            left_out += 1
            if self._config.data.custom.sampler is not None and left_out > 2 * len(self._skipped):
                what = part_name(self._config, "sampler")
                raise ConfigError(f"{what}: {left_out} rows in a row were too long or filtered; let it yield others")

    def prompt(self, row: int) -> Prompt:
        """The prompt of a row, independent of the position of the stream."""
        return self._rows.prompt(row)

    @property
    def position(self) -> PromptPosition:
        """The position after the last prompt, and the rows that were left out."""
        return structs.replace(self._position, skipped=_pack(self._skipped), filtered=_pack(self._filtered))

    def seek(self, position: PromptPosition) -> None:
        """Moves to the position. Raises ConfigError when the position belongs to another dataset."""
        place = structs.replace(position, skipped=b"", filtered=b"")
        if self._pipeline is not None and place == self._pipeline.position:
            self._order = None
        else:
            self._order = self._rows.order()
            self._order.seek(place)
        self._position = place
        self._skipped = _unpack(position.skipped, len(self._skipped))
        self._filtered = _unpack(position.filtered, len(self._filtered))

    def start(self) -> None:
        """Starts to make prompts ahead, unless that has begun."""
        if self._pipeline is None:
            from asyncrl.data.pipeline import Pipeline  # imports torch

            # The launcher restarts a queue that is silent for the complete time-out, and then nobody receives the
            # reason.
            timeout_s = self._config.launch.heartbeat_timeout_s / 2
            self._pipeline = Pipeline(
                self._rows, self._position, workers=self._config.data.workers, timeout_s=timeout_s
            )
            self._order = None
            weakref.finalize(self, self._pipeline.close)

    def _take(self) -> Outcome:
        """The outcome of the next row."""
        self.start()
        if self._order is not None:
            row = next(self._order)
            self._position = self._order.position
            return self._rows[row]
        assert self._pipeline is not None
        outcome = self._pipeline.take()
        self._position = self._pipeline.position
        return outcome

    def _leave_out(self, left: LeftOut) -> None:
        rows = self._filtered if left.num_tokens is None else self._skipped
        if rows[left.row]:
            return
        rows[left.row] = True
        if left.num_tokens is not None:
            log.warning("prompt skipped", row=left.where, tokens=left.num_tokens, limit_tokens=self.limit_tokens)
        elif (count := self.filtered_rows) & (count - 1) == 0:  # 1, 2, 4, 8, ...
            log.info("rows left out by data.custom.filter", rows=count, last=left.where)
        self._check_pool(left.row)

    def _check_pool(self, row: int) -> None:
        """Raises ConfigError if no row can be used of the files that the row is drawn with."""
        start, number = 0, 0
        sizes = [pool.rows for pool in self._position.pools]
        while row >= start + sizes[number]:
            start, number = start + sizes[number], number + 1
        pool = slice(start, start + sizes[number])
        if not (self._skipped[pool] | self._filtered[pool]).all():
            return
        key = "data.train" if len(sizes) == 1 else f"data.train: {self._config.data.train_files[number]}"
        if not (filtered := int(np.count_nonzero(self._filtered[pool]))):
            raise too_long(key, sizes[number], self.limit_tokens)
        what = part_name(self._config, "filter")
        longer = f", and the others are longer than {self.limit_tokens} tokens" if filtered < sizes[number] else ""
        raise ConfigError(f"{what}: returns False for {filtered} of the {sizes[number]} rows of {key}{longer}")


def _pack(rows: np.ndarray) -> bytes:
    """A compressed bitmap: about an eighth of a byte per row at most, far less when few are set."""
    return zlib.compress(np.packbits(rows).tobytes(), level=1)


def _unpack(packed: bytes, num_rows: int) -> np.ndarray:
    """Reverses `_pack`."""
    bits = np.frombuffer(zlib.decompress(packed), dtype=np.uint8)
    return np.unpackbits(bits, count=num_rows).astype(bool)
