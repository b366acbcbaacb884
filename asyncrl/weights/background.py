"""The learner's side of weight synchronization: copies each version, and delivers it while training continues.

thread            waits for                                                     woken by
the learner's     the previous version (`wait`), the copy (`copied`)            weight-sender, weight-copier
weight-copier     nothing: it fills the buffer, if `send` leaves that to it
weight-sender     a new version, or a generator that joined late                `send`, `close`, messages
                  in a round: messages, full buckets, the transport             messages, `fill`, polled
channel-weights   messages of receivers                                         its socket
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from torch import Tensor

from asyncrl.errors import AsyncrlError, PeerTimeoutError, RunError
from asyncrl.weights import transports
from asyncrl.weights.buffers import Buffer, RunningChecksum, WeightReferences
from asyncrl.weights.layout import RankShare, WeightManifest
from asyncrl.weights.transports import Interrupted, Link, Wait

log = structlog.get_logger()

_POLL_S = 0.05
"""Interval of the checks whether the background thread is stuck."""
_STUCK_PHASES, _STUCK_S = 3, 10.0
"""Deadlines and additional seconds after which a background thread that polls nothing counts as stuck."""


@dataclass(slots=True)
class WeightSyncStats:
    """Counters of the sender, summed over the run of its process."""

    count: int = 0
    """Versions that were received by all generators present."""
    dropped: int = 0
    """Number of times a generator was dropped: it was late, or its answer or its bytes were wrong."""
    wait_s: float = 0.0
    """Time that `WeightSender.send` waited for the previous broadcast."""
    broadcast_s: float = 0.0
    """Time from the start of the copy until all generators have the version, summed."""
    bytes: int = 0
    """Bytes of weights sent, each version counted once."""


class BackgroundSender(ABC):
    """Copies versions of the weights, and delivers each of them in a thread.

    Errors of the background thread are raised by the next `send` or `wait`: an AsyncrlError if the cause is known,
    otherwise the error itself.
    """

    def __init__(
        self,
        manifest: WeightManifest,
        *,
        timeout_s: float,
        device: str,
        check_interval_s: float | None = None,
        copies: bool = True,
    ) -> None:
        """`manifest` describes the weights of every `send`; `timeout_s` is the deadline of each phase. Without `copies`
        the weights themselves are sent, so that they may change only after that. `_wants` is
        called when `_changed` is notified, and every `check_interval_s`. A subclass starts
        `_thread` at the end of its `__init__`."""
        self.stats = WeightSyncStats()
        self._manifest = manifest
        self._copies = copies
        self._timeout_s = timeout_s
        self._device = transports.with_index(device)
        self._changed = threading.Condition()
        self._check_interval_s = check_interval_s
        self._buffer: Any = None
        self._version = 0
        self._error: Exception | None = None
        self._looks = 0
        """Checks of the background thread whether to stop; the number does not change in a stuck thread."""
        self._busy = False
        self._stopping = False
        self._buffer_lock = threading.Lock()
        self._copier = ThreadPoolExecutor(
            1, "weight-copier", initializer=transports.use_own_stream, initargs=(self._device,)
        )
        self._copying: Future[None] | None = None
        """The copy of the weights of the last `send`, if it is made in the background."""
        self._thread = threading.Thread(target=self._run, name="weight-sender", daemon=True)

    @property
    def is_missed(self) -> bool:
        """True if a generator needs the last version, which has to be sent again."""
        return False

    _receivers = "the generators"
    """The destination of the version, for error messages."""

    @abstractmethod
    def _make_buffer(self) -> Any:
        """Makes the buffer for all versions."""

    @abstractmethod
    def _wants(self, version: int) -> bool:
        """True if there is something to do for the current version. Called with the lock of `_changed`."""

    @abstractmethod
    def _deliver(self, version: int, buffer: Any) -> None:
        """Delivers the version to where it is wanted. Its waits call `_raise_if_stopping`."""

    def _leave(self) -> None:
        """Releases open resources once the background thread has ended."""
        return

    # --- the learner's thread

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]], *, copy_later: bool = False) -> None:
        """Copies `weights` (Hugging Face checkpoint names) and delivers them in the background as `version`.

        Waits for the previous version, and returns when the copy is complete; buckets are sent while later ones are
        copied. With `copy_later` another thread iterates over `weights` and copies them: they may change only after
        `copied` has returned. Raises the error of the background thread, if there is one.
        """
        started = time.monotonic()
        self.wait()
        self.copied()  # without a generator, the broadcast does not wait for the copy
        with self._buffer_lock:
            self.stats.wait_s += time.monotonic() - started
            if self._buffer is None:
                self._buffer = self._make_buffer()
            buffer = self._buffer
            buffer.clear()
            with self._changed:
                if self._error is not None:  # since `wait`, by what it does between two versions
                    raise self._error
                self._version, self._busy = version, True
                self._changed.notify_all()
        if copy_later and self._copies:
            self._copying = self._copier.submit(self._fill, buffer, weights, transports.queued(self._device))
        else:
            buffer.fill(weights)

    def copied(self) -> None:
        """Returns when the weights of the last `send` may change: when they are copied or, without copies, when they
        are delivered or given up. Raises the error of their copy, PeerTimeoutError if it takes longer than `timeout_s`,
        and as `wait`."""
        if isinstance(self._buffer, WeightReferences) and not self._buffer.is_released:
            started_s = time.monotonic()
            self.wait()
            with self._buffer_lock:  # a generator that came late may be served
                self._buffer.release()
            self.stats.wait_s += time.monotonic() - started_s
        copying, self._copying = self._copying, None
        if copying is None:
            return
        try:
            copying.result(self._timeout_s)
        except TimeoutError:
            late = f"weights: version {self._version} was not copied within {self._timeout_s:g} s"
            raise PeerTimeoutError(late) from None

    def wait(self) -> None:
        """Returns when the last version is delivered. Raises the error of the background thread, and PeerTimeoutError
        if it is stuck in a call."""
        wait, looks = Wait(), self._looks
        limit_s = _STUCK_PHASES * self._timeout_s + _STUCK_S
        with self._changed:
            while self._busy:
                self._changed.wait(_POLL_S)
                if looks != self._looks:
                    wait, looks = Wait(), self._looks
                if wait.look() > limit_s:
                    raise PeerTimeoutError(
                        f"weights: the broadcast of version {self._version} to {self._receivers} has been "
                        f"stuck in the transport for {limit_s:g} s"
                    )
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Stops at once, in any state, and notifies the generators; idempotent."""
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
            self._changed.notify_all()
        self._copier.shutdown(wait=False)
        self._thread.join(timeout=1.0)
        if not self._thread.is_alive():  # else inside a call of the transport that ends at its own deadline
            self._leave()

    @staticmethod
    def _fill(buffer: Buffer, weights: Iterable[tuple[str, Tensor]], trained: torch.cuda.Event | None) -> None:
        """Fills the buffer with the weights as they are once `trained` has happened."""
        if trained is not None:
            torch.cuda.current_stream().wait_event(trained)
        buffer.fill(weights)

    # --- the background thread

    def _raise_if_stopping(self) -> None:
        """Raises Interrupted once this sender is closed."""
        self._looks += 1
        if self._stopping:
            raise Interrupted

    def _run(self) -> None:
        try:
            transports.use_own_stream(self._device)
            while True:
                with self._changed:
                    has_work = self._changed.wait_for(self._has_work, self._check_interval_s)
                self._raise_if_stopping()
                if not has_work:
                    continue
                with self._buffer_lock:
                    assert self._buffer is not None
                    self._deliver(self._version, self._buffer)
                    with self._changed:
                        self._busy = False
                        self._changed.notify_all()
        except Interrupted:
            self._fail(RunError("the weight sender was closed"))
        except AsyncrlError as error:
            self._fail(type(error)(str(error)))  # without the traceback, which would keep a stuck group alive
        except Exception as error:  # handed over to the thread that calls send or wait
            log.exception("weight sender failed")
            self._fail(error.with_traceback(None))

    def _has_work(self) -> bool:
        late = self._buffer is not None and self._wants(self._version)
        return late or self._busy or self._stopping

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error, self._busy = error, False
            self._changed.notify_all()


def send_share(
    link: Link, version: int, share: RankShare, buffer: Buffer, *, timeout_s: float, check: Callable[[], None],
    on_bucket: Callable[[], None] = lambda: None,
) -> int:  # fmt: skip
    """Sends a share. Returns the checksum of its bytes. `on_bucket` is called after each bucket."""
    total = RunningChecksum()

    def taken() -> Iterator[Tensor]:
        starts = (cut.start for cut in share.cuts)
        for bucket in total.over(buffer.buckets(timeout_s=timeout_s, check=check), starts):
            yield bucket
            on_bucket()

    link.send(version, taken())
    return total.of(share.num_bytes)
