"""The receiver's side of versions that are complete before the engine loads them: in memory of the transport's device,
or always in host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from asyncrl.weights import transports
from asyncrl.weights.bucket_round import BucketMemory, BucketRound
from asyncrl.weights.buckets import RunningChecksum, WeightManifest, empty_buffer
from asyncrl.weights.piece_streams import PieceStreams
from asyncrl.weights.shares import RankShare, in_byte_order, in_turn
from asyncrl.weights.staging import StagedWeights, Staging
from asyncrl.weights.transports import Link
from asyncrl.weights.waits import POLL_S
from asyncrl.wire.bounds import MAX_NUMBER


class IntoStaging:
    """Receives each version into staging, while the engine decodes."""

    reuses_memory = False
    round: BucketRound | None = None
    """Always: the engine takes no part."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._manifest: WeightManifest | None = None
        self._shares: Sequence[RankShare] = []
        self._buffer = torch.empty(0)

    def prepare(
        self,
        manifest: WeightManifest,
        shares: Sequence[RankShare],
        bucket_bytes: int,
        device: torch.device,
        *,
        pinned: bool,
    ) -> None:
        """Makes the memory for a sender's versions. The transport receives on the device."""
        self._manifest, self._shares = manifest, shares
        if self._buffer.numel() != manifest.num_bytes or self._buffer.device.type != device.type:
            self._buffer = empty_buffer(manifest.num_bytes, device, pinned=pinned)

    @property
    def is_free_early(self) -> bool:
        """True if the next version may come before it is offered."""
        return self._staging.free

    def begin(self, version: int) -> None:
        """Begins a round."""

    def is_free(self) -> bool:
        """True if the version of the round may come. Drops one that the engine has not taken."""
        return self._staging.reclaim()

    def fill(self, links: Sequence[Link], version: int, check: Callable[[], None], told: Callable[[], None]) -> int:
        """Receives a version. Returns the checksum of its bytes. `check` is called in waits for the engine, `told`
        after each piece."""
        totals = [RunningChecksum() for _ in links]
        streams: list[Iterator[Tensor]] = []
        for link, share, total in zip(links, self._shares, totals, strict=True):
            parts = [self._buffer[cut.start : cut.start + cut.num_bytes] for cut in share.cuts]
            streams.append(total.over(link.receive(version, parts), [cut.start for cut in share.cuts]))
        for _ in in_turn(streams):
            told()
        sums = [total.of(share.num_bytes) for total, share in zip(totals, self._shares, strict=True)]
        return sum(sums) % MAX_NUMBER

    def commit(self, version: int, checksum: int, session: str) -> None:
        """States that the bytes are those that were sent."""
        assert self._manifest is not None
        self._staging.put(StagedWeights(version, checksum, self._manifest.views(self._buffer), session))

    def end(self) -> None:
        """Ends the round."""


class IntoHostMemory(IntoStaging):
    """Receives each version into host memory; from a transport that receives on a device through two buckets there."""

    def __init__(self, staging: Staging) -> None:
        super().__init__(staging)
        self._memory: BucketMemory | None = None

    @property
    def reuses_memory(self) -> bool:  # type: ignore[override]
        """True if the transport receives on a device."""
        return self._memory is not None

    def prepare(
        self,
        manifest: WeightManifest,
        shares: Sequence[RankShare],
        bucket_bytes: int,
        device: torch.device,
        *,
        pinned: bool,
    ) -> None:
        """As `IntoStaging.prepare`."""
        super().prepare(manifest, shares, bucket_bytes, torch.device("cpu"), pinned=pinned)
        self._memory = None
        if device.type != "cpu":
            largest = max(cut.num_bytes for share in shares for cut in share.cuts)
            self._memory = BucketMemory.of(torch.empty(2 * largest, dtype=torch.uint8, device=device))

    def fill(self, links: Sequence[Link], version: int, check: Callable[[], None], told: Callable[[], None]) -> int:
        """As `IntoStaging.fill`."""
        memory = self._memory
        if memory is None:
            return super().fill(links, version, check, told)
        streams = PieceStreams(links, version)
        for number, (start, sender, num_bytes) in enumerate(in_byte_order(self._shares)):
            slot = number % 2
            while memory.is_read(slot):
                check()
                time.sleep(POLL_S)
            piece = memory.both[slot][:num_bytes]
            streams.take(sender, piece, start)
            self._buffer[start : start + num_bytes].copy_(piece, non_blocking=True)
            memory.readers[slot] = transports.queued(piece.device)
            told()
        while memory.is_read(0) or memory.is_read(1):
            check()
            time.sleep(POLL_S)
        return streams.finish(sum(share.num_bytes for share in self._shares))
