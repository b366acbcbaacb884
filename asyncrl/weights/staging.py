"""Staging for one version of the weights: filled by the receiver's thread, taken by the engine's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asyncrl.wire.weight_messages import Loaded


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """One complete version; `tensors` are views of staging, valid until `WeightReceiver.loaded`."""

    version: int
    checksum: int
    tensors: list[tuple[str, Tensor]]
    session: str = ""
    """The receiver's session in which it arrived."""


class Staging:
    """The version that waits to be loaded, and whether the engine is reading one."""

    def __init__(self, keeps: Callable[[int], bool]) -> None:
        """A version for which `keeps` is true is not replaced by a newer one, unless nothing has been loaded yet."""
        self._loaded: StagedWeights | None = None
        self.held_s = 0.0
        """When `hold` was last called."""
        self.keeps = keeps
        self._staged: StagedWeights | None = None
        self._in_use = False
        self._copies: torch.cuda.Event | None = None
        """Behind the copies from staging that a GPU may still run."""
        self._handover = threading.Lock()

    @property
    def free(self) -> bool:
        """True if no version waits and none is being read."""
        return self._staged is None and not self._is_read

    @property
    def has_version(self) -> bool:
        """True if a version waits."""
        return self._staged is not None

    @property
    def _is_read(self) -> bool:
        return self._in_use or (self._copies is not None and not self._copies.query())

    # --- the receiver's thread

    def put(self, staged: StagedWeights) -> None:
        """Makes a complete version available to the engine."""
        self._staged = staged

    def loaded_in(self, session: str) -> Loaded | None:
        """The version that the engine runs on, if it arrived in this session."""
        loaded = self._loaded
        return Loaded(loaded.version, loaded.checksum) if loaded is not None and loaded.session == session else None

    def reclaim(self) -> bool:
        """Frees staging for the next version, dropping one that was not taken. False while one is in use or kept."""
        with self._handover:
            kept = self._staged is not None and self._loaded is not None and self.keeps(self._staged.version)
            if self._is_read or kept:
                return False
            self._staged = None
            return True

    # --- the engine's thread

    def take(self) -> StagedWeights | None:
        """Returns the version that waits, once; None if there is none."""
        with self._handover:
            staged, self._staged = self._staged, None
            self._in_use = self._in_use or staged is not None
        return staged

    def release(self, staged: StagedWeights, copies: torch.cuda.Event | None = None) -> None:
        """The engine runs on this version now and no longer reads staging, once `copies` has happened."""
        self._copies = copies
        self._loaded = replace(staged, tensors=[])
        self._in_use = False

    def hold(self) -> None:
        """The engine keeps its version for now."""
        self.held_s = time.monotonic()
