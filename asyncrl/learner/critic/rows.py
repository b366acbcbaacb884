"""The message format of packed rows that learner ranks send to a critic rank. Received rows are checked before use."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch

from asyncrl.errors import ProtocolError
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.model.packed_attention import find_firsts, make_layout
from asyncrl.wire.frames import NAMES, Array, Message

ARRAYS_PER_ROW = 3


def pack_row(micro: MicroBatch) -> list[Array]:
    """Returns the tokens, the sequence lengths, and the positions whose hidden states are valued. A position before an
    action token is never the last of its sequence, so last positions are always those of `ends`."""
    starts = torch.nonzero(micro.position_ids == 0).flatten()
    lengths = torch.diff(starts, append=torch.tensor([len(micro.input_ids)]))
    valued = torch.cat([micro.logit_index, micro.ends]).sort().values
    return [tensor.to(torch.int32).numpy() for tensor in (micro.input_ids, lengths, valued)]


def check_rows(message: Message, *, minibatches: int, vocabulary: int) -> None:
    """Raises ProtocolError unless the "value" request has `minibatches` mini-batches of complete rows with tokens below
    `vocabulary`."""
    body, arrays = message.body, message.arrays
    rows = len(body.names)
    if len(body.minibatches) != minibatches or sum(body.minibatches) != rows:
        raise ProtocolError(
            f"value: {rows} rows in mini-batches of {str(body.minibatches[:minibatches])[:100]}, expected "
            f"{minibatches} mini-batches (learner.minibatches) that add up to them"
        )
    if len(arrays) != ARRAYS_PER_ROW * rows or any(NAMES[a.dtype] != "i4" or a.ndim != 1 for a in arrays):
        raise ProtocolError(f"value: {rows} rows need {ARRAYS_PER_ROW} frames each, i4 in one dimension")
    for number, (row, names) in enumerate(zip(_rows(arrays), body.names, strict=True)):
        _check_row(row, len(names), vocabulary, f"value: row {number}")


def check_returns(message: Message, *, step: int, tokens: int) -> None:
    """Raises ProtocolError unless the "train" request has the returns of `tokens` tokens, valued at step `step`."""
    if message.body.step != step:
        raise ProtocolError(f"train: step {message.body.step}, the most recent values are of step {step}")
    given = [f"{NAMES[array.dtype]}{list(array.shape)}" for array in message.arrays]
    if given != [f"f4[{tokens}]"]:
        raise ProtocolError(f"train: frames of {', '.join(given[:3]) or 'nothing'}, expected one of f4[{tokens}]")


def unpack_rows(message: Message) -> list[list[MicroBatch]]:
    """Returns the micro-batches of each mini-batch from a request that passed `check_rows`; fields that a critic does
    not need are zero."""
    rows = zip(_rows(message.arrays), message.body.names, strict=True)
    starts = accumulate((len(names) for names in message.body.names), initial=0)
    micro_batches = iter([_unpack(row, names, start) for (row, names), start in zip(rows, starts, strict=False)])
    return [[next(micro_batches) for _ in range(count)] for count in message.body.minibatches]


def _rows(arrays: list[Array]) -> list[list[Array]]:
    return [arrays[i : i + ARRAYS_PER_ROW] for i in range(0, len(arrays), ARRAYS_PER_ROW)]


def _check_row(row: list[Array], sequences: int, vocabulary: int, where: str) -> None:
    input_ids, lengths, valued = row
    size = len(input_ids)
    if not sequences or len(lengths) != sequences:
        raise ProtocolError(f"{where}: {sequences} names for {len(lengths)} sequences, expected at least one of each")
    if lengths.min() < 1 or lengths.sum(dtype=np.int64) != size:
        raise ProtocolError(f"{where}: lengths of at least 1 must add up to its {size} tokens")
    if input_ids.min() < 0 or input_ids.max() >= vocabulary:
        raise ProtocolError(
            f"{where}: tokens from {input_ids.min()} to {input_ids.max()}, the critic's vocabulary has {vocabulary}; "
            "set critic.path to a model with the tokens of model.path"
        )
    if not len(valued):
        return
    if valued[0] < 0 or valued[-1] >= size or np.any(valued[:-1] >= valued[1:]):
        raise ProtocolError(f"{where}: valued positions must ascend from 0 and be less than its {size} tokens")


def _unpack(row: list[Array], names: list[tuple[int, int]], start: int) -> MicroBatch:
    """Every sequence counts as a member, from `start` on: the critic's losses are means over tokens."""
    input_ids, lengths, valued = (array.astype(np.int64) for array in row)
    ends = np.cumsum(lengths)
    is_last = np.isin(valued, ends - 1)
    logit_index = valued[~is_last]
    positions = np.arange(len(input_ids)) - np.repeat(ends - lengths, lengths)
    nothing = torch.zeros(len(logit_index))
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(positions),
        layout=make_layout(lengths, find_firsts(input_ids, lengths, np.array([ticket for ticket, _ in names]))),
        logit_index=torch.from_numpy(logit_index),
        targets=torch.from_numpy(input_ids[logit_index + 1]),
        behavior_logprobs=nothing,
        versions=nothing.long(),
        seq=torch.from_numpy(np.searchsorted(ends, logit_index, side="right")),
        names=names,
        ends=torch.from_numpy(valued[is_last]),
        members=np.arange(start, start + len(names)),
    )
