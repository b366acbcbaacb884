"""The weights themselves in place of a copy of them: what is sent without memory of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from asyncrl.errors import ConfigError, InvariantError, RunError
from asyncrl.weights.buckets import WeightBuffer
from asyncrl.weights.shares import RankShare
from asyncrl.weights.transports import queued

_LOOK_S = 0.1
"""Interval of calls of `check`."""


class WeightReferences:
    """A rank's slices of the weights, until they are released. One thread fills and releases them, another takes
    buckets, which are views."""

    def __init__(self, share: RankShare, device: torch.device) -> None:
        """The cuts of the share are parts of one parameter each; the weights are on the device."""
        self._device = device
        self._entries = share.layout.entries
        self._cuts = share.cuts
        self._slices: list[Tensor] | None = None
        self._written: torch.cuda.Event | None = None
        """Happens when the learner's stream has written the weights."""
        self.is_released = False
        """True if the weights may have changed since."""
        self._changed = threading.Condition()

    def clear(self) -> None:
        """Forgets the slices, before the next ones."""
        self._slices, self.is_released = None, False

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes the slices. Raises InvariantError unless they are those of the share, in its order, and
        ConfigError if they are on another device."""
        slices: list[Tensor] = []
        for (name, tensor), entry in zip(weights, self._entries, strict=True):
            if (name, tensor.dtype, tensor.nbytes) != (entry.name, entry.dtype, entry.num_bytes):
                raise InvariantError(
                    f"weights to send: {name} {tensor.dtype} with {tensor.nbytes} bytes where the manifest has "
                    f"{entry.name} {entry.dtype} with {entry.num_bytes}"
                )
            if tensor.device.type != self._device.type:
                raise ConfigError(
                    f"weights.staging = 'buckets': {name} is on {tensor.device}, the transport sends from "
                    f"{self._device}; use weights.staging=whole"
                )
            slices.append(tensor.detach().view(-1).view(torch.uint8))
        with self._changed:
            self._slices, self._written = slices, queued(self._device)
            self._changed.notify_all()

    def release(self) -> None:
        """Drops the slices: the weights change now."""
        self._slices, self.is_released = None, True

    def buckets(self, *, timeout_s: float, check: Callable[[], None]) -> Iterator[Tensor]:
        """Yields the buckets; on a GPU the current stream waits for the weights that they are views of. `check` is
        polled during the wait for the slices and may raise. Raises RunError if there are none within `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while (slices := self._slices) is None:
                check()
                if time.monotonic() > deadline_s:
                    raise RunError(f"weights: the learner did not pass them on within {timeout_s:g} s")
                self._changed.wait(_LOOK_S)
        if self._written is not None:
            torch.cuda.current_stream(self._device).wait_event(self._written)
        parts = iter(zip(slices, self._entries, strict=True))
        part, entry = next(parts)
        for cut in self._cuts:
            while cut.own >= entry.offset + entry.num_bytes:
                part, entry = next(parts)
            yield part[cut.own - entry.offset : cut.own - entry.offset + cut.num_bytes]


Buffer = WeightBuffer | WeightReferences
"""Memory that a rank sends from."""
