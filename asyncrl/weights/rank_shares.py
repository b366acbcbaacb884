"""The shares of a version that the learner's ranks send, and rank 0's orders for the other ranks.

Every rank is the sender of a link of its own to the same receivers. Only rank 0 talks to these. It has the other ranks
connect and send as it does itself (`rank_share_sender.py`), and ends a round when one of them cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.weights.buckets import RunningChecksum, WeightBuffer
from asyncrl.weights.other_ranks import OtherRanks
from asyncrl.weights.references import Buffer, WeightReferences
from asyncrl.weights.shares import RankShare
from asyncrl.weights.transports import Link, Member, Transport, problem
from asyncrl.wire.store import RemoteStore, Store
from asyncrl.wire.torch_store import group_store

SILENT_DEADLINES = 2
"""Deadlines of a phase after which a rank that says nothing is gone: it says nothing while it connects."""

TRANSPORT_KEY = "transport"
"""Key of the name of the transport."""


class VersionGoneError(RuntimeError):
    """Another rank has a later version by now; rank 0 will, too."""


class OrderPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A struct of an order."""


class SendShare(OrderPart, frozen=True, tag="send"):
    """Order to send the share of a version over the link with this number."""

    version: int
    group: int
    size: int
    """Number of members of the link."""


class Finish(OrderPart, frozen=True, tag="finish"):
    """Order to keep the version for generators that come late, and to take the next one."""

    version: int


class Has(OrderPart, frozen=True, tag="has"):
    """Order to answer as soon as there is this version."""

    version: int


Order = SendShare | Finish | Has


class Done(OrderPart, frozen=True):
    """Answer to an order."""

    checksum: int = 0
    problem: str = ""
    """Why the share was not sent; empty if it was."""
    is_ahead: bool = False
    """True if the rank has a later version by now."""


class OtherShares:
    """The other ranks, seen by rank 0. Without any, nothing is done."""

    def __init__(self, store: Store, count: int, *, timeout_s: float) -> None:
        self._store = store
        self._ranks = OtherRanks(store, count, Done, timeout_s=SILENT_DEADLINES * timeout_s) if count else None

    def announce(self, transport: str) -> None:
        """Tells them the transport, by which they know where their buffers have to be."""
        self._store.ask("set", [TRANSPORT_KEY], transport.encode())

    def order(self, order: Order, check: Callable[[], None]) -> None:
        """Has them carry an order out. Raises VersionGoneError, RuntimeError if one of them cannot, and
        PeerTimeoutError if one is silent; `check` is polled and may raise."""
        if self._ranks is not None:
            self._ranks.send(order)
            _raise_for(self._ranks.answers(check))

    def send(self, order: SendShare, own: Callable[[], int], check: Callable[[], None]) -> int:
        """Has them send their shares while `own` sends that of rank 0. Returns the sum of all checksums. Raises what
        `own` and `order` raise, once all have heard of it: with the causes of all ranks, since rank 0 may see the end
        of a link before it hears why it ended."""
        if self._ranks is None:
            return own()
        self._ranks.send(order)
        try:
            checksum = own()
            self._ranks.await_answers(lambda: (check(), self.raise_if_failed())[0])
        except AsyncrlError:
            raise
        except (RuntimeError, OSError) as error:
            reason = problem(error)
            self._ranks.abort(reason)
            others = self._ranks.answers(check)
            if causes := [one for one in others if one.problem and reason not in one.problem]:
                _raise_for([*causes, Done(problem=f"learner rank 0: {reason}")])
            raise
        answers = self._ranks.answers(check)
        _raise_for(answers)
        return checksum + sum(answer.checksum for answer in answers)

    def raise_if_failed(self) -> None:
        """Raises as `order` does if one of them has failed so far. Never waits."""
        if self._ranks is not None:
            _raise_for(self._ranks.answered())


def _raise_for(answers: list[Done]) -> None:
    if problems := [answer.problem for answer in answers if answer.problem]:
        is_ahead = any(answer.is_ahead for answer in answers)
        raise (VersionGoneError if is_ahead else RuntimeError)("; ".join(problems))


def link_of(store: Store | RemoteStore, way: Transport, group: int, member: Member) -> Link:
    """Connects the member to the others of a link."""
    assert way.connect is not None
    part = group_store(store, group, member.timeout_s).part(f"{member.sender}") if way.needs_group else None
    return way.connect(replace(member, store=part))


def send_share(
    link: Link, version: int, share: RankShare, buffer: Buffer, *, timeout_s: float, check: Callable[[], None],
    told: Callable[[], None] = lambda: None,
) -> int:  # fmt: skip
    """Sends a share. Returns the checksum of its bytes. `told` is called after each bucket."""
    total = RunningChecksum()

    def taken() -> Iterator[Tensor]:
        starts = (cut.start for cut in share.cuts)
        for bucket in total.over(buffer.buckets(timeout_s=timeout_s, check=check), starts):
            yield bucket
            told()

    link.send(version, taken())
    return total.of(share.num_bytes)


def buffer_of(
    share: RankShare, device: torch.device, way: Transport | None, *, bucket_bytes: int, copies: bool
) -> Buffer:
    """Makes the buffer of a share on this device, or holds references if nothing is to be copied. Raises ConfigError if
    a GPU's weights have to be copied to be sent."""
    on_device = way is not None and way.on_device
    pinned = device.type == "cuda"
    if not copies:
        if pinned and not on_device:
            raise ConfigError(
                "weights.staging = 'buckets': the transport sends from host memory, and the weights are on a GPU; use "
                "weights.transport=nccl or weights.staging=whole"
            )
        return WeightReferences(share, device)
    if not on_device:
        device = torch.device("cpu")
    cuts = [(cut.own, cut.own + cut.num_bytes) for cut in share.cuts]
    return WeightBuffer(share.layout, device, pinned=pinned, bucket_bytes=bucket_bytes, cuts=cuts)
