"""Senders of a rank's slices of the weights: what all have in common, and that of the learner ranks other than 0.

weight-sender waits for           woken by          deadline
an order of rank 0                the store         rank 0's process is gone, or does not answer
the store of versions             its file system   its own
"""

from __future__ import annotations

import torch

from asyncrl.weights.background import BackgroundSender
from asyncrl.weights.buckets import BUCKET_BYTES, WeightBuffer, WeightManifest
from asyncrl.weights.files.folder import Folder
from asyncrl.weights.files.share_writer import Keep, Order, ShareWriter, Written
from asyncrl.weights.other_ranks import Orders
from asyncrl.weights.shares import RankSlices, slices_of
from asyncrl.wire.endpoints import Endpoints

LOOK_S = 1.0
"""Interval at which a sender looks whether something is to be done for a version that is published."""
_IDLE_S = 0.02
"""Wait for an order for a version that is published: the learner may wait for it."""


class SliceSender(BackgroundSender[WeightBuffer]):
    """Copies this rank's slices of each version, and has a thread write them to a store."""

    def __init__(self, slices: RankSlices, *, timeout_s: float, device: str) -> None:
        super().__init__(slices.layout, timeout_s=timeout_s, device=device, look_s=LOOK_S)

    @property
    def _receivers(self) -> str:
        return "the store"

    def _make_buffer(self) -> WeightBuffer:
        pinned = self._device.type == "cuda"
        return WeightBuffer(self._manifest, torch.device("cpu"), pinned=pinned, bucket_bytes=BUCKET_BYTES)

    def _await_copy(self, buffer: WeightBuffer) -> None:
        for _ in buffer.buckets(timeout_s=self._timeout_s, check=self._raise_if_stopping):
            pass


class RankSender(SliceSender):
    """Carries out rank 0's orders. Runs in the other learner ranks."""

    def __init__(
        self,
        layout: WeightManifest,
        url: str,
        endpoints: Endpoints,
        *,
        rank: int,
        ranks: int,
        timeout_s: float,
        device: str = "cpu",
    ) -> None:
        """`layout` describes all weights; `send` takes this rank's slices of them."""
        slices = slices_of(layout, rank, ranks)
        super().__init__(slices, timeout_s=timeout_s, device=device)
        self._writer = ShareWriter(Folder(url, check=self._raise_if_stopping), rank, slices)
        self._rank = rank
        self._endpoints = endpoints
        self._orders: Orders | None = None
        self._done: int | None = None
        """The last version that is published."""
        self._thread.start()

    def _wants(self, version: int) -> bool:
        return True  # a version that a generator cannot read is published again

    def _deliver(self, version: int, buffer: WeightBuffer) -> None:
        if self._orders is None:
            check = super()._raise_if_stopping
            self._orders = Orders(self._endpoints, self._rank, Order, timeout_s=self._timeout_s, check=check)
        if version == self._done:
            self._obey(self._orders, version, buffer, within_s=_IDLE_S)
            return
        self._await_copy(buffer)
        while not self._obey(self._orders, version, buffer):
            self._raise_if_stopping()
        self._done = version

    def _obey(self, orders: Orders, version: int, buffer: WeightBuffer, **options: float) -> bool:
        """Carries out the next order, if it comes in time. True if by it the version is published."""
        order: Order | None = orders.next(**options)
        if order is None or order.version > version:  # or this rank has not come so far yet
            return False
        is_late = order.version < version
        if is_late:
            answer = Written(problem=f"has version {version} by now")
        else:
            answer = self._writer.carry_out(order, buffer.data.numpy())
        if answer.problem:
            answer = Written(problem=f"learner rank {self._rank}: {answer.problem}")
        orders.answer(answer)
        return isinstance(order, Keep) and not is_late

    def _raise_if_stopping(self) -> None:
        super()._raise_if_stopping()
        if self._orders is not None:
            self._orders.beat()

    def _leave(self) -> None:
        if self._orders is not None:
            self._orders.close()
