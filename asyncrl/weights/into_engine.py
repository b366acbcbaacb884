"""The receiver's side of versions that an engine loads bucket by bucket: memory for two buckets, and one round after
another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from asyncrl.weights.bucket_plan import PlannedBucket, plan_buckets
from asyncrl.weights.bucket_round import BucketMemory, BucketRound, TakesBuckets
from asyncrl.weights.buckets import ALIGN_BYTES, WeightManifest, empty_buffer
from asyncrl.weights.piece_streams import PieceStreams
from asyncrl.weights.shares import RankShare
from asyncrl.weights.staging import StagedWeights
from asyncrl.weights.transports import Link


class IntoEngine:
    """Rounds of an engine that loads buckets. Used by the receiver's thread; the engine's thread reads `round`."""

    reuses_memory = True
    is_free_early = False
    """Always: an engine stands still only for a version that is there."""

    def __init__(self, loader: TakesBuckets, device: torch.device) -> None:
        """The engine is on the device."""
        self._loader, self._device = loader, device
        self.round: BucketRound | None = None
        """The current one."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._plan: list[PlannedBucket] = []
        self._memory: BucketMemory | None = None
        self._num_bytes = 0

    def prepare(
        self,
        manifest: WeightManifest,
        shares: Sequence[RankShare],
        bucket_bytes: int,
        device: torch.device,
        *,
        pinned: bool,
    ) -> None:
        """Makes the memory for the buckets of a sender's versions. The transport receives on the device."""
        self._shapes = {entry.name: entry.shape for entry in manifest.entries}
        self._plan = plan_buckets(manifest, shares, bucket_bytes, self._loader.takes_rows)
        largest = max(bucket.num_bytes for bucket in self._plan)
        num_bytes = 2 * (-(-largest // ALIGN_BYTES) * ALIGN_BYTES)
        if self._memory is None or self._num_bytes != num_bytes:
            shared = self._loader.bucket_memory(num_bytes) if device.type == "cpu" else None
            memory = empty_buffer(num_bytes, device, pinned=pinned) if shared is None else shared
            self._memory, self._num_bytes = BucketMemory.of(memory), num_bytes

    def begin(self, version: int) -> None:
        """Begins a round, which the engine's thread sees."""
        assert self._memory is not None
        self.round = BucketRound(version, self._shapes, self._memory, self._device)

    def is_free(self) -> bool:
        """True if the engine stands still for the round."""
        return self.round is not None and self.round.accepted

    def fill(self, links: Sequence[Link], version: int, check: Callable[[], None], told: Callable[[], None]) -> int:
        """Receives all buckets, and passes each on to the engine. Returns the checksum of all bytes. `check` is called
        in waits for the engine, `told` after each piece."""
        assert self.round is not None
        streams = PieceStreams(links, version)
        for bucket in self._plan:
            memory = self.round.memory(check)
            for piece in bucket.pieces:
                streams.take(piece.sender, memory[piece.at : piece.at + piece.num_bytes], piece.start)
                told()
            self.round.put(bucket)
        return streams.finish(sum(piece.num_bytes for bucket in self._plan for piece in bucket.pieces))

    def commit(self, version: int, checksum: int, session: str) -> None:
        """States that the buckets of the round are those that were sent."""
        assert self.round is not None
        self.round.commit(StagedWeights(version, checksum, [], session))

    def end(self) -> None:
        """Ends the round, if there is one."""
        if self.round is not None:
            self.round.end()
            self.round = None
