"""Senders of a share of the weights: what all have in common, and that of the learner ranks other than 0.

weight-sender waits for           woken by          deadline
an order of rank 0                the store         rank 0's process is gone, or does not answer
the store of versions             its file system   its own
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec
import torch
from torch import Tensor

from asyncrl.errors import PeerTimeoutError
from asyncrl.weights.background import BackgroundSender
from asyncrl.weights.buckets import BUCKET_BYTES, WeightBuffer, WeightManifest
from asyncrl.weights.files.folder import Folder
from asyncrl.weights.files.other_ranks import answer_key, beat_key, order_key
from asyncrl.weights.files.shards import Share
from asyncrl.weights.files.share_writer import Keep, Order, ShareWriter, Written
from asyncrl.wire.directory import located
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.store import StoreClient

LOOK_S = 1.0
"""Interval at which a sender looks whether something is to be done for a version that is published."""
_BEAT_S = 0.3
_IDLE_S = 0.02
"""Wait for an order for a version that is published: the learner may wait for it."""


class ShareSender(BackgroundSender):
    """Copies this rank's share of each version, and has a thread write it to a store."""

    def __init__(self, layout: WeightManifest, share: Share, *, timeout_s: float, device: str) -> None:
        """The weights of every `send` are those of the layout."""
        super().__init__(share.layout, timeout_s=timeout_s, device=device, look_s=LOOK_S)
        own = {entry.name for entry in share.layout.entries}
        self._foreign = {entry.name for entry in layout.entries} - own
        """The tensors of which other ranks have the shares."""

    @property
    def _receivers(self) -> str:
        return "the store"

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]], *, copy_later: bool = False) -> None:
        """As `BackgroundSender.send`."""
        own = ((name, tensor) for name, tensor in weights if name not in self._foreign)
        super().send(version, own, copy_later=copy_later)

    def _make_buffer(self) -> WeightBuffer:
        pinned = self._device.type == "cuda"
        return WeightBuffer(self._manifest, torch.device("cpu"), pinned=pinned, bucket_bytes=BUCKET_BYTES)

    def _await_copy(self, buffer: WeightBuffer) -> None:
        for _ in buffer.buckets(timeout_s=self._timeout_s, check=self._raise_if_stopping):
            pass


class RankSender(ShareSender):
    """Carries out rank 0's orders. Runs in the other learner ranks that have a share."""

    def __init__(
        self,
        layout: WeightManifest,
        share: Share,
        url: str,
        endpoints: Endpoints,
        *,
        timeout_s: float,
        device: str = "cpu",
    ) -> None:
        super().__init__(layout, share, timeout_s=timeout_s, device=device)
        self._writer = ShareWriter(Folder(url, check=self._raise_if_stopping), share)
        self._rank = share.rank
        self._endpoints = endpoints
        self._store: StoreClient | None = None
        self._number = 0
        """The number of the next order."""
        self._beaten_s = 0.0
        self._done: int | None = None
        """The last version that is published."""
        self._thread.start()

    def _wants(self, version: int) -> bool:
        return True  # a version that a generator cannot read is published again

    def _deliver(self, version: int, buffer: WeightBuffer) -> None:
        if self._store is None:
            self._store = self._connected()
        if version == self._done:
            self._obey(version, buffer, within_s=_IDLE_S)
            return
        self._await_copy(buffer)
        while not self._obey(version, buffer, within_s=_BEAT_S):
            pass
        self._done = version

    def _connected(self) -> StoreClient:
        ends, check, timeout_s = self._endpoints, super()._raise_if_stopping, self._timeout_s
        address = located(ends, ends.weights, timeout_s=timeout_s, own_epoch=True, check=check)
        return StoreClient(address, run_id=ends.run_id, keys=ends.keys, timeout_s=timeout_s, check=check)

    def _obey(self, version: int, buffer: WeightBuffer, *, within_s: float) -> bool:
        """Carries out the next order, if it comes in time. True if by it the version is published."""
        assert self._store is not None
        self._raise_if_stopping()
        try:
            (data,) = self._store.ask("wait", [order_key(self._number)], within_s=within_s).values
        except PeerTimeoutError:
            raise  # rank 0 is gone
        except TimeoutError:
            return False
        order: Order = msgspec.msgpack.decode(data or b"", type=Order)
        if order.version > version:
            return False  # this rank has not come so far yet
        is_late = order.version < version
        if is_late:
            answer = Written(problem=f"has version {version} by now")
        else:
            answer = self._writer.carry_out(order, buffer.data.numpy())
        if answer.problem:
            answer = Written(problem=f"learner rank {self._rank}: {answer.problem}")
        self._store.ask("set", [answer_key(self._number, self._rank)], msgspec.msgpack.encode(answer))
        self._number += 1
        return isinstance(order, Keep) and not is_late

    def _raise_if_stopping(self) -> None:
        super()._raise_if_stopping()
        now_s = time.monotonic()
        if self._store is not None and now_s - self._beaten_s > _BEAT_S:
            self._beaten_s = now_s
            self._store.ask("set", [beat_key(self._rank)], str(now_s).encode())

    def _leave(self) -> None:
        if self._store is not None:
            self._store.close()
