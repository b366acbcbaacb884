"""The completions of evaluations: as arrays of a message, and in the run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ProtocolError
from asyncrl.samples import Samples
from asyncrl.samples.book import append_rows, evaluated_file
from asyncrl.types import Group, Prompt, Trajectory
from asyncrl.wire.messages import Evaluated

Tokens = NDArray[np.int32]


def pack_completions(completions: Sequence[Sequence[int]], *, limit: int) -> list[Tokens]:
    """The arrays that go with `Evaluated`: the tokens of the first `limit` completions end to end, and their lengths.
    With as many completions as a group has they are smaller than a group, which is the limit of a message."""
    kept = completions[:limit]
    tokens = [token for completion in kept for token in completion]
    return [np.array(tokens, dtype=np.int32), np.array([len(completion) for completion in kept], dtype=np.int32)]


def unpack_completions(result: Evaluated, arrays: Sequence[NDArray[Any]]) -> list[Tokens]:
    """The inverse of `pack_completions`; a message without arrays has no completions. Raises ProtocolError."""
    if not arrays:
        return []
    kinds = [(array.dtype.kind, array.ndim) for array in arrays]
    if kinds != [("i", 1), ("i", 1)]:
        raise ProtocolError(f"evaluated: arrays of {kinds}, expected the tokens and the lengths")
    tokens, lengths = arrays
    if (
        len(lengths) > len(result.rewards)
        or lengths.min(initial=0) < 0
        or int(lengths.sum(dtype=np.int64)) != len(tokens)
    ):
        raise ProtocolError(
            f"evaluated: {len(lengths)} completions with {len(tokens)} tokens, for {len(result.rewards)} rewards"
        )
    return np.split(tokens, np.cumsum(lengths)[:-1]) if len(lengths) else []


class EvalSamples:
    """Writes the completions of each evaluation to a file of its own in the run's folder."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def add(self, prompt: Prompt, result: Evaluated, completions: Sequence[Tokens]) -> None:
        """Appends the completions of one prompt."""
        if not completions:
            return
        members = [_trajectory(prompt, completion, result, index) for index, completion in enumerate(completions)]
        group = Group(
            ticket=result.ticket,
            attempt=result.attempt,
            generator=0,
            row=prompt.row,
            data_source=prompt.data_source,
            start_version=result.version,
            end_version=result.version,
            trajectories=members,
        )
        append_rows(evaluated_file(self._run_dir, result.version), Samples.of_groups([group], outcome="evaluated"))


def _trajectory(prompt: Prompt, completion: Tokens, result: Evaluated, index: int) -> Trajectory:
    tokens = np.concatenate([prompt.tokens, completion]).astype(np.int32)
    mask = np.arange(len(tokens)) >= len(prompt.tokens)
    return Trajectory(
        tokens=tokens,
        action_mask=mask,
        behavior_logprobs=np.zeros(len(tokens), dtype=np.float32),
        versions=np.where(mask, result.version, -1).astype(np.int32),
        status=result.status[index],
        reward=result.rewards[index],
    )
