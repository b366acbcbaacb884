"""The threads of sender and receiver, common to weights in rounds and weights through a store.

The sender copies each version while training continues. Three threads share one buffer:

    the learner's     `send`: waits for the previous version (`wait`); woken by weight-sender. Then fills the buffer, or
                      lets weight-copier do it: training may then read the weights, and waits in `copied` before it
                      changes them.
    weight-copier     fills the buffer, while weight-sender already takes the buckets that are full.
    weight-sender     delivers the version; its waits have deadlines and end early on `close`.

The receiver's thread, weight-receiver, fills staging while the engine decodes. The engine's thread never waits for it.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog
import torch
from torch import Tensor

from asyncrl.errors import AsyncrlError, PeerTimeoutError, RunError
from asyncrl.weights import transports
from asyncrl.weights.bucket_round import BucketRound, TakesBuckets
from asyncrl.weights.buckets import WeightManifest
from asyncrl.weights.references import Buffer, WeightReferences
from asyncrl.weights.staging import StagedWeights, Staging
from asyncrl.weights.waits import Interrupted, Wait
from asyncrl.wire.version_messages import Announced, Following

log = structlog.get_logger()

B = TypeVar("B", bound=Buffer)

_LOOK_S = 0.05
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


class BackgroundSender(ABC, Generic[B]):
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
        look_s: float | None = None,
        copies: bool = True,
    ) -> None:
        """`manifest` describes the weights of every `send`; `timeout_s` is the deadline of each phase. Without `copies`
        the weights themselves are sent, so that they may change only after that. `_wants` is
        looked at when `_changed` is notified, and every `look_s`. A subclass starts
        `_thread` at the end of its `__init__`."""
        self.stats = WeightSyncStats()
        self._manifest = manifest
        self._copies = copies
        self._timeout_s = timeout_s
        self._device = transports.with_index(device)
        self._changed = threading.Condition()
        self._look_s = look_s
        self._buffer: B | None = None
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
        """True if a generator needs the last version, which has to be sent once more."""
        return False

    # --- of the subclass

    @property
    @abstractmethod
    def _receivers(self) -> str:
        """The destination of the version, for error messages."""

    @abstractmethod
    def _make_buffer(self) -> B:
        """Makes the buffer for all versions."""

    @abstractmethod
    def _wants(self, version: int) -> bool:
        """True if there is something to do for the current version. Called with the lock of `_changed`."""

    @abstractmethod
    def _deliver(self, version: int, buffer: B) -> None:
        """Delivers the version to where it is wanted. Its waits call `_raise_if_stopping`."""

    @abstractmethod
    def _leave(self) -> None:
        """Releases what is open, once the background thread has ended."""

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
                self._changed.wait(_LOOK_S)
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
                    has_work = self._changed.wait_for(self._has_work, self._look_s)
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


class BackgroundReceiver(ABC):
    """Receives versions of the policy in a thread; the other methods never block."""

    def __init__(self, *, device: str, keeps: Callable[[int], bool]) -> None:
        """A version for which `keeps` is true is not overwritten by a newer one before it is loaded, unless nothing has
        been loaded yet."""
        self._device = transports.with_index(device)
        self._staging = Staging(keeps)
        self._engine_up = threading.Event()
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="weight-receiver", daemon=True)

    # --- of the subclass

    @abstractmethod
    def _work(self) -> None:
        """Receives versions until `_raise_if_closed` raises; in the background thread."""

    def _leave(self) -> None:
        """Releases what is open; at the end of the background thread."""
        return

    # --- the engine's thread

    def start(self) -> None:
        """Starts the background thread, which receives as soon as the engine is up."""
        self._thread.start()

    def engine_is_up(self, loader: TakesBuckets | None = None) -> None:
        """Starts receiving versions; with a `loader` in rounds that the engine loads bucket by bucket, if they come so.
        Before that, neither a GPU nor memory for weights is used: a starting engine measures free memory, and captures
        CUDA graphs, which calls from other threads would invalidate."""
        self._engine_up.set()

    def round(self) -> BucketRound | None:
        """Returns the round that the engine takes part in now, or None. Raises the background thread's error."""
        self._check()
        return None

    def locate(self, address: str) -> None:
        """States the ZeroMQ address of the sender, if it is known; else it is empty."""
        return

    def announce(self, announced: Announced) -> None:
        """States the newest version in a store."""
        return

    def following(self) -> Following | None:
        """The versions in a store that this receiver has; None if it reads none."""
        return None

    @property
    def has_version(self) -> bool:
        """True if a version waits for `staged`; a newer one may replace it until then. Raises as `staged`."""
        self._check()
        return self._staging.has_version

    def staged(self) -> StagedWeights | None:
        """Returns a complete version that was not returned before, or None. Raises the background thread's error."""
        self._check()
        return self._staging.take()

    def hold(self) -> None:
        """States that the engine keeps its version. Call it often, instead of `staged`."""
        self._check()
        self._staging.hold()

    def loaded(self, staged: StagedWeights) -> None:
        """States that the engine runs on this version now, which frees staging for the next one. Call it in the thread
        that copied the weights: a GPU may still run its copies, and staging is free when they are done."""
        self._staging.release(staged, transports.queued(self._device))

    def close(self) -> None:
        """Leaves at once, in any state; idempotent."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=1.5)

    def _check(self) -> None:
        """Raises the error that ended the background thread."""
        if self._error is not None:
            raise self._error

    # --- the background thread

    def _raise_if_closed(self) -> None:
        """Raises Interrupted once this receiver is closed."""
        if self._stop.is_set():
            raise Interrupted

    def _run(self) -> None:
        try:
            self._work()
        except Interrupted:
            pass  # closed
        except AsyncrlError as error:
            self._error = type(error)(str(error))  # without the traceback, which would keep a stuck group alive
        except Exception as error:  # handed over to the thread that calls staged
            log.exception("weight receiver failed")
            self._error = error.with_traceback(None)
        finally:
            self._leave()
