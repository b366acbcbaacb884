"""What the replay queue accepts, the learner can collate and compute: otherwise a group would end the run for good."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import make_config, make_trainer

from asyncrl.errors import ProtocolError
from asyncrl.learner.batch import collate
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.step import Trainer
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.codec import GroupLimits, pack_group, unpack_group
from asyncrl.replay.queue import ReplayQueue
from asyncrl.types import NO_VERSION, Trajectory
from asyncrl.util.model_files import num_embeddings
from tests.helpers.examples import examples
from tests.helpers.replay import PROMPT_TOKENS, EndlessPrompts, ask_queue, make_group, small_config

COMPLETION_TOKENS = 6
INTEGERS = st.one_of(st.integers(-2, 12), st.sampled_from([2**31 - 1, -(2**31), 63, 64, 1000]))
LOGPROBS = st.one_of(st.floats(-30, 0, width=32), st.sampled_from([1e30, -3e38, 0.5, float("nan"), float("-inf")]))
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["tokens", "action_mask", "behavior_logprobs", "versions", "action", "length"]),
        st.integers(0, PROMPT_TOKENS + COMPLETION_TOKENS - 1),
        INTEGERS,
        LOGPROBS,
    ),
    max_size=3,
)


@pytest.fixture(scope="module")
def trainer(one_rank: Ranks, tiny_model: Path) -> Trainer:
    return make_trainer(make_config(tiny_model), one_rank)


def changed(trajectory: Trajectory, kind: str, place: int, number: int, logprob: float) -> None:
    place = min(place, len(trajectory.tokens) - 1)
    if kind == "length":
        for name in ("tokens", "action_mask", "behavior_logprobs", "versions"):
            array = getattr(trajectory, name)
            more = np.repeat(array[-1:], 500) if number > 12 else array[:0]
            setattr(trajectory, name, np.concatenate([array, more]))
    elif kind == "action":
        trajectory.action_mask[place], trajectory.versions[place] = True, max(number, 0) % 2
    elif kind == "behavior_logprobs":
        trajectory.behavior_logprobs[place] = logprob
    elif kind == "action_mask":
        trajectory.action_mask[place] = number > 0
    else:
        getattr(trajectory, kind)[place] = number


@settings(max_examples=examples(40))
@given(changes=CHANGES)
def test_the_learner_can_compute_any_group_that_the_queue_accepts(
    trainer: Trainer, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, changes: list
) -> None:
    vocabulary = num_embeddings(str(tiny_model))
    assert vocabulary is not None
    config = small_config(replay__groups_per_step=1, replay__zero_variance="train")
    queue = ReplayQueue(
        config,
        EndlessPrompts(),
        TraceWriter(tmp_path_factory.mktemp("trace") / "trace.parquet"),
        limits=GroupLimits(vocabulary, PROMPT_TOKENS + COMPLETION_TOKENS),
    )
    (lease, *_), _ = ask_queue(queue, 0, 0, 1)
    group = make_group(lease, 0, completion_tokens=(COMPLETION_TOKENS, 3))
    for change in changes:
        changed(group.trajectories[0], *change)
    header, arrays = pack_group(group)
    try:
        queue.finish(header, arrays)
    except ProtocolError:
        assert changes, "an unchanged group is accepted"
        return
    outcome, finished = queue.take(0, 1)
    assert outcome == "shard"
    (kept,) = finished
    batch = collate([unpack_group(*kept)], config, version=0)
    for micro in batch.micro_batches:
        assert torch.isfinite(trainer.policy.logprobs(micro)).all()
        assert (micro.versions != NO_VERSION).all()
