"""The processes that a version goes through, and one broadcast with a deadline that can be given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import structlog
import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, Work

from asyncrl.weights.exchange import Wait
from asyncrl.weights.packing import checksum

log = structlog.get_logger()

_LOOK_S = 0.02
"""Pause between two calls of `check`."""
_WORD = 1 << 64


class Ranks(Protocol):
    """The part of a c10d process group that is used."""

    def broadcast(self, tensors: list[Tensor], opts: BroadcastOptions, /) -> Work: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> Work: ...

    def abort(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Group:
    """One process of a group that its transport connected."""

    ranks: Ranks
    size: int
    ends: Callable[[Work, float], bool]
    """Waits so many seconds at most; whether the work is done. Raises RuntimeError when it failed."""
    store: object = None
    """Which it was made with, and which it may need for as long as it is there."""

    def abort(self) -> None:
        """Ends what is under way in it; a group that cannot even be ended is left alone."""
        try:
            self.ranks.abort()
        except RuntimeError as error:
            log.warning("a group of processes could not be aborted", reason=str(error).splitlines()[0])


def broadcast(
    group: Group, parts: Iterable[Tensor], *, sends: bool, timeout_s: float, check: Callable[[], None]
) -> int:
    """Copies rank 0's bytes into everyone's `parts` and gives the checksum of what is there now.

    Rank 0, which `sends`, may make its parts while those before them travel. The deadline holds for each part. `check`
    is called all the time and may raise to give up. Raises TimeoutError, what `check` or the parts raise, or what the
    transport raises (RuntimeError); the group is lost then.
    """
    options = BroadcastOptions()
    options.rootRank = 0
    options.timeout = timedelta(seconds=timeout_s)
    works: list[tuple[Work, Tensor]] = []
    total = offset = 0
    try:
        for part in parts:
            works.append((group.ranks.broadcast([part], options), part))
            if sends:  # while the bytes are in the cache
                total += checksum(part, offset)
                offset += part.numel()
        for work, part in works:
            _await(group, work, timeout_s, check)
            if not sends:
                total += checksum(part, offset)
                offset += part.numel()
    except BaseException:
        retire(group, [work for work, _ in works])
        raise
    return total % _WORD


def share(group: Group, number: int, *, device: torch.device, timeout_s: float, check: Callable[[], None]) -> list[int]:
    """Everyone's number (of 64 bits), by rank. Raises as `broadcast` does."""
    own = torch.tensor([number - _WORD if number >= _WORD // 2 else number], device=device)
    all_of = [torch.empty_like(own) for _ in range(group.size)]
    works: list[Work] = []
    try:
        works.append(group.ranks.allgather([all_of], [own]))
        _await(group, works[0], timeout_s, check)
    except BaseException:
        retire(group, works)
        raise
    return [int(one) % _WORD for one in all_of]


def _await(group: Group, work: Work, timeout_s: float, check: Callable[[], None]) -> None:
    wait = Wait()
    while not group.ends(work, _LOOK_S):
        check()
        if wait.look() > timeout_s:
            raise TimeoutError(f"a bucket was not through within {timeout_s:g} s")


def retire(group: Group, works: Sequence[Work] = ()) -> None:
    """Ends a group without waiting for operations that may be stuck in it.

    The destructor of a group joins its threads. A daemon thread holds the group until its operations ended by
    themselves; one that is still stuck when the process exits does not hold the exit up. The thread sleeps in
    Python and not inside the operation: a thread that wakes up in C++ during the exit would crash the process.
    """
    group.abort()
    threading.Thread(target=_hold, args=(group, list(works)), name="weights-retired", daemon=True).start()


def _hold(group: Group, works: list[Work]) -> None:
    while not all(work.is_completed() for work in works):
        time.sleep(0.1)
    del group
