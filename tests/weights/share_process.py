"""A learner rank that sends its share of versions, in a process of its own: does what its standard input says.

    python share_process.py RANK RANKS ADDRESS STORE TIMEOUT_S

"send VERSION" sends the rank's slices of the test's weights of that version, "wait" prints a line when they are
published. "kill write N" has the process end in its N-th write from then on, "kill ordered" before it carries the next
order out, "kill written" behind that, "kill kept" when the version is there. Rank 0 serves the others at the address,
and prints what it announces.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from small_pieces import shrink_pieces
from stored_parts import trained
from weight_parts import manifest_of, sliced

from asyncrl.errors import AsyncrlError
from asyncrl.weights.background import BackgroundSender
from asyncrl.weights.file_transport import FileSender, Published, RankFileSender, ShareWriter, Written
from asyncrl.weights.ranks import RankCoordinator
from asyncrl.weights.version_store import Folder
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.messages import Announced, Follower
from asyncrl.wire.store import StoreServer
from tests.helpers.forked_scripts import print_json

KILLED = 9


def announce(announced: Announced, check: Callable[[], None]) -> Sequence[Follower]:
    print_json(msgspec.structs.asdict(announced))
    return []


def make_sender(rank: int, ranks: int, address: str, url: str, timeout_s: float) -> BackgroundSender:
    manifest = manifest_of(trained(0))
    if rank:
        endpoints = Endpoints("run-0f", "", address, "")
        return RankFileSender(manifest, url, endpoints, rank=rank, ranks=ranks, timeout_s=timeout_s)
    others = RankCoordinator(StoreServer(address, "shares", run_id="run-0f"), ranks - 1, Written, timeout_s=timeout_s)
    return FileSender(
        manifest, url, announce, full_every=4, keep=2, run_id="run-0f", timeout_s=timeout_s, others=others
    )


def kill_in_write(count: int) -> None:
    write = Folder.write
    left = count

    def killing(self: Folder, name: str, chunks: Any) -> Any:
        nonlocal left
        left -= 1
        return write(self, name, chunks if left else _half(chunks))

    Folder.write = killing  # type: ignore[method-assign]


def kill_at_order(moment: str) -> None:
    carry_out = ShareWriter.carry_out

    def killing(self: ShareWriter, order: Any, own: Any) -> Any:
        answer = carry_out(self, order, own) if moment != "ordered" else None
        if moment != "kept" or isinstance(order, Published):
            os._exit(KILLED)
        return answer

    ShareWriter.carry_out = killing  # type: ignore[method-assign]


def _half(chunks: Any) -> Any:
    first = next(iter(chunks))
    yield first[: len(first) // 2]
    os._exit(KILLED)


def main() -> None:
    shrink_pieces()
    rank, ranks, address, url, timeout_s = sys.argv[1:]
    sender = make_sender(int(rank), int(ranks), address, url, float(timeout_s))
    for line in sys.stdin:
        match line.split():
            case ["kill", "write", count]:
                kill_in_write(int(count))
            case ["kill", moment]:
                kill_at_order(moment)
            case ["send", version]:
                sender.send(int(version), sliced(trained(int(version)), int(rank), int(ranks)))
            case _:
                try:
                    sender.wait()
                    print_json({"bytes": sender.stats.bytes})
                except AsyncrlError as error:
                    print_json({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
