"""Distributes the groups of a packed batch over other mini-batches, in an order that may be random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from asyncrl.learner.batch import Batch, MicroBatch
from asyncrl.learner.collate import Rows, make_micro_batch
from asyncrl.learner.model.packed_attention import Integers
from asyncrl.learner.packing import pack_groups


def repack(
    batch: Batch, minibatches: int, *, tokens_per_microbatch: int, rng: np.random.Generator | None = None
) -> tuple[list[list[MicroBatch]], list[int]]:
    """Returns the micro-batches of `minibatches` mini-batches of complete groups, with the tokens and sequences of
    `batch`, and the number of members of each, trained or not. Their spans are places in `batch`, so that its columns
    stay valid.

    Every mini-batch gets the same number of groups, or one more: of those in the order of their tickets, or of a random
    order with `rng`.
    """
    rows = _rows_of(batch)
    counts = np.bincount(batch.seq.numpy(), minlength=len(rows.names))
    firsts = np.cumsum(counts) - counts
    tickets = np.array([ticket for ticket, _ in rows.names], dtype=np.int64)
    order = np.unique([*tickets.tolist(), *batch.group_sizes]).astype(np.int64)
    if rng is not None:
        order = rng.permutation(order)
    parts: list[list[MicroBatch]] = []
    num_members: list[int] = []
    for number in range(minibatches):
        own = order[number::minibatches]
        num_members.append(sum(batch.group_sizes.get(ticket, 0) for ticket in own.tolist()))
        chosen = np.flatnonzero(np.isin(tickets, own))
        packed = pack_groups(rows.lengths[chosen], tickets[chosen], tokens_per_microbatch, rows.members[chosen])
        parts.append([_micro_batch(rows, chosen[members], firsts, counts) for members in packed])
    return parts, num_members


def _micro_batch(rows: Rows, members: Integers, firsts: Integers, counts: Integers) -> MicroBatch:
    own = counts[members]
    places = np.arange(own.sum()) + np.repeat(firsts[members] - (np.cumsum(own) - own), own)
    return replace(make_micro_batch(rows, members, 0), places=places)


def _rows_of(batch: Batch) -> Rows:
    """Returns the sequences of the batch in its order."""
    micro_batches = batch.micro_batches
    tokens = _join([micro.input_ids for micro in micro_batches])
    starts = torch.nonzero(_join([micro.position_ids for micro in micro_batches]) == 0).flatten()
    begins = np.cumsum([0, *(len(micro.input_ids) for micro in micro_batches)]).tolist()
    actions = _join([micro.logit_index + 1 + begin for micro, begin in zip(micro_batches, begins, strict=False)])
    action_mask = torch.zeros(len(tokens), dtype=torch.bool)
    behavior_logprobs, versions = torch.zeros(len(tokens)), torch.zeros(len(tokens), dtype=torch.int32)
    action_mask[actions] = True
    behavior_logprobs[actions] = batch.behavior_logprobs
    versions[actions] = _join([micro.versions for micro in micro_batches]).int()
    routings = [micro.routing for micro in micro_batches if micro.routing is not None]
    ended = torch.zeros(len(starts), dtype=torch.bool)
    ended[batch.ended] = True
    return Rows(
        tokens=tokens.int().numpy(),
        action_mask=action_mask.numpy(),
        behavior_logprobs=behavior_logprobs.numpy(),
        versions=versions.numpy(),
        starts=starts.numpy(),
        lengths=torch.diff(starts, append=torch.tensor([len(tokens)])).numpy(),
        names=[name for micro in micro_batches for name in micro.names],
        ended=ended.numpy(),
        members=batch.member.numpy(),
        routing=np.concatenate([one.experts.numpy() for one in routings]) if routings else None,
    )


def _join(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])
