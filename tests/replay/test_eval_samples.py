"""Completions of evaluations: as arrays of a message, checked, and in the run's folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import ProtocolError
from asyncrl.observe.samples import evaluated_versions, read_evaluated
from asyncrl.replay.evaluation import EvalSamples, EvaluatedRow, pack_rows, unpack_rows
from asyncrl.types import Prompt
from asyncrl.wire.messages import Evaluated

RESULT = Evaluated(4, 0, 20, "test", [1.0, 0.0, 0.5], ["completed", "truncated", "completed"], 6)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_completions_arrive_as_they_were_sent() -> None:
    rows = [EvaluatedRow(member, tokens) for member, tokens in enumerate(([1, 2], [], [3, 4, 5], [6]))]
    found = unpack_rows(RESULT, pack_rows(rows, limit=3))
    assert [(row.member, list(row.tokens), row.action_mask) for row in found] == [
        (0, [1, 2], None),
        (1, [], None),
        (2, [3, 4, 5], None),
    ]
    assert unpack_rows(RESULT, pack_rows(rows, limit=0)) == []
    assert unpack_rows(RESULT, []) == []


def episode(member: int, text: str, *rewards: float) -> EvaluatedRow:
    """A row whose tokens are the policy's where the text has an x."""
    return EvaluatedRow(member, range(len(text)), np.array([one == "x" for one in text]), rewards)


def test_episodes_are_recorded_with_all_rows_their_turns_and_rewards(tmp_path: Path) -> None:
    rows = [episode(0, "..xx.x", 0.5, 0.0), episode(0, ".x", 1.0), episode(1, "..."), episode(2, ".x", 1.0)]
    found = unpack_rows(RESULT, pack_rows(rows, limit=2))
    assert [(row.member, list(row.turn_rewards)) for row in found] == [(0, [0.5, 0.0]), (0, [1.0]), (1, [])]
    EvalSamples(tmp_path).add(Prompt(9, ints(7, 8), "1", "test"), RESULT, found)
    read = read_evaluated(tmp_path, 20)
    columns = ["index", "member", "reward", "segment_tokens", "turn_rewards", "num_prompt_tokens"]
    assert [tuple(row.values()) for row in read.table.select(columns).to_pylist()] == [
        (0, 0, 1.0, [2, 2, 1, 1], [0.5, 0.0], 2),
        (1, 0, 1.0, [1, 1], [1.0], 1),
        (2, 1, 0.0, [3], [], 3),
    ]
    parts = [(part.tokens, part.said, part.reward) for part in read.turns(0)]
    assert parts == [([2, 3], True, 0.5), ([4], False, None), ([5], True, 0.0)]


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
        [ints(1, 2), ints(2), np.array([False]), ints(0), np.array([], dtype=np.float32)],
        [ints(1, 2), ints(2), np.array([False, True]), ints(0), np.array([], dtype=np.float32)],
        [ints(1, 2), ints(2), np.array([False, True]), ints(3), np.array([1.0], dtype=np.float32)],
        [ints(1, 2), ints(2), np.array([False, True]), ints(0, 1), np.array([1.0], dtype=np.float32)],
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays: list[np.ndarray]) -> None:
    with pytest.raises(ProtocolError, match="evaluated"):
        unpack_rows(RESULT, arrays)


def test_completions_are_recorded_with_their_prompt_and_reward(tmp_path: Path) -> None:
    samples = EvalSamples(tmp_path)
    prompt = Prompt(9, ints(7, 8), "1", "test")
    samples.add(prompt, RESULT, [])
    assert evaluated_versions(tmp_path) == []
    samples.add(prompt, RESULT, [EvaluatedRow(0, ints(1, 2)), EvaluatedRow(1, ints(3))])
    found = read_evaluated(tmp_path, 20)
    assert [tokens.tolist() for tokens in found["tokens"]] == [[7, 8, 1, 2], [7, 8, 3]]
    rows = found.table.select(["row", "reward", "status", "end_version", "num_action_tokens", "outcome"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        (9, 1.0, "completed", 20, 2, "evaluated"),
        (9, 0.0, "truncated", 20, 1, "evaluated"),
    ]
