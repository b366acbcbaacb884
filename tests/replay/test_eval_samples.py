"""Completions of evaluations: as arrays of a message, checked, and in the run's folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import ProtocolError
from asyncrl.replay.evaluation.samples import EvalSamples, pack_completions, unpack_completions
from asyncrl.samples.book import evaluated_versions, read_evaluated
from asyncrl.types import Prompt
from asyncrl.wire.messages import Evaluated

RESULT = Evaluated(4, 0, 20, "test", [1.0, 0.0, 0.5], ["completed", "truncated", "completed"], 6)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_completions_arrive_as_they_were_sent() -> None:
    arrays = pack_completions([[1, 2], [], [3, 4, 5], [6]], limit=3)
    assert [one.tolist() for one in unpack_completions(RESULT, arrays)] == [[1, 2], [], [3, 4, 5]]
    assert unpack_completions(RESULT, pack_completions([[1]], limit=0)) == []
    assert unpack_completions(RESULT, []) == []


@pytest.mark.parametrize(
    "arrays",
    [
        [ints(1, 2)],
        [ints(1, 2), ints(1, 2)],
        [ints(1, 2), ints(3, -1)],
        [ints(1, 2, 3, 4), ints(1, 1, 1, 1)],
        [ints(1, 2), np.array([2.0], dtype=np.float32)],
        [ints(1, 2).reshape(1, 2), ints(2)],
        [ints(1, 2), ints(2), ints(2)],
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays: list[np.ndarray]) -> None:
    with pytest.raises(ProtocolError, match="evaluated"):
        unpack_completions(RESULT, arrays)


def test_completions_are_recorded_with_their_prompt_and_reward(tmp_path: Path) -> None:
    samples = EvalSamples(tmp_path)
    prompt = Prompt(9, ints(7, 8), "1", "test")
    samples.add(prompt, RESULT, [])
    assert evaluated_versions(tmp_path) == []
    samples.add(prompt, RESULT, [ints(1, 2), ints(3)])
    found = read_evaluated(tmp_path, 20)
    assert [tokens.tolist() for tokens in found["tokens"]] == [[7, 8, 1, 2], [7, 8, 3]]
    rows = found.table.select(["row", "reward", "status", "end_version", "num_action_tokens", "outcome"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        (9, 1.0, "completed", 20, 2, "evaluated"),
        (9, 0.0, "truncated", 20, 1, "evaluated"),
    ]
