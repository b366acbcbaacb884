"""The routing of groups: on the wire and in the journal, where a group has one, and where it has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncrl.errors import InvariantError, ProtocolError
from asyncrl.replay.codec import JournalRecord, check_group, pack_batch, pack_group, unpack_batch, unpack_group
from asyncrl.types import NO_VERSION, Group, Trajectory
from asyncrl.wire.frames import decode, encode

LENGTHS = (5, 3)


def group_of(ticket: int, *shape: int) -> Group:
    rng = np.random.default_rng(ticket)
    rows: list[Trajectory] = []
    for length in LENGTHS:
        mask = np.arange(length) > 1
        rows.append(
            Trajectory(
                tokens=rng.integers(0, 99, length).astype(np.int32),
                action_mask=mask,
                behavior_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
                versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
                status="completed",
                routing=rng.integers(0, 256, (length, *shape)).astype(np.uint8) if shape else None,
            )
        )
    return Group(ticket, 0, 0, 0, "test", 0, 0, rows)


def same(one: Group, other: Group) -> bool:
    pairs = [(a.routing, b.routing) for a, b in zip(one.trajectories, other.trajectories, strict=True)]
    return all((a is None and b is None) or np.array_equal(a, b) for a, b in pairs)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(3, 2), ()])
def test_a_message_has_the_routing_of_its_group(shape: tuple[int, ...]) -> None:
    group = group_of(1, *shape)
    header, arrays = pack_group(group)
    message = decode("run", encode("run", header, arrays=[arrays]))
    assert len(message.arrays) == message.body.num_arrays == (5 if shape else 4)
    assert same(unpack_group(message.body, message.arrays), group)


def test_the_journal_returns_each_groups_own_arrays() -> None:
    groups = [group_of(1, 3, 2), group_of(2), group_of(3, 1, 4)]
    records = [[JournalRecord("note", b""), JournalRecord("group", b"", pack_group(group)[1])] for group in groups]
    read = unpack_batch(memoryview(pack_batch([one for pair in records for one in pair])))
    assert not read[0].arrays
    for number, group in enumerate(groups):
        _, arrays = pack_group(group)
        found = read[2 * number + 1].arrays
        assert len(found) == len(arrays)
        assert all(np.array_equal(one, other) for one, other in zip(found, arrays, strict=True))


@pytest.mark.parametrize(
    ("routing", "drop", "text"),
    [
        ([3, 1], 0, r"a routing of \(48,\) is none of 8 tokens with \[3, 1\]"),
        ([6], 0, r"is none of 8 tokens with \[6\]"),
        ([3, 2], 1, "expected frames of tokens, action_mask, behavior_logprobs and versions, and a routing"),
        ([], 0, "expected frames of tokens, action_mask, behavior_logprobs and versions"),
    ],
)
def test_a_routing_that_is_not_of_the_tokens_is_refused(routing: list[int], drop: int, text: str) -> None:
    header, arrays = pack_group(group_of(1, 3, 2))
    header.routing = routing
    with pytest.raises(ProtocolError, match=f"group of ticket 1: .*{text}"):
        check_group(header, arrays[: 5 - drop], group_size=2)


def test_a_group_with_a_routing_in_some_trajectories_is_refused() -> None:
    group: Any = group_of(1, 3, 2)
    group.trajectories[1].routing = None
    with pytest.raises(InvariantError, match="ticket 1: 1 of 2 trajectories have a routing"):
        pack_group(group)
