"""The completions of evaluations: as arrays of a message, and in the run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ProtocolError
from asyncrl.observe.samples import Samples, append_rows, evaluated_file, segments_of
from asyncrl.types import EpisodeOutcome, Group, Prompt, Trajectory
from asyncrl.wire.messages import Evaluated

Tokens = NDArray[np.int32]


class EvaluatedRow(NamedTuple):
    """A completion, or a row of an episode."""

    member: int
    """Index of the completion or the episode."""
    tokens: Sequence[int] | Tokens
    """Of an episode with its prompt."""
    action_mask: NDArray[np.bool_] | None = None
    """[tokens], true where the policy sampled the token; None for a completion."""
    turn_rewards: Sequence[float] = ()


def pack_rows(rows: Sequence[EvaluatedRow], *, limit: int) -> list[NDArray[Any]]:
    """The arrays that go with `Evaluated`: the tokens of the first `limit` completions end to end, and their lengths;
    of episodes also the action masks, the member of each row, and the rewards of the turns. With as many members as a
    group has they are smaller than a group, which is the limit of a message."""
    kept = [row for row in rows if row.member < limit]
    tokens = np.array([token for row in kept for token in row.tokens], dtype=np.int32)
    arrays: list[NDArray[Any]] = [tokens, np.array([len(row.tokens) for row in kept], dtype=np.int32)]
    masks = [row.action_mask for row in kept if row.action_mask is not None]
    if masks:
        arrays += [np.concatenate(masks), np.array([row.member for row in kept], dtype=np.int32)]
        arrays.append(np.array([reward for row in kept for reward in row.turn_rewards], dtype=np.float32))
    return arrays


def unpack_rows(result: Evaluated, arrays: Sequence[NDArray[Any]]) -> list[EvaluatedRow]:
    """The inverse of `pack_rows`; a message without arrays has no rows. Raises ProtocolError."""
    if not arrays:
        return []
    kinds = "".join(array.dtype.kind if array.ndim == 1 else "?" for array in arrays)
    if kinds not in ("ii", "iibif"):
        raise ProtocolError(f"evaluated: arrays of the kinds {kinds}, expected ii or iibif")
    tokens, lengths = arrays[:2]
    members = arrays[3] if len(arrays) > 2 else np.arange(len(lengths))
    good = len(members) == len(lengths) and 0 <= members.min(initial=0) <= members.max(initial=0) < len(result.rewards)
    if not good or lengths.min(initial=0) < 0 or int(lengths.sum(dtype=np.int64)) != len(tokens):
        raise ProtocolError(
            f"evaluated: {len(lengths)} rows with {len(tokens)} tokens, for {len(result.rewards)} rewards"
        )
    ends = np.cumsum(lengths)[:-1]
    own = np.split(tokens, ends) if len(lengths) else []
    if len(arrays) == 2:
        return [EvaluatedRow(member, row) for member, row in enumerate(own)]
    _, _, mask, _, rewards = arrays
    masks = np.split(mask, ends) if len(mask) == len(tokens) else []
    turns = [len(segments_of(one)) // 2 for one in masks]
    if len(masks) != len(own) or sum(turns) != len(rewards):
        raise ProtocolError(f"evaluated: {len(mask)} values of a mask and {len(rewards)} rewards of {sum(turns)} turns")
    given = np.split(rewards, np.cumsum(turns)[:-1])
    return [
        EvaluatedRow(*row) for row in zip(members.tolist(), own, masks, (one.tolist() for one in given), strict=True)
    ]


class EvalSamples:
    """Writes the completions of each evaluation to a file of its own in the run's folder."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def add(self, prompt: Prompt, result: Evaluated, rows: Sequence[EvaluatedRow]) -> None:
        """Appends the completions of one prompt, or the rows of its episodes."""
        if not rows:
            return
        group = Group(
            ticket=result.ticket,
            attempt=result.attempt,
            generator=0,
            row=prompt.row,
            data_source=prompt.data_source,
            start_version=result.version,
            end_version=result.version,
            trajectories=[_trajectory(prompt, row, result) for row in rows],
        )
        append_rows(evaluated_file(self._run_dir, result.version), Samples.of_groups([group], outcome="evaluated"))


def _trajectory(prompt: Prompt, row: EvaluatedRow, result: Evaluated) -> Trajectory:
    tokens, mask, episode = np.asarray(row.tokens), row.action_mask, None
    if mask is None:
        tokens = np.concatenate([prompt.tokens, tokens])
        mask = np.arange(len(tokens)) >= len(prompt.tokens)
    else:
        episode = EpisodeOutcome("done", list(row.turn_rewards), 0, 0.0, 0, 0)  # of which the rewards are recorded
    return Trajectory(
        tokens=tokens.astype(np.int32),
        action_mask=mask,
        behavior_logprobs=np.zeros(len(tokens), dtype=np.float32),
        versions=np.where(mask, result.version, -1).astype(np.int32),
        status=result.status[row.member],
        reward=result.rewards[row.member],
        episode=episode,
        member=row.member,
    )
