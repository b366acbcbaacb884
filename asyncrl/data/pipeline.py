"""The pipeline that makes prompts ahead of the replay queue: torchdata's loader in a thread, with or without workers.

The loader draws row numbers from a sampler, has the rows made by its workers or itself, and yields their outcomes in
the order of the draws. The sampler records its position after each draw: an outcome's position is the one from which a
run resumes, though later rows have been drawn already. Lost workers are replaced by a loader that continues in the
state of the lost one.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import structlog
from torchdata.stateful_dataloader import StatefulDataLoader

from asyncrl.data.prompts import Outcome, TrainingRows
from asyncrl.data.sampler import Order
from asyncrl.errors import PeerTimeoutError, RunError
from asyncrl.types import PromptPosition
from asyncrl.util.processes import end_with_parent, pin_helper_cpus

log = structlog.get_logger()

AHEAD_ROWS = 256
"""Rows that are made ahead; each worker has two more in progress."""
CLOSE_S = 10.0
"""Deadline for the thread to end."""
MAX_LOSSES = 3
"""Times in a row that workers may be lost before an outcome arrives."""
WORKER_LOST = "DataLoader worker"
"""The beginning of the loader's error when a worker process has ended."""


class Made(NamedTuple):
    """The outcome of a row."""

    outcome: Outcome
    position: PromptPosition
    """The order's position after the row."""


class Pipeline:
    """The outcomes of the rows in an order, made ahead: by `workers` processes, or with 0 by a thread.

    An error of a row is an outcome, so that it comes in the row's turn. Workers that are killed are replaced.
    """

    def __init__(self, rows: TrainingRows, position: PromptPosition, *, workers: int, timeout_s: float) -> None:
        """Starts after the position. `timeout_s` is the deadline of `take`, including the start of the workers."""
        self.position = position
        """The position after the last outcome that was taken."""
        self._rows = rows
        self._workers = workers
        self._timeout_s = timeout_s
        self._ready = SimpleQueue[Made | BaseException]()
        """What was made and not taken; at the end the error that stopped the thread."""
        self._room = threading.Semaphore(AHEAD_ROWS)
        self._start = position
        self._drawn_from = position
        """The position after the last outcome that was made."""
        self._loader_state: dict[str, Any] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="prompts", daemon=True)
        self._thread.start()

    def take(self) -> Outcome:
        """The next outcome; waits for it if it is not ready. Raises PeerTimeoutError at the deadline, RunError when
        workers end again and again, and any error that stopped the thread."""
        try:
            made = self._ready.get(timeout=self._timeout_s)
        except Empty:
            raise PeerTimeoutError(
                f"no prompt came from the pipeline for {self._timeout_s:g} s (half of launch.heartbeat_timeout_s): "
                f"{self._next_row()}"
            ) from None
        if isinstance(made, BaseException):
            self._ready.put(made)
            raise made
        self._room.release()
        self.position = made.position
        return made.outcome

    def close(self) -> None:
        """Ends the thread and the workers. Waits at most CLOSE_S; they end with this process in any case."""
        self._closed = True
        self._room.release()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        losses, last = 0, None
        while True:
            try:
                self._make()
                return
            except BaseException as error:  # raised where outcomes are taken
                losses = losses + 1 if self._drawn_from is last else 1
                last = self._drawn_from
                self._room.release()
                if not str(error).startswith(WORKER_LOST):
                    self._ready.put(error)
                    return
                if losses > MAX_LOSSES:
                    text = f"prompt workers ended {losses} times in a row: {error}; {self._next_row()}"
                    self._ready.put(RunError(text))
                    return
                log.warning("prompt workers lost, starting new ones", error=str(error), workers=self._workers)

    def _make(self) -> None:
        sampler = _Sampler(self._rows.order())
        sampler.order.seek(self._start)
        loader = StatefulDataLoader(
            self._rows,  # pyright: ignore[reportArgumentType]
            batch_size=None,
            sampler=sampler,
            num_workers=self._workers,
            collate_fn=_unchanged,  # pyright: ignore[reportArgumentType]
            worker_init_fn=partial(_start_worker, os.getpid()) if self._workers else None,
            multiprocessing_context="spawn" if self._workers else None,
        )
        if self._loader_state is not None:
            loader.load_state_dict(self._loader_state)
        outcomes = iter(loader)
        while self._room.acquire() and not self._closed:
            outcome = next(outcomes)
            self._drawn_from, self._loader_state = sampler.positions.popleft(), loader.state_dict()
            self._ready.put(Made(outcome, self._drawn_from))

    def _next_row(self) -> str:
        """Names the row of the next outcome, for messages."""
        if self._drawn_from.sampler:
            where = "the row that data.custom.sampler yields next"  # which may itself hang
        else:
            order = self._rows.order()
            order.seek(self._drawn_from)
            where = self._rows.load().raw.where(next(order))
        return (
            f"it is at {where} (data.workers = {self._workers}); does your dataset or filter code hang or crash on it?"
        )


class _Sampler:
    """An order as a stateful sampler of torchdata."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.positions: deque[PromptPosition] = deque()
        """The positions after the draws whose outcomes have not been made."""
        self._last = order.position

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        row = next(self.order)
        self._last = self.order.position
        self.positions.append(self._last)
        return row

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last = state["position"]
        self.order.seek(self._last)
        self.positions.clear()


def _unchanged(outcome: Outcome) -> Outcome:
    return outcome


def _start_worker(parent: int, _: int) -> None:
    """Makes this process a worker: it ends with `parent`, on the cores of its helpers, with one thread."""
    end_with_parent(parent)
    pin_helper_cpus()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
