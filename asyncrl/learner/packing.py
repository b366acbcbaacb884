"""Distributes sequences over bins of limited size, so that those with common tokens lie together."""

from __future__ import annotations

import numpy as np

from asyncrl.learner.model.packed_attention import Integers


def pack_groups(lengths: Integers, groups: Integers, capacity: int, members: Integers | None = None) -> list[Integers]:
    """Returns the sequence numbers of each micro-batch of at most `capacity` tokens. Groups stay together if they fit,
    else the sequences of each of their `members`, so that their common tokens are computed once."""

    def join(parts: list[Integers]) -> list[Integers]:
        sizes = np.array([lengths[part].sum() for part in parts], dtype=np.int64)
        return [np.sort(np.concatenate([parts[i] for i in chosen])) for chosen in pack(sizes, capacity)]

    def split(owners: Integers, among: Integers) -> list[Integers]:
        return [among[owners[among] == owner] for owner in np.unique(owners[among])]

    members = np.arange(len(lengths)) if members is None else members
    chunks: list[Integers] = []
    for of_group in split(groups, np.arange(len(lengths))):
        of_members = split(members, of_group)
        chunks += join([rows[chosen] for rows in of_members for chosen in pack(lengths[rows], capacity)])
    return join(chunks)


def pack(lengths: Integers, capacity: int) -> list[Integers]:
    """Returns the item numbers of each bin by first-fit decreasing; an item longer than `capacity` gets its own bin."""
    free: list[int] = []
    members: list[list[int]] = []
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        place = next((i for i, space in enumerate(free) if length <= space), len(free))
        if place == len(free):
            free.append(capacity)
            members.append([])
        free[place] -= length
        members[place].append(number)
    return [np.sort(np.array(chosen, dtype=np.int64)) for chosen in members]
