"""One version of the weights on its way to all generators that do not have it, without those that do not answer.

A round:

    offer -> ready (staging is free; often said before) -> go -> broadcast -> everyone's checksum to everyone

All but the bytes and checksums are small messages in the sender's store. A generator that is late with an answer is
dropped, and the round is repeated for the others where it needs to be. A broadcast that fails is given up by the
message "abort"; each generator that lives says in "received" what came of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog
import torch
from pydantic import TypeAdapter

from asyncrl.errors import AsyncrlError, RunError
from asyncrl.weights.buckets import WeightBuffer
from asyncrl.weights.mailbox import T
from asyncrl.weights.membership import Membership, Peer
from asyncrl.weights.messages import READY, RECEIVED, ReadyBody
from asyncrl.weights.transports import TRANSPORTS, Member, ProcessGroup, abandon, broadcast, device_name, share
from asyncrl.wire.store_server import StoreServer
from asyncrl.wire.torch_store import TorchStore

log = structlog.get_logger()

_TRIES = 3
"""So often a broadcast fails, with all generators alive, before that is an error."""


@dataclass(slots=True)
class WeightSyncStats:
    count: int = 0
    """Versions that all generators received that were there."""
    dropped: int = 0
    """How often a generator was dropped because it was late with an answer, or that or its bytes were wrong."""
    wait_s: float = 0.0
    """Time that `WeightSender.send` waited for the broadcast before it."""
    broadcast_s: float = 0.0
    """From the beginning of the copy until all generators have a version, summed."""
    bytes: int = 0
    """Of weights sent, each version counted once."""


@dataclass(slots=True)
class Delivery:
    """The sender's part in all rounds: rank 0 of every group. `check` is called all the time and may raise."""

    store: StoreServer
    membership: Membership
    stats: WeightSyncStats
    bucket_bytes: int
    timeout_s: float
    device: torch.device
    check: Callable[[], None]
    transport: str = "gloo"
    group: ProcessGroup | None = None
    group_ids: list[str] = field(default_factory=list[str])
    group_number: int = 0
    failures: int = 0
    """Broadcasts of the version that failed with all generators alive."""
    counted: int | None = None
    """Last version in `stats.count`."""
    offered: list[Peer] = field(default_factory=list[Peer])
    """Whose messages of the last round are in the store."""
    checksums: dict[int, int] = field(default_factory=dict[int, int])
    """Of the last version sent."""

    @property
    def receivers(self) -> str:
        """Names of the generators in the current round, for messages."""
        return ", ".join(peer.name for peer in self.offered) or "no generator"

    def deliver(self, version: int, pack: WeightBuffer) -> None:
        """Rounds until no generator is behind. Raises RunError when the transport does not work, or the learner does
        not fill the pack."""
        started = time.monotonic()
        self.failures = 0
        while behind := [
            peer for peer in self._acceptable(self.membership.present()) if peer.up and peer.version != version
        ]:
            self._round(version, pack, behind)
        if self.counted != version and self.membership.known:
            self.counted = version
            self.stats.count += 1
            self.stats.bytes += pack.buffer.numel()
            self.stats.broadcast_s += time.monotonic() - started

    def _round(self, version: int, pack: WeightBuffer, behind: Sequence[Peer]) -> None:
        weights = f"version {version} of the weights"
        self.tidy()
        self.offered = list(behind)
        for peer in behind:
            peer.offers += 1
        offer = {"version": version, "transport": self.transport, "bucket_bytes": self.bucket_bytes}
        self.membership.tell(behind, "offer", offer)
        ready = self._answers(behind, "ready", READY, f"become ready to receive {weights}", self.timeout_s)
        there = {peer.id for peer in self.membership.present()}  # who was ready early may have left since
        peers = [peer for peer, answer in ready if peer.id in there and self._loaded_right(peer, answer)]
        if not peers:
            return
        self._go(peers)
        # Nobody can be called out of a connect that waits for another one.
        called_s = time.monotonic() + self.timeout_s
        try:
            group = self._connected(len(peers) + 1)
            called_s = 0.0
            checksums = self._broadcast(group, pack)
        except AsyncrlError:
            raise
        except (RuntimeError, TimeoutError) as error:
            patience_s = max(0.0, called_s - time.monotonic()) + self._grace_s
            self._give_up(peers, f"survive the broadcast of {weights}", error, patience_s)
            return
        self.checksums = {version: checksums[0]}
        for peer, checksum in zip(peers, checksums[1:], strict=True):
            self._settle(peer, version, checksum)

    @property
    def _grace_s(self) -> float:
        """Time to answer for a generator that is told that a broadcast was given up."""
        return max(1.0, min(5.0, self.timeout_s / 4))

    def _answers(
        self, peers: Sequence[Peer], what: str, kind: TypeAdapter[T], phase: str, timeout_s: float
    ) -> list[tuple[Peer, T]]:
        """Each peer with its answer. Those that did not do `phase` in time, or sent something else, are dropped."""
        answers, failed = self.membership.collect(peers, what, kind, timeout_s)
        for peer, why in failed:
            self._drop(peer, f"{peer.name} did not {phase} {why}")
        return answers

    def _acceptable(self, peers: Sequence[Peer]) -> list[Peer]:
        """The peers without those that the transport cannot reach, since their GPU is the learner's or that of a peer
        that joined before: these are dropped."""
        if not TRANSPORTS[self.transport].on_device:
            return list(peers)
        owners = {device_name(self.device): "learner rank 0"}
        refused: list[Peer] = []
        for peer in sorted(peers, key=lambda peer: peer.number):
            owner = owners.setdefault(peer.device, peer.name)
            if owner != peer.name:
                refused.append(peer)
                self._drop(
                    peer,
                    f"{peer.name} is on the device of {owner} ({peer.device}), and {self.transport} needs one for each "
                    "of them; start it on another one, or the run with weights.transport=gloo",
                )
        return [peer for peer in peers if peer not in refused]

    def _drop(self, peer: Peer, reason: str, level: int = logging.WARNING) -> None:
        log.log(level, "a generator is dropped", generator=peer.rank - 1, reason=reason)
        self.membership.drop(peer, reason)
        self.stats.dropped += 1

    def _go(self, peers: Sequence[Peer]) -> None:
        """Tells each peer its place in the group: the one before when it has the same members."""
        ids = [peer.id for peer in peers]
        if ids != self.group_ids or self.group is None:
            self.drop_group()
            self.group_ids = ids
            self.group_number += 1
        for position, peer in enumerate(peers, start=1):
            self.membership.tell([peer], "go", {"group": self.group_number, "rank": position, "size": len(peers) + 1})
        self.membership.wake()

    def _connected(self, size: int) -> ProcessGroup:
        if self.group is None:
            member = Member(0, size, self.device, self.timeout_s)
            store = TorchStore(self.store.values, f"group/{self.group_number}/", self.timeout_s)
            self.group = TRANSPORTS[self.transport].connect(store, member)
        return self.group

    def _broadcast(self, group: ProcessGroup, pack: WeightBuffer) -> list[int]:
        """Checksums of what everyone has, by rank."""
        self.group = None  # a group that failed is not used again
        parts = pack.buckets(timeout_s=self.timeout_s, check=self.check)
        checksum = broadcast(group, parts, sends=True, timeout_s=self.timeout_s, check=self.check)
        device = pack.buffer.device
        checksums = share(group, checksum, device=device, timeout_s=self.timeout_s, check=self.check)
        self.group = group
        return checksums

    def _give_up(self, peers: Sequence[Peer], phase: str, error: Exception, patience_s: float) -> None:
        """Ends a broadcast that failed; who does not even answer to that is dropped. Raises RunError when it was
        nobody's fault too often."""
        reason = str(error).splitlines()[0]
        self.membership.tell(peers, "abort", {"reason": reason})
        answers = self._answers(peers, "received", RECEIVED, f"{phase} ({reason}), no answer", patience_s)
        told = "; ".join(f"{peer.name}: {answer.get('error', 'received all')}" for peer, answer in answers)
        log.info("a broadcast of weights failed", reason=reason, alive=told)
        self.failures += len(answers) == len(peers)
        if self.failures == _TRIES:
            raise RunError(f"weights: no generator did not {phase}, yet it failed {_TRIES} times ({reason}); {told}")

    def _settle(self, peer: Peer, version: int, checksum: int) -> None:
        """Takes what a peer has; it gets the bytes once more when they are not right."""
        if checksum == self.checksums[version]:
            peer.version, peer.failures = version, 0
            return
        peer.failures += 1
        what = "it received other bytes than were sent"
        if peer.failures > 1:
            self._drop(peer, f"{peer.name} did not get version {version} of the weights twice: {what}")
        else:
            log.warning("weights are sent once more", generator=peer.rank - 1, version=version, reason=what)

    def _loaded_right(self, peer: Peer, answer: ReadyBody) -> bool:
        loaded = answer["loaded"]
        if not loaded or self.checksums.get(loaded["version"], loaded["checksum"]) == loaded["checksum"]:
            return True
        reason = f"{peer.name} loaded other bytes than were sent as version {loaded['version']} of the weights"
        self._drop(peer, reason, logging.ERROR)
        return False

    def tidy(self) -> None:
        """Removes the messages of the last round."""
        self.membership.forget(self.offered)
        self.offered = []

    def drop_group(self) -> None:
        if self.group is not None:
            abandon(self.group)
        self.group = None
        self.store.values.delete_all("group/")
