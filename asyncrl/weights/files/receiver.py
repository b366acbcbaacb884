"""The receiver's side of versions in a store: fetches those that are announced, while the engine decodes.

The engine's thread hears of a version in an answer of the replay queue, and says so by `announce`; the thread
weight-receiver fetches it, and `following` is what the next ask reports. One that is told of several versions meanwhile
fetches the newest, but none before one that it keeps. One whose link is slower than the learner's steps fetches every
4th, 16th or 64th version (`links.py`).

    weight-receiver waits for                  woken by                       deadline
    `engine_is_up`, a version                  `announce`, or polled          none
    free staging: the engine has loaded or     polled                         none
      not taken the version that is there
    the store                                  its file system                `timeout_s` without a version that could
                                                                                be read
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog
import torch
from msgspec import structs

from asyncrl.errors import RunError
from asyncrl.types import NO_VERSION
from asyncrl.weights import transports
from asyncrl.weights.background import BackgroundReceiver
from asyncrl.weights.buckets import WeightManifest, empty_buffer
from asyncrl.weights.files.folder import BadFileError, Folder
from asyncrl.weights.files.links import SLOWEST_STEPS, LinkMeter, stride_of
from asyncrl.weights.files.manifest import MANIFEST, manifest_key
from asyncrl.weights.files.reader import Reader, read_manifest
from asyncrl.weights.staging import StagedWeights
from asyncrl.weights.waits import Wait
from asyncrl.wire.version_messages import Announced, Following

log = structlog.get_logger()

_IDLE_S = 0.2
"""Longest wait for an announcement between two checks whether this receiver is closed."""
_AGAIN_S = 1.0
"""Pause before a version that could not be read is read again."""
_MAX_CHARACTERS = 4000
"""The limit of the text of an error that the sender is told."""


class FileReceiver(BackgroundReceiver):
    """Fetches versions from a store; it has no connection to the learner."""

    def __init__(
        self,
        url: str,
        *,
        run_id: str,
        timeout_s: float,
        max_bytes: int,
        base: str = "",
        device: str = "cpu",
        keeps: Callable[[int], bool] = lambda version: False,
    ) -> None:
        """Weights of more than `max_bytes` are refused before memory is allocated for them, and so are adapters of
        another `base` (`base.py`) and, if there is one, complete weights. A version for which `keeps` is true is not
        skipped, unless nothing has been fetched yet."""
        super().__init__(device=device, keeps=keeps)
        self._folder = Folder(url, check=self._raise_if_closed)
        self._key = manifest_key(run_id)
        self._timeout_s, self._max_bytes, self._base = timeout_s, max_bytes, base
        self._layout: WeightManifest | None = None
        self._buffer = torch.empty(0)
        self._reader: Reader | None = None
        self._announced: Announced | None = None
        self._woken = threading.Event()
        self._fetched: Announced | None = None
        """The last version that was staged."""
        self._given_up: set[str] = set()
        """Folders of versions that could not be read."""
        self._failing_since_s: float | None = None
        """When the first of the failures in a row was."""
        self._meter = LinkMeter()
        self._warned = False
        self._following = Following(held=NO_VERSION, fetching=NO_VERSION, unread=None, problem="", link=None)

    def announce(self, announced: Announced) -> None:
        """States the newest version in the store."""
        if announced != self._announced:
            self._meter.announced(announced.version)
            self._announced = announced
            self._woken.set()

    def following(self) -> Following:
        """The versions that it has, for the sender."""
        return self._following

    # --- the background thread

    def _work(self) -> None:
        while not self._engine_up.wait(_IDLE_S):
            self._raise_if_closed()
        transports.use_own_stream(self._device)
        while True:
            self._raise_if_closed()
            if not self._fetch_next():
                self._woken.wait(_IDLE_S)
                self._woken.clear()

    def _fetch_next(self) -> bool:
        """Fetches a version. False if there is none to fetch."""
        newest = goal = self._announced
        if newest is None or newest == self._fetched:
            return False
        try:
            goal = self._goal(newest)
            if goal is not None:
                self._fetch(goal)
                self._measure(newest)
        except BadFileError as error:
            self._give_up(goal or newest, newest, str(error)[:_MAX_CHARACTERS])
        return goal is not None

    def _goal(self, newest: Announced) -> Announced | None:
        """The version to fetch next: the first one that is kept, or the newest that is divisible by the stride."""
        held, link = self._following.held, self._following.link
        found = self._reader_of(newest).earlier(newest)
        later = [one for one in found if NO_VERSION < held < one.version and one.folder not in self._given_up]
        if kept := next((one for one in later if self._staging.keeps(one.version)), None):
            return kept
        stride = link.stride if link is not None else 1
        if stride == 1 or newest.version <= held:
            return newest
        return next((one for one in reversed(later) if one.version % stride == 0), None)

    def _measure(self, newest: Announced) -> None:
        """Measures the link, from which the stride of the next version follows."""
        assert self._reader is not None
        num_bytes, full = self._reader.version_bytes(newest)
        link = self._meter.link(num_bytes, full=full)
        if link is None:
            return
        self._following = structs.replace(self._following, link=link)
        slow = not full and stride_of(link.version_s / max(link.step_s, 1e-9)) is None
        if slow and not self._warned:
            log.warning(
                "the link to the store is too slow to follow the learner",
                version_s=round(link.version_s, 3),
                step_s=round(link.step_s, 3),
                megabits_per_s=round(8e-6 * link.bytes_per_s, 1),
                most_steps=round(SLOWEST_STEPS, 1),
            )
        self._warned = slow

    def _fetch(self, goal: Announced) -> None:
        """Fetches a version to staging. Raises BadFileError."""
        assert self._reader is not None and self._layout is not None
        self._following = structs.replace(self._following, fetching=goal.version, unread=None, problem="")
        num_bytes, seconds = self._reader.num_bytes, self._reader.seconds
        self._reader.fetch(goal, self._await_staging)
        self._meter.fetched(self._reader.num_bytes - num_bytes, self._reader.seconds - seconds)
        self._await_staging()  # the buffer may have had these bits before, with a version that is still in use
        self._staging.put(StagedWeights(goal.version, int(goal.sha256[:15], 16), self._layout.views(self._buffer)))
        self._fetched, self._failing_since_s = goal, None
        self._given_up.clear()
        self._following = structs.replace(self._following, held=goal.version, fetching=NO_VERSION)

    def _give_up(self, goal: Announced, newest: Announced, problem: str) -> None:
        """Tells the sender of a failure, and returns when there is something to try. Raises RunError if nothing could
        be read for `timeout_s`."""
        self._given_up.add(goal.folder)
        self._following = structs.replace(self._following, fetching=NO_VERSION, unread=goal.folder, problem=problem)
        log.warning("a version of the weights cannot be read", version=goal.version, reason=problem)
        now_s = time.monotonic()
        self._failing_since_s = self._failing_since_s or now_s
        if now_s - self._failing_since_s > self._timeout_s:
            raise RunError(
                f"weights.url: version {goal.version} cannot be read within {self._timeout_s:g} s: {problem}"
            )
        while goal == newest == self._announced and time.monotonic() - now_s < _AGAIN_S:
            self._raise_if_closed()
            self._woken.wait(_IDLE_S)
            self._woken.clear()

    def _reader_of(self, announced: Announced) -> Reader:
        """The reader, with a buffer for weights as the first version has them. Raises BadFileError, and ProtocolError
        if they are not of this generator's model."""
        if self._reader is None:
            manifest = read_manifest(self._folder, f"{announced.folder}/{MANIFEST}", announced.sha256, self._key)
            self._layout = WeightManifest.from_json(manifest.layout)
            self._layout.check_size(self._max_bytes)
            self._layout.check_base(self._base)
            pinned = self._device.type == "cuda"
            self._buffer = empty_buffer(self._layout.num_bytes, torch.device("cpu"), pinned=pinned)
            self._reader = Reader(self._folder, self._layout, self._buffer.numpy(), key=self._key)
        return self._reader

    def _await_staging(self) -> None:
        """Returns when the buffer may be written."""
        wait = Wait()
        while not self._staging.reclaim():
            self._raise_if_closed()
            wait.look()
            self._stop.wait(wait.pause_s)  # the engine of this process does not wake this thread
