"""The receiver's side of versions in a store: fetches those that are announced, while the engine decodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import structlog
from torch import Tensor

from asyncrl.errors import RunError
from asyncrl.weights.buckets import WeightManifest
from asyncrl.weights.files.folder import BadFileError, Folder
from asyncrl.weights.files.manifest import Announced
from asyncrl.weights.files.reader import Reader
from asyncrl.weights.session import IDLE_S, Session
from asyncrl.wire import weight_messages as messages

log = structlog.get_logger()

_AGAIN_S = 1.0
"""Pause before a version that could not be read is read again."""
_MAX_CHARACTERS = 4000
"""Of an error that the sender is told."""


class Fetcher:
    """Fetches versions into a buffer, whose bits are the base of the next delta, over all sessions."""

    def __init__(self, url: str, key: bytes, timeout_s: float) -> None:
        self._url, self._key = url, key
        self._timeout_s = timeout_s
        self._reader: Reader | None = None
        self._buffer: Tensor | None = None
        self._told_s = 0.0
        self._failing_since_s: float | None = None
        """When the first of the failures in a row was."""

    def fetch(
        self,
        session: Session,
        announced: messages.Announced,
        layout: WeightManifest,
        buffer: Tensor,
        await_free: Callable[[], None],
    ) -> int | None:
        """Returns the checksum when the buffer holds the version and may be staged, None if it cannot be read and there
        is a newer one. The sender is told of a failure. Raises RunError if nothing could be read for `timeout_s`, and
        as the session's `check` does."""
        reader = self._reader_of(layout, buffer)
        reader.folder.check = partial(self._look, session)
        while True:
            try:
                reader.fetch(Announced(announced.version, announced.folder, announced.sha256), await_free)
                await_free()  # the buffer may have had these bits before, with a version that is still in use
                self._failing_since_s = None
                return checksum_of(announced.sha256)
            except BadFileError as error:
                problem = str(error)[:_MAX_CHARACTERS]
            session.say_once(messages.Received(announced.round, 0, problem))
            self._failing_since_s = self._failing_since_s or time.monotonic()
            if time.monotonic() - self._failing_since_s > self._timeout_s:
                raise RunError(
                    f"weights.url: version {announced.version} cannot be read within {self._timeout_s:g} s: {problem}"
                )
            if self._awaits_newer(session):
                return None

    def _reader_of(self, layout: WeightManifest, buffer: Tensor) -> Reader:
        if self._reader is None or self._buffer is not buffer or self._reader.layout != layout:
            self._reader = Reader(Folder(self._url), layout, buffer.numpy(), key=self._key)
            self._buffer = buffer
        return self._reader

    def _awaits_newer(self, session: Session) -> bool:
        """True if another version is announced within a moment."""
        again_s = time.monotonic() + _AGAIN_S
        while time.monotonic() < again_s and not session.has_announced:
            self._look(session)
            session.listen(IDLE_S)
        return session.has_announced

    def _look(self, session: Session) -> None:
        """Hears the sender, and tells it from time to time that this receiver lives: it keeps what is on the way."""
        session.check()
        if time.monotonic() - self._told_s > self._timeout_s / 4:
            self._told_s = time.monotonic()
            session.say(messages.Holding(session.round))


def checksum_of(sha256: str) -> int:
    """The number by which a receiver confirms the version with this sum of the manifest, which proves the bytes."""
    return int(sha256[:15], 16)
