"""Where one version of the weights waits for the engine: filled by the receiver's thread, taken by the engine's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from asyncrl.weights.messages import LoadedBody


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """One complete version; `tensors` are views of staging, valid until it is loaded."""

    version: int
    checksum: int
    tensors: list[tuple[str, Tensor]]
    session: str = ""
    """In which the receiver got it."""


class Staging:
    """The version that waits, and whether the engine still reads one."""

    def __init__(self, keeps: Callable[[int], bool]) -> None:
        """A version that `keeps` says true of is not given up for a newer one, unless nothing was loaded before."""
        self.loaded: LoadedBody | None = None
        """What the engine runs on, and the session that it came in."""
        self.held_s = 0.0
        """When the engine last said that it stays on its version."""
        self._keeps = keeps
        self._staged: StagedWeights | None = None
        self._in_use = False
        self._handover = threading.Lock()

    @property
    def free(self) -> bool:
        """Nothing waits, and nothing is read."""
        return self._staged is None and not self._in_use

    # --- the receiver's thread

    def put(self, staged: StagedWeights) -> None:
        self._staged = staged

    def reclaim(self) -> bool:
        """Makes room for the next version, also where one waits that nobody took. False while one is in use or kept."""
        with self._handover:
            kept = self._staged is not None and self.loaded is not None and self._keeps(self._staged.version)
            if self._in_use or kept:
                return False
            self._staged = None
            return True

    # --- the engine's thread

    def take(self) -> StagedWeights | None:
        """The version that waits, once."""
        with self._handover:
            staged, self._staged = self._staged, None
            self._in_use = self._in_use or staged is not None
        return staged

    def release(self, staged: StagedWeights) -> None:
        """The engine runs on this version now, and reads staging no more."""
        self.loaded = {"version": staged.version, "checksum": staged.checksum, "session": staged.session}
        self._in_use = False

    def hold(self) -> None:
        self.held_s = time.monotonic()
